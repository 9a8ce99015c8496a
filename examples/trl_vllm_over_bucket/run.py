"""TRL and vLLM share only a bucket: an S3 server, a vLLM server with its sidecar, and a trainer, each in its own process.

    python examples/trl_vllm_over_bucket/run.py [STEPS [URL]]

With a URL (s3://bucket/prefix, credentials in the environment) the bucket is a real one. In production the two sides are machines that
cannot reach each other's weights. The trainer does reach the server's port for completions, as TRL requires.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

HERE = Path(__file__).parent
S3 = {"AWS_ACCESS_KEY_ID": "example", "AWS_SECRET_ACCESS_KEY": "example", "AWS_REGION": "us-east-1"}
VLLM = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main(steps: int, url: str | None = None) -> None:
    folder = Path(tempfile.mkdtemp(prefix="deltawire-example-"))
    model = folder / "model"
    subprocess.run([sys.executable, HERE / "tiny_model.py", model], check=True)
    s3, vllm = free_port(), free_port()
    server = f"http://127.0.0.1:{vllm}"
    bucket: dict[str, str] = {}
    processes = []
    try:
        if url is None:
            url, bucket = "s3://policy/run-1", {**S3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}"}
            processes.append(start(folder / "s3.log", ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3)], {}))
            wait_for(f"http://127.0.0.1:{s3}/moto-api/", processes[-1])
            httpx.put(f"http://127.0.0.1:{s3}/policy", trust_env=False).raise_for_status()
        backend = ["--weight-transfer-config", '{"backend": "deltawire"}', "--enforce-eager", "--max-model-len", "256"]
        backend += ["--enable-scale-out"]  # needed to label samples with the versions that made them
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(vllm), "--host", "127.0.0.1", *backend]
        processes.append(start(folder / "vllm.log", command, VLLM))
        wait_for(f"{server}/health", processes[-1])
        command = ["-m", "deltawire.cli", "sidecar", "--engine", server, "--from", url, "--mirror", str(folder / "mirror"), "--poll", "0.1"]
        processes.append(start(folder / "sidecar.log", command, bucket))
        command = [sys.executable, HERE / "train.py", model, url, server, str(steps)]
        subprocess.run(command, env={**os.environ, **bucket, "HF_HUB_OFFLINE": "1"}, check=True)
        print((folder / "sidecar.log").read_text())
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(log: Path, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True)


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            httpx.get(url, timeout=5, trust_env=False).raise_for_status()  # requests to this machine must not go through a proxy
            return
        except httpx.HTTPError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{url} does not answer") from None
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, *sys.argv[2:3])

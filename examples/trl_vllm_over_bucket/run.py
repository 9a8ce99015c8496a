"""TRL and vLLM share only a bucket: an S3 server, a vLLM server with its sidecar, and a trainer, each in its own process.

    python examples/trl_vllm_over_bucket/run.py [STEPS [URL]]

With a URL (s3://bucket/prefix, credentials in the environment) the bucket is a real one. In production the two sides are machines that
cannot reach each other's weights. The trainer does reach the server's port for completions, as TRL requires.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from local_processes import free_port, kill, print_logs, start, start_vllm, wait_for  # noqa: E402

S3 = {"AWS_ACCESS_KEY_ID": "example", "AWS_SECRET_ACCESS_KEY": "example", "AWS_REGION": "us-east-1"}


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
        processes.append(start_vllm(folder / "vllm.log", model, vllm))
        wait_for(f"{server}/health", processes[-1])
        command = ["-m", "deltawire.cli", "sidecar", "--engine", server, "--from", url, "--mirror", str(folder / "mirror"), "--poll", "0.1"]
        processes.append(start(folder / "sidecar.log", command, bucket))
        command = [sys.executable, HERE / "train.py", model, url, server, str(steps)]
        subprocess.run(command, env={**os.environ, **bucket, "HF_HUB_OFFLINE": "1"}, check=True)
        print((folder / "sidecar.log").read_text())
    except BaseException:
        print_logs(folder)
        raise
    finally:
        kill(reversed(processes))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, *sys.argv[2:3])

"""Starts the processes of an example on this machine, and waits for servers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx

VLLM = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""The environment of a vLLM server."""


def start(log: Path, arguments: list[str], environment: Mapping[str, str], folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start Python with these arguments, in a folder. Its output goes to the log."""
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        environment = {**os.environ, **environment}
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True)


def start_vllm(log: Path, model: Path, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a vLLM server that deltawire updates."""
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--weight-transfer-config", '{"backend": "deltawire"}', "--enforce-eager", "--max-model-len", "256"]
    command += ["--enable-scale-out", *arguments]  # needed to tell which versions made which tokens
    return start(log, command, VLLM)


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    """Return when a server answers."""
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
    """Return a port on which no process listens. Systems give connections ports from 32768 on, so no connection takes it meanwhile."""
    while True:
        port = random.randrange(16_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))  # tests reserve ports by UDP
            return port


def print_logs(folder: Path) -> None:
    """Print the ends of all logs, after an error."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill processes and what they have started."""
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Real vLLM servers and sidecars run as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_python import ForkedPopen
from server_nursery import ServerNursery
from servers import free_port

from deltawire.engines.vllm.driver.routes import VllmRoutes

_BOOT_SECONDS = 300
_ENTRY_POINTS = """[vllm.general_plugins]
deltawire = deltawire.engines.vllm.plugin:register
deltawire_test_faults = injected_faults:register
deltawire_test_fp8_block = fp8_block_kernel:register
deltawire_test_memory = model_memory:register
deltawire_test_holds = held_completions:register
"""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the wait timed out: {what}"
        time.sleep(0.05)


def plugin_path(folder: Path) -> str:
    """Make a directory for PYTHONPATH with our entry point, which an installed package may lack, and those of the tests."""
    metadata = folder / "deltawire_test_plugins-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deltawire-test-plugins\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])


def server_environment(folder: Path) -> dict[str, str]:
    """Return the environment for servers. `folder` gets the plugins of tests."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": plugin_path(folder / "plugins"),
    }


class LiveServer:
    """A vLLM server with our backend. `ranks` is its tensor parallelism. It is stopped together with its workers.

    With a `nursery`, the server is forked there in seconds. Otherwise it is started as a user would start it.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        ranks: int = 1,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        backend: str = "deltawire",
        nursery: ServerNursery | None = None,
    ) -> None:
        self._nursery = nursery
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.routes = VllmRoutes(self.url)
        self._log_path = folder / f"server-{self.port}-{time.monotonic_ns()}.log"
        command = ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--tensor-parallel-size", str(ranks), "--weight-transfer-config", json.dumps({"backend": backend}), *arguments]
        if nursery is not None:
            self._process_id = nursery.start(command, self._log_path, environment or {})
            return
        variables = server_environment(folder)
        if ranks > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *command],
                env={**os.environ, **variables, **(environment or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process_id = self._process.pid

    def wait(self) -> LiveServer:
        """Return when the server answers."""
        deadline = time.monotonic() + _BOOT_SECONDS
        while True:
            is_hopeless = not self._is_running() or time.monotonic() > deadline
            assert not is_hopeless, f"the server does not start:\n{self.log_tail()}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)

    def log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-6000:]

    def generate(self, prompt: Sequence[int] = (5, 6, 7), tokens: int = 24, *, model: str = "tiny") -> list[int]:
        """Return the most probable continuation. `model` may name a LoRA adapter."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def stream(self, tokens: int, prompt: Sequence[int] = (9, 8), stamps: list[float] | None = None) -> int:
        """Stream a completion of this length, and return the number of tokens that arrived. `stamps` gets the time of each."""
        arrived = 0
        with self._complete(prompt, tokens, stream=True) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    got = len(choices[0].get("token_ids") or []) if choices else 0
                    arrived += got
                    if stamps is not None and got:
                        stamps.extend([time.monotonic()] * got)
        return arrived

    def _complete(self, prompt: Sequence[int], tokens: int, *, stream: bool) -> Any:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": stream, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data=data, headers={"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=300)

    def kill(self) -> None:
        """Kill the server and all of its workers."""
        if self._nursery is not None:
            self._nursery.kill(self._process_id)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process_id, signal.SIGKILL)
        self._process.wait()

    def _is_running(self) -> bool:
        return self._process.poll() is None if self._nursery is None else self._nursery.is_running(self._process_id)


class LiveSidecar:
    """Run `deltawire sidecar` as a process."""

    def __init__(self, folder: Path, engine: str, source: str, *arguments: str) -> None:
        self._log_path = folder / f"sidecar-{time.monotonic_ns()}.log"
        command = ["-m", "deltawire.cli", "sidecar", "--engine", engine, "--from", source, "--spool", folder / "spool"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        with self._log_path.open("wb") as log:
            arguments = (*map(str, command), "--poll", "0.05", "--json", *arguments)
            self._process = ForkedPopen("light", list(arguments), stdout=log, stderr=log, env=environment)

    def events(self, name: str) -> list[dict[str, Any]]:
        found = []
        for line in self._log_path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        return found

    def log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def load(server: LiveServer, ended: list[int], clients: int = 2, tokens: int = 150) -> Iterator[None]:
    """Keep this many clients busy with streamed requests. `ended` gets the number of tokens of each completed request."""
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            ended.append(server.stream(tokens, prompt=(10 + client, 20)))

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()

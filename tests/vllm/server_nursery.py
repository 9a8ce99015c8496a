"""Start vLLM servers in seconds. A process that has imported vLLM forks them, and they run vLLM's own entry point.

    with ServerNursery(folder) as nursery:
        server = LiveServer(folder, model, nursery=nursery).wait()

Importing vLLM takes about ten seconds of a core, and a server on a CPU does it in three or more processes, one after the other. Here the
engine and the workers are forked too, as vLLM does on other devices. On a CPU, vLLM starts new interpreters instead, because OpenMP binds
its threads to cores at the start. So the forked processes have one thread, which is not bound, and they wait for each other without using
a core. Everything else is as in `python -m vllm.entrypoints.openai.api_server`, which the test of examples/trl_vllm_over_bucket uses.

Run as a script, this file is the nursery process. Only this process reaps the servers, so a server's id stays valid until it is killed.
When the test process ends for any reason, the servers and all of their workers end too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_python import ForkedPopen

_SPIN_SECONDS = 0.002
"""The number of seconds for which processes of a server poll for messages before they sleep. vLLM's default of 1 wastes busy cores."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Otherwise each worker compiles one small function of vLLM by torch.compile, in some seconds. It gives the same results."""

_IMPORTED_LATE = [
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
]
"""Modules that a server imports while it starts, and that take the most time. A version of vLLM that does not have one goes without it."""


class ServerNursery:
    """The test's connection to the nursery process. `environment` applies to all servers, and each server may add to it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder / "nursery.log"
        self._lock = threading.Lock()
        with self._log.open("wb") as log:
            self._process = ForkedPopen(
                "torch",
                [__file__],
                env={**os.environ, **environment, **ONE_THREAD, **NOT_COMPILED},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        """Start a server with these arguments, and return its id."""
        return self._ask("start", list(arguments), str(log), dict(environment))

    def run(self, script: Path, arguments: Sequence[str], log: Path) -> int:
        """Run a Python script that needs vLLM, and return its id. The methods for servers also apply to it."""
        return self._ask("start", list(arguments), str(log), {}, str(script))

    def is_running(self, server: int) -> bool:
        return bool(self._ask("running", server))

    def kill(self, server: int) -> None:
        """Kill a server and all of its workers. It may be called twice."""
        self._ask("kill", server)

    def __enter__(self) -> ServerNursery:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes the nursery's input, so that the nursery kills its children and ends
            pass

    def _ask(self, *command: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the nursery has ended:\n{self._log.read_text(errors='replace')[-8000:]}"
        return int(answer)


# The nursery process


class _Forking:
    """Replace `multiprocessing` where vLLM chooses how to start its processes, so that it forks them as on other devices."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    @staticmethod
    def get_context(method: str | None = None) -> Any:
        return multiprocessing.get_context("fork")


def _start(arguments: list[str], log: str, environment: dict[str, str], script: str | None = None) -> int:
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # the process may have ended by itself
            os.setpgid(child, child)
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= environment
        sys.argv = [script or "api_server", *arguments]
        if script is not None:
            runpy.run_path(script, run_name="__main__")
            code = 0
        else:
            from vllm.entrypoints.launchers.api_server.entry import main

            main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill(server: int) -> None:
    """Return when all of its processes have ended and released the port that they share."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-server, 0)


def _adopt_orphans() -> None:
    """Become the parent of workers whose server has died."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _nursery() -> None:
    _adopt_orphans()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout, which carries our answers

    import torch._dynamo

    torch._dynamo.config.disable = True  # the variable has no effect if the parent had imported this module

    import vllm.distributed.device_communicators.shm_broadcast
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe
    import vllm.utils.system_utils
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker

    import deltawire.engines.vllm.backend  # noqa: F401

    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    vllm.utils.system_utils.multiprocessing = _Forking()
    spin = vllm.distributed.device_communicators.shm_broadcast.SpinCondition
    spin.__init__ = functools.partialmethod(spin.__init__, busy_loop_s=_SPIN_SECONDS)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads must not fork"
    gc.collect()
    gc.freeze()  # each process of a server collects garbage several times while it starts, and need not look through what it inherits
    children: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer = 0
        if what == "start":
            answer = _start(*arguments)
            children.add(answer)
        elif arguments[0] in children and what == "running":
            answer = int(os.waitid(os.P_PID, arguments[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None)
        elif arguments[0] in children:
            _kill(arguments[0])
            children.discard(arguments[0])
        print(answer, file=answers, flush=True)
    for child in children:
        _kill(child)  # it is not reaped yet, so its id is still valid


if __name__ == "__main__":
    _nursery()

"""Run Python scripts as processes that start in milliseconds. A parent process that has imported what they need forks them.

    done = forked_run("torch", [script, "an argument"], stdout=subprocess.PIPE, text=True)
    process = ForkedPopen("torch", ["-m", "deltawire.cli", "log", url])

`import torch` and `import transformers` take five seconds of a core, and TRL takes ten, so tests fork a script that needs them from a
parent that has imported them. `ForkedPopen` is a `subprocess.Popen`: pipes, environment, working directory, signals and exit status are
those of a separate, real process. Only the imports are shared, so tests of start-up and of warnings during imports start an interpreter.

If a process with TRL starts more processes by the "spawn" method of multiprocessing, as TRL itself does, they are forked from the parent
too.

There is one parent per warm-up. The first process that needs a parent starts it: `lanes.py`, or else the test process. When that process
ends for any reason, the parent kills what it has forked, and ends. Forked processes fork more processes from the same parent. Run as a
script, this file is the parent.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing.popen_spawn_posix
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

_LIGHT = ["numpy", "ml_dtypes", "blake3", "obstore", "httpx", "safetensors.numpy", "rich.progress", "rich.table", "typer.rich_utils"]
_LIGHT += ["deltawire.cli.*", "deltawire.publish.*", "deltawire.subscribe.*", "deltawire.store.*", "deltawire.testing.*"]
_LIGHT += ["deltawire.engines.vllm.driver.sidecar"]
_TORCH = [*_LIGHT, "torch", "torch._dynamo", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]
_TORCH += ["transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "safetensors.torch"]
_TORCH += ["deltawire.trainers", "deltawire.rl.*", "deltawire.fleet.*", "deltawire.gateway.*"]
_TORCH += [
    name
    for name in ("aiohttp", "fastapi", "uvicorn.protocols.http.httptools_impl", "prometheus_client")
    if importlib.util.find_spec(name.partition(".")[0])
]
_TRL = [*_TORCH, "trl.experimental.async_grpo", "datasets"]
WARM_UPS = {"light": _LIGHT, "torch": _TORCH, "trl": _TRL}
"""The modules that each parent imports before it forks. A star means all modules of a package."""
_FORKED_FROM = {"torch": "light", "trl": "torch"}
"""Parents that are themselves forked from another parent, so that they import less."""

os.environ["DELTAWIRE_CHECK_EVENTS"] = "1"  # the parents import deltawire, and the processes that they fork check their events
_ADDRESSES = "DELTAWIRE_TEST_PARENTS"
_LARGEST_REQUEST = 1 << 18
_MOST_FILES = 32
"""The largest number of open files that a process gets from the one that starts it."""
_FORK_SAFE = "jemalloc_bg_thd"
"""The name of a thread of pyarrow's allocator. The allocator stops it before a fork and starts it again afterwards."""


class ForkedPopen(subprocess.Popen[Any]):
    """A `subprocess.Popen` of a Python process that is forked from the parent with this warm-up.

    Its arguments are a script, `-m` and a module, or `-c` and code. `-W error` may come before them.
    """

    def __init__(self, warm_up: str, arguments: list[Any], **options: Any) -> None:
        self._parent = _parent(warm_up)
        self._pidfd = -1
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        names = ["executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"]
        names += ["p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid", "gids", "uid", "umask"]
        given = dict(zip([*names, "start_new_session", "process_group"], rest, strict=False))
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        request = {
            "arguments": args[1:],
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "folder": os.path.abspath(given["cwd"] or os.getcwd()),
            "session": bool(given["start_new_session"]),
            "files": sorted(given["pass_fds"]),
        }
        try:
            own_streams = [own if number == -1 else number for own, number in enumerate(streams)]
            self.pid = self._parent.ask(request, [*own_streams, *request["files"]])
            self._pidfd = os.pidfd_open(self.pid)  # the process is reaped only when we ask how it ended
            self._child_created = True
        finally:
            devnull = getattr(self, "_devnull", None)
            ends = {(given["p2cread"], given["p2cwrite"]), (given["c2pwrite"], given["c2pread"]), (given["errwrite"], given["errread"])}
            for number in {theirs for theirs, ours in ends if theirs != -1 and ours != -1 and theirs != devnull}:
                os.close(number)
            if devnull is not None:
                os.close(devnull)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not select.select([self._pidfd], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = self._parent.ask({"ended": self.pid})
        os.close(self._pidfd)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def forked_run(warm_up: str, arguments: list[Any], *, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that is forked from the parent with this warm-up, as `subprocess.run` does with text."""
    with ForkedPopen(warm_up, arguments, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def spawn_by_forking(warm_up: str) -> None:
    """Fork the processes that multiprocessing would start as new interpreters. Its pipes, objects and exit statuses stay the same."""
    started: dict[int, ForkedPopen] = {}
    spawned = multiprocessing.popen_spawn_posix.Popen

    def start(_path: bytes, arguments: list[str], files: list[int]) -> int:
        code = arguments.index("-c")
        process = ForkedPopen(warm_up, arguments[code:], pass_fds=files)
        started[process.pid] = process
        return process.pid

    def poll(self: Any, flag: int = os.WNOHANG) -> int | None:
        process = started.get(self.pid)
        if process is None:
            return usual(self, flag)
        self.returncode = process.poll() if flag == os.WNOHANG else process.wait()
        return self.returncode

    usual, spawned.poll = spawned.poll, poll  # type: ignore[method-assign]
    multiprocessing.util.spawnv_passfds = start  # type: ignore[attr-defined]


class _Parent:
    """The test's connection to a parent."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        atexit.register(self._socket.close)

    def ask(self, request: dict[str, Any], streams: list[int] | None = None) -> int:
        message = json.dumps(request).encode()
        assert len(message) < _LARGEST_REQUEST
        with self._lock:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST_REQUEST)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))] if streams else []
            self._socket.sendmsg([message], rights)
            answer = self._socket.recv(64)
        assert answer, "the process that forks scripts has ended"
        return int(answer)


_starting = threading.RLock()  # starting a parent may start the one that it is forked from


def _parent(warm_up: str) -> _Parent:
    with _starting:
        return _connected(warm_up, os.getpid())


@functools.cache
def _connected(warm_up: str, _process: int) -> _Parent:
    """Connect to the parent with this warm-up. A forked process makes its own connection to the parent that forked it."""
    addresses = json.loads(os.environ.get(_ADDRESSES, "{}"))
    return _Parent(addresses[warm_up] if warm_up in addresses else _started(warm_up))


def _started(warm_up: str) -> str:
    """Start a parent. Return the address of its socket once it listens."""
    from support import PACKAGE

    folder = tempfile.mkdtemp(prefix="deltawire-forks-")
    address = os.path.join(folder, "socket")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    arguments, options = [__file__, warm_up, address], {"env": {**os.environ, **fixed}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    options["start_new_session"] = True  # Ctrl-C in the terminal must not end it before its children
    process = (
        ForkedPopen(parent, arguments, **options)
        if (parent := _FORKED_FROM.get(warm_up))
        else subprocess.Popen([sys.executable, *arguments], **options)
    )

    def end() -> None:
        with process:  # closes the parent's input, so that the parent kills its children and ends
            pass

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline(), f"the process that forks scripts does not start, and exited with {process.wait()}"
    return address


# The parent


def _serve(warm_up: str, address: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # some libraries print while they are imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in WARM_UPS[warm_up]:
            _import(name)
    _rehearse()
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) - threads.count(_FORK_SAFE) == 1, f"a process with several threads must not fork: {threads}"
    gc.collect()
    gc.freeze()  # the garbage collector of a forked process need not look through what it inherits, and so does not copy that memory
    os.environ[_ADDRESSES] = json.dumps({**json.loads(os.environ.get(_ADDRESSES, "{}")), warm_up: address})
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    children: dict[socket.socket, set[int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        os.write(answers, b"listens\n")
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    _end([*children], children)
                    Path(address).unlink()
                    os.rmdir(os.path.dirname(address))
                    return
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    children[connection] = set()
                    selector.register(connection, selectors.EVENT_READ)
                elif not _answer(warm_up, key.fileobj, children):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    _end([key.fileobj], children)  # type: ignore[list-item]


def _import(name: str) -> None:
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)


def _rehearse() -> None:
    """Parse the arguments of one command, because Typer imports more modules when it does that for the first time."""
    from typer.testing import CliRunner

    from deltawire.cli import app

    assert CliRunner().invoke(app, ["log", "/nonexistent", "--json"]).exit_code == 1


def _answer(warm_up: str, connection: socket.socket, children: dict[socket.socket, set[int]]) -> bool:
    """Do what one request asks for. Return False if the other side has closed the connection."""
    try:
        message, streams, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 3 + _MOST_FILES)
    except ConnectionError:
        return False
    if not message:
        return False
    request = json.loads(message)
    if "ended" in request:
        _, answer = os.waitpid(request["ended"], 0)
        children[connection].discard(request["ended"])
    else:
        answer = os.fork()
        if not answer:
            _become(warm_up, request, streams)
        children[connection].add(answer)
        for number in streams:
            os.close(number)
    with contextlib.suppress(OSError):
        connection.send(str(answer).encode())
    return True


def _end(connections: list[socket.socket], children: dict[socket.socket, set[int]]) -> None:
    """Kill the processes that were forked for these connections. None of them is reaped yet, so their ids are still valid."""
    for connection in connections:
        for child in children.pop(connection):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        connection.close()


def _become(warm_up: str, request: dict[str, Any], streams: list[int]) -> None:
    """Run the script in the child, and exit as the script does. This function does not return."""
    code = 70
    try:
        _end_with_parent()
        _take_files(streams, [0, 1, 2, *request["files"]])
        _reopen_streams()
        if request["session"]:
            os.setsid()
        os.chdir(request["folder"])
        parents = os.environ[_ADDRESSES]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[_ADDRESSES] = parents
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
        if warm_up == "trl":
            spawn_by_forking(warm_up)
        code = _run(request["arguments"])
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the parent ends, because a parent that is killed itself cannot kill what it has forked."""
    set_parent_death_signal = 1
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _take_files(received: list[int], numbers: list[int]) -> None:
    """Give the received files these numbers, and close all others."""
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, max(numbers) + 1) for number in received]
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *moved}:
        with contextlib.suppress(OSError):  # the listing itself had one
            os.close(number)
    for number, wanted in zip(moved, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _reopen_streams() -> None:
    """Reopen Python's own streams, because they remember whether their old files were seekable or a terminal."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # type: ignore[misc]


def _run(arguments: list[str]) -> int:
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    try:
        if arguments[0] == "-c":
            code, sys.argv = arguments[1], ["-c", *arguments[2:]]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    _serve(*sys.argv[1:])

"""The `deltawire` command as a process of its own, without half a second of imports: a process that has all of it imported forks it.

    done = run_forked(["log", url], environment)

Each command is a real process with its own environment, output and exit code. It begins after the imports, so tests of these, of start-up
and of signals start an interpreter of their own. Run as a script this is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from support import PACKAGE

_MOST_SECONDS = 600
_USED = [
    "cli",
    "publish",
    "subscribe",
    "chain.maintenance.verify",
    "chain.maintenance.collect",
    "format.records.signing",
    "store.local",
    "store.urls",
    "delta.inspect",
    "delta.encode",
]
"""Modules of deltawire that commands import when they run."""
_LIBRARIES = ["numpy", "ml_dtypes", "rich.progress", "rich.table", "typer.rich_utils", "obstore"]


def run_forked(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `deltawire` with these arguments in this environment, and wait for it."""
    nursery = _nursery()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        request = {"arguments": list(arguments), "environment": dict(environment), "cwd": os.getcwd(), "outputs": list(map(str, outputs))}
        nursery.stdin.write(json.dumps(request) + "\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
        assert answer, "the process that forks commands has ended"
        return subprocess.CompletedProcess(list(arguments), int(answer), *(output.read_text() for output in outputs))


@cache
def _nursery() -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, __file__],
        env={**clean, "PYTHONPATH": path, "PYTHONUTF8": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        with process:  # closes its input, upon which it ends
            pass

    atexit.register(end)
    return process


def _become(arguments: list[str], environment: dict[str, str], cwd: str, outputs: list[str]) -> None:
    """In the child: run the command and end as it does."""
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["deltawire", *arguments]
    code = 0
    try:
        from deltawire.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for name in [*(f"deltawire.{module}" for module in _USED), *_LIBRARIES]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            import signal

            signal.alarm(_MOST_SECONDS)
            try:
                _become(**request)
            finally:
                os._exit(70)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()

"""`deltawire follow --exec CMD`: a command that runs after each new version."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...subscribe.mirror.durable_json import read_json, write_json

if TYPE_CHECKING:
    from ...chain.version import Version

_DONE = ".exec.json"
_STDERR = 2
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 10.0
"""Seconds that a command has to end in after SIGTERM."""


class ExecHook:
    """Runs a shell command for the version at hand, unless it has already succeeded for this version.

    The mirror remembers that the command succeeded. So a command that failed, or a process that died in between, runs it again: by the next
    call of `follow`, or for the next version. While it runs, the files of its version stay as they are.
    """

    def __init__(self, command: str, mirror: Path, url: str, *, stdout_to_stderr: bool) -> None:
        self._command = command
        self._record = mirror / _DONE
        self._url = url
        self._stdout = _STDERR if stdout_to_stderr else None

    def run(self, version: Version, path: Path) -> int | None:
        """Return the exit status of the command, negative for a signal; None if it did not have to run."""
        done = {"seq": version.seq, "digest": version.digest.hex(), "command": self._command}
        if read_json(self._record) == done:
            return None
        status = self._wait(version, path)
        if status == 0:
            write_json(self._record, done)
        return status

    def _wait(self, version: Version, path: Path) -> int:
        environment = {
            **os.environ,
            "DELTAWIRE_PATH": str(path.resolve()),
            "DELTAWIRE_VERSION": str(version.updates),
            "DELTAWIRE_SEQ": str(version.seq),
            "DELTAWIRE_STEP": "" if version.step is None else str(version.step),
            "DELTAWIRE_DIGEST": version.digest.hex(),
            "DELTAWIRE_URL": self._url,
        }
        process: subprocess.Popen[bytes] | None = None
        try:
            with _signals_deferred():
                process = subprocess.Popen(
                    self._command,
                    shell=True,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    start_new_session=True,  # so that the processes which it starts can be ended with it
                )
            return process.wait()
        except BaseException:
            if process is not None:
                _end(process)
            raise


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle signals that ask this process to end only afterwards: in the middle of a start they would leave a child that nobody knows."""
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for early in arrived:
        signal.raise_signal(early)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, unless it has ended, and the processes that it has started."""
    if process.poll() is not None:
        return  # then its id may be somebody else's by now
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(_PATIENCE)
            return


def describe_status(status: int) -> str:
    """How a command ended, in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"exited with code {status}"

"""The shell command that `deltawire follow --exec CMD` runs after each new version."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
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
"""A command gets SIGKILL this many seconds after SIGTERM."""


class ExecHook:
    """Runs a shell command for a version, unless the command has already succeeded for this version.

    A file in the mirror records that the command succeeded. If the command failed, or this process died before, the command runs again when
    `follow` starts again, or for the next version. While it runs, the files of its version do not change.

    Parameters
    ----------
    command
        The shell command.
    mirror
        The directory of the mirror.
    url
        The chain's location, which the command gets in its environment.
    stdout_to_stderr
        Send the command's output to stderr.
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
            with signals_deferred():
                process = subprocess.Popen(
                    self._command,
                    shell=True,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    start_new_session=True,  # so that the processes that it starts can be ended with it
                )
            return process.wait()
        except BaseException:
            if process is not None:
                end_group(process)
            raise


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals that end this process after the block. During the start of a child they would leave it running."""
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for early in arrived:
        signal.raise_signal(early)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and the processes that it has started, unless it has ended."""
    if poll_group(process) is not None:
        return  # its id may belong to another process by now
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while poll_group(process) is None:
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)


def poll_group(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a command, or None while it runs. Processes that it leaves behind in its group are killed.

    They are killed while the system keeps the id of the command for its status, so that the id cannot belong to others.

    Parameters
    ----------
    process
        The command, which leads its own process group.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
        has_ended = (
            process.returncode is None
            and hasattr(os, "waitid")  # macOS has it since Python 3.13
            and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )
        if has_ended:
            os.killpg(process.pid, signal.SIGKILL)
    return process.poll()


def describe_status(status: int) -> str:
    """Describe in words how a command ended."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"exited with code {status}"

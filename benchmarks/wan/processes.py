"""Child processes that end with this one, whatever happens to it, and that talk by lines of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 3.0


class ChildFailed(RuntimeError):
    """A child process ended, or did not answer in time."""


def start(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, folder: Path | None = None, piped: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process that is killed when this one ends. Its errors go to a log.

    Parameters
    ----------
    command
        The command.
    log
        The file that receives its errors, and its output unless `piped`.
    environment
        Variables in addition to those of this process.
    folder
        Its working directory.
    piped
        Whether this process writes to its input and reads its output.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it in order


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that this one started, by its id."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Talker:
    """A child that is told lines of JSON, and tells lines of JSON.

    Parameters
    ----------
    process
        The child, started with pipes.
    name
        Its name in errors.
    log
        The file with its errors.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Send a line, and do not wait for an answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(f"ended: {error}") from None

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next line of the child. Raises `ChildFailed` if none comes in time.

        Parameters
        ----------
        seconds
            The most seconds to wait.
        """
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise self._failure(f"said nothing for {seconds:.0f} s") from None
        if not line:
            raise self._failure(f"ended with {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, seconds: float, **message: Any) -> dict[str, Any]:
        """Send a line, and return the next one of the child."""
        self.tell(**message)
        return self.hear(seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # it was closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _failure(self, what: str) -> ChildFailed:
        return ChildFailed(f"{self.name} {what}.\n{self._log.read_text(errors='replace')[-4000:]}")

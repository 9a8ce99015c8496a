"""Members as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from .member_output import OnLine
from .supervision import PermanentFailure

PERMANENT_FAILURE_CODE = 78
"""Exit code of a member that was started here and ended because of an error that would come again. Otherwise such errors exit with 1."""
_LONGEST_LINE = 1 << 20
_LAST_LINES_SECONDS = 2.0
"""Seconds to wait for the last lines of a member that has ended. Processes that it started may keep its output open for longer."""


class LocalMember:
    """A process that runs `deltawire member`. When the process that started it ends in any way, the member leaves.

    Parameters
    ----------
    arguments
        The arguments of `deltawire member`.
    on_line
        Called with each line that the member prints. By default the member prints where this process prints.
    environment
        Variables that the member gets in addition to those of this process.
    """

    def __init__(self, arguments: Sequence[str], on_line: OnLine | None = None, *, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "deltawire.cli", "member", *arguments, "--leave-with-stdin"]
        output = None if on_line is None else subprocess.PIPE
        variables = {**os.environ, **(environment or {})}
        if on_line is not None:
            variables.pop("COLUMNS", None)  # lines are wrapped where they are shown, not by the member
        self._process = subprocess.Popen(  # a session of its own, so that Ctrl-C here does not reach the member
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=variables
        )
        self._readers: list[threading.Thread] = []
        if on_line is not None:
            self._readers = [self._read(self._process.stdout, on_line, False), self._read(self._process.stderr, on_line, True)]

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def ending(self) -> str | None:
        """See `supervision.Running`."""
        code = self._process.poll()
        if code is None:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        for reader in self._readers:
            reader.join(_LAST_LINES_SECONDS)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code == PERMANENT_FAILURE_CODE:
            return PermanentFailure("it ended with an error that would come again")
        return f"it ended with code {code}" if code else ""

    def leave(self) -> None:
        """See `supervision.Running`."""
        self._process.terminate()

    def kill(self) -> None:
        """See `supervision.Running`."""
        self._process.kill()
        self._process.wait()
        self.ending()

    def _read(self, stream: IO[bytes] | None, on_line: OnLine, is_error: bool) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            with stream:
                while line := stream.readline(_LONGEST_LINE):
                    on_line(line.decode(errors="replace").rstrip("\r\n"), is_error)

        thread = threading.Thread(target=read, name=f"deltawire-output-{self._process.pid}", daemon=True)
        thread.start()
        return thread

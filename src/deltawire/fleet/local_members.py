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
from .supervision import Lasting

LASTING_ERROR = 78
"""The exit code of a member, started here, whose error does not heal. One that a person starts ends with 1 then."""
_LONGEST_LINE = 1 << 20
_LAST_LINES = 2.0
"""Seconds to wait for what a member that has ended still had to say. Processes that it started may keep its output open for longer."""


class LocalMember:
    """Runs `deltawire member` with these arguments. When the process that started it goes, however it goes, the member leaves too.

    With `on_line` the member's output goes there line by line; otherwise it goes where ours goes. `environment` has variables that the
    member gets on top of ours.
    """

    def __init__(self, arguments: Sequence[str], on_line: OnLine | None = None, *, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "deltawire.cli", "member", *arguments, "--leave-with-stdin"]
        output = None if on_line is None else subprocess.PIPE
        variables = {**os.environ, **(environment or {})}
        if on_line is not None:
            variables.pop("COLUMNS", None)  # lines are broken where they are shown, and not before
        self._process = subprocess.Popen(  # our Ctrl-C is not theirs
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=variables
        )
        self._readers: list[threading.Thread] = []
        if on_line is not None:
            self._readers = [self._read(self._process.stdout, on_line, False), self._read(self._process.stderr, on_line, True)]

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self) -> str | None:
        """See `supervision.Running`."""
        code = self._process.poll()
        if code is None:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        for reader in self._readers:
            reader.join(_LAST_LINES)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code == LASTING_ERROR:
            return Lasting("it ended with an error that does not heal by itself")
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

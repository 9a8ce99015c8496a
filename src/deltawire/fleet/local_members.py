"""Members as processes of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


class LocalMember:
    """`deltawire member` with these arguments. When the process that started it goes, however it goes, the member leaves too."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "deltawire.cli", "member", *arguments, "--leave-with-stdin"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # our Ctrl-C is not theirs

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
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"it ended with code {code}" if code else ""

    def leave(self) -> None:
        """See `supervision.Running`."""
        self._process.terminate()

    def kill(self) -> None:
        """See `supervision.Running`."""
        self._process.kill()
        self._process.wait()
        self.ending()

"""Starts the demo's processes, reads their events, and ends them."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Child:
    """A script of the demo in its own process. Its events go to `inbox`, followed by one that says it has ended. Its stderr goes to a file.

    If this process ends for any reason, the child's stdin closes, and the child ends too.
    """

    def __init__(self, who: str, script: str, arguments: Sequence[str], inbox: queue.Queue[dict[str, Any]], log: Path) -> None:
        self.who = who
        self.log = log
        self.is_sacrificed = False
        self._inbox = inbox
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(FOLDER / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C does not reach the children: this process asks them to leave
            )
        self._thread = threading.Thread(target=self._listen, name=f"demo-{who}")
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def leave(self) -> None:
        """Ask the process to leave."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process with SIGKILL. It gives no lease back."""
        self._process.kill()

    def sacrifice(self) -> None:
        """Kill the process as planned, so that its end is not a failure."""
        self.is_sacrificed = True
        self.kill()

    def join(self, timeout: float) -> bool:
        """Wait, and return whether the process has ended and all its events are in the inbox."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library printed it, or the process was killed in the middle of a line
            if isinstance(event, dict) and "event" in event:
                self._inbox.put({**event, "from": self.who})
        code = self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()
        fields = {"who": self.who, "code": code, "killed": self.is_sacrificed}
        self._inbox.put({"event": "process-ended", "from": "demo", "at": time.monotonic(), **fields})

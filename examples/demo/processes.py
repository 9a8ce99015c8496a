"""The demo's processes: started, listened to, and ended, by those who started them and nobody else."""

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
    """A script of the demo in a process of its own. What it tells goes into `inbox`, at last that it has ended; its stderr into a file.

    When this process goes, however it goes, the child sees its stdin end, and ends too.
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
                start_new_session=True,  # our Ctrl-C is not theirs: they are told to leave
            )
        self._thread = threading.Thread(target=self._listen, name=f"demo-{who}")
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What it ended with; None while it runs."""
        return self._process.poll()

    def leave(self) -> None:
        """Ask it to leave."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing is given back."""
        self._process.kill()

    def sacrifice(self) -> None:
        """Kill it, as planned."""
        self.is_sacrificed = True
        self.kill()

    def join(self, timeout: float) -> bool:
        """Whether it has ended, and everything that it told is in the inbox."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # some library's words; a killed process may also stop in the middle of a line
            if isinstance(event, dict) and "event" in event:
                self._inbox.put({**event, "from": self.who})
        code = self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()
        fields = {"who": self.who, "code": code, "killed": self.is_sacrificed}
        self._inbox.put({"event": "process-ended", "from": "demo", "at": time.monotonic(), **fields})

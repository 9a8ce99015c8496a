"""What the demo's processes have in common: how they tell what happens, and how they are ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from deltawire.events import Event

_turn = threading.Lock()


def tell(name: str, **fields: Any) -> None:
    """Print it as a line of JSON. The time is the machine's, the same for all of its processes."""
    line = json.dumps({"event": name, "at": time.monotonic(), **fields})
    with _turn:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def tell_event(event: Event) -> None:
    """For `on_event`."""
    tell(event.name, **event.fields)


def told_to_stop() -> threading.Event:
    """Is set by SIGTERM, and when whoever started this process has gone."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def watch() -> None:
        while os.read(0, 4096):  # past Python's buffers, whose locks must be free at exit
            pass
        stop.set()

    threading.Thread(target=watch, name="demo-stdin", daemon=True).start()
    return stop

"""Shared by the demo's processes: they report events as JSON, and stop when they are asked to."""

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
    """Print an event as a line of JSON. Its time is from the machine's clock, which all processes share."""
    line = json.dumps({"event": name, "at": time.monotonic(), **fields})
    with _turn:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def tell_event(event: Event) -> None:
    """Print an event of deltawire; for `on_event`."""
    tell(event.name, **event.fields)


def told_to_stop() -> threading.Event:
    """Return an event that is set by SIGTERM, and when the process that started this one has ended."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def watch() -> None:
        while os.read(0, 4096):  # without Python's buffers, whose locks must be free at exit
            pass
        stop.set()

    threading.Thread(target=watch, name="demo-stdin", daemon=True).start()
    return stop

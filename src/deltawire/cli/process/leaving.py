"""Lets commands that serve or work end in order when a signal arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaving_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set the event on the first SIGTERM, SIGINT or SIGHUP inside the context. A second signal raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    numbers = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}  # `nohup` ignores SIGHUP, and so do we
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Shortcuts that a thread has made. The thread that publishes takes them into account when it decides whether an anchor is due."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from .cadence import ChainCost, Speed


@dataclass(frozen=True, slots=True)
class _Made:
    """A shortcut to the version with the number `updates`. `skipped` is the number of versions of a skip; None for an anchor."""

    updates: int
    size: int
    seconds: float
    skipped: int | None


class MadeShortcuts:
    """Receives shortcuts from any thread, and counts them on one thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Made] = queue.SimpleQueue()

    def add_skip(self, updates: int, size: int, versions: int) -> None:
        """Note a skip of `size` bytes over some versions, to the version with the number `updates`."""
        self._waiting.put(_Made(updates, size, 0.0, versions))

    def add_anchor(self, updates: int, size: int, seconds: float) -> None:
        """Note an anchor of the version with the number `updates`, and how long its upload took."""
        self._waiting.put(_Made(updates, size, seconds, None))

    def count(self, updates: int, cost: ChainCost, speed: Speed) -> Speed:
        """Add all shortcuts to the cost of the chain, whose newest version has the number `updates`. Returns the speed known now."""
        while True:
            try:
                made = self._waiting.get_nowait()
            except queue.Empty:
                return speed
            behind = updates - made.updates
            if behind < cost.versions:  # otherwise a newer full checkpoint was committed meanwhile
                if made.skipped is None:
                    cost.anchored(behind)
                else:
                    cost.add_skip(made.skipped, made.size, behind)
            if made.skipped is None:
                speed = speed.observe(sent=made.size, send_seconds=made.seconds)

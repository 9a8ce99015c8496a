"""Tells steps of one process that other steps of the same process have changed something."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Signal:
    """Counts changes. Steps read `count`, look at what they wait for, and then yield a `Wait` with the count that they read.

    So no change is missed that happens between the look and the wait. May be used by several threads.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []

    def give(self) -> None:
        """Tell all steps that wait that something has changed."""
        with self._changed:
            self.count += 1
            calls, self._calls = self._calls, []
            self._changed.notify_all()
        for call in calls:
            call()

    def wait(self, seen: int, seconds: float) -> None:
        """Block the thread until the count differs from `seen`, or until this many seconds have passed.

        Parameters
        ----------
        seen
            The count that the steps read before their last look.
        seconds
            The longest time to wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.count != seen, seconds)

    def call_once(self, seen: int, call: Callable[[], None]) -> None:
        """Call a function once, as soon as the count differs from `seen`. It replaces `wait` where time is virtual.

        Parameters
        ----------
        seen
            The count that the steps read before their last look.
        call
            The function. It must not wait.
        """
        with self._changed:
            is_new = self.count != seen
            if not is_new:
                self._calls.append(call)
        if is_new:
            call()

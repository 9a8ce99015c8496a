"""Count the seconds of phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Stopwatch:
    """Counts seconds per phase ("fetch", "verify", "resolve", "apply" …), summed over threads. Parallel phases overlap.

    >>> watch = Stopwatch()
    >>> with watch.phase("fetch"):
    ...     pass
    >>> watch.seconds["fetch"]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the context to this phase, even if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

"""Records which version was live at which time. Completions are attributed to the weights that made them by these intervals."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...chain.version import Version

_KEPT = 4096


@dataclass(frozen=True, slots=True)
class LiveInterval:
    """The time in which one version was live in an engine.

    Parameters
    ----------
    version
        The version. None if it is unknown.
    start
        When it became live, in seconds by `time.monotonic`.
    end
        When it stopped being live. None if it still is.
    """

    version: Version | None
    start: float
    end: float | None = None


@dataclass(slots=True)
class Attribution:
    """The versions that made a completion. It is filled when the generation has ended.

    Parameters
    ----------
    intervals
        The intervals in which the completion was made, oldest first.
    """

    intervals: tuple[LiveInterval, ...] = field(default=())

    @property
    def versions(self) -> tuple[Version | None, ...]:
        """The versions, oldest first. There is more than one if weights were swapped during the generation."""
        return tuple(interval.version for interval in self.intervals)


class LiveIntervals:
    """The intervals in which versions were live, newest last. The engine was paused between two intervals.

    Parameters
    ----------
    clock
        Returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[LiveInterval] = deque([LiveInterval(None, clock())], maxlen=_KEPT)

    @property
    def latest(self) -> Version | None:
        """The version that is live, or that was live last if the engine is paused."""
        with self._lock:
            return self._intervals[-1].version

    def end(self) -> None:
        """Record that no version is live from now on. Does nothing if none is."""
        with self._lock:
            self._end_last()

    def begin(self, version: Version | None) -> None:
        """Record that this version is live from now on."""
        with self._lock:
            self._end_last()
            self._intervals.append(LiveInterval(version, self.clock()))

    def between(self, start: float, end: float) -> tuple[LiveInterval, ...]:
        """Return the parts of intervals that lie between two times. Raises `LookupError` if `start` is too long ago."""
        with self._lock:
            intervals = tuple(self._intervals)
        if start < intervals[0].start:
            raise LookupError("the versions that were live at this time are no longer recorded")
        return tuple(
            LiveInterval(interval.version, max(start, interval.start), end if interval.end is None else min(end, interval.end))
            for interval in intervals
            if interval.start <= end and (interval.end is None or interval.end >= start)
        )

    def _end_last(self) -> None:
        last = self._intervals[-1]
        if last.end is None:
            self._intervals[-1] = LiveInterval(last.version, last.start, self.clock())

"""Which version was live when: how completions are attributed to the weights that made them."""

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
    """`version` was live from `start` to `end` (seconds by `time.monotonic`; None if it still is). None is a version that is not known."""

    version: Version | None
    start: float
    end: float | None = None


@dataclass(slots=True)
class Attribution:
    """What a completion was made by. Filled when the generation has ended."""

    intervals: tuple[LiveInterval, ...] = field(default=())

    @property
    def versions(self) -> tuple[Version | None, ...]:
        """Oldest first. More than one if weights were swapped in mid-generation."""
        return tuple(interval.version for interval in self.intervals)


class LiveIntervals:
    """The versions that were live, newest last. Intervals do not touch: in between the engine was paused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._intervals: deque[LiveInterval] = deque([LiveInterval(None, clock())], maxlen=_KEPT)

    def end(self) -> None:
        """No version is live from now on. Does nothing if none is."""
        with self._lock:
            last = self._intervals[-1]
            if last.end is None:
                self._intervals[-1] = LiveInterval(last.version, last.start, self.clock())

    def begin(self, version: Version | None) -> None:
        """This version is live from now on."""
        with self._lock:
            last = self._intervals[-1]
            if last.end is None:
                self._intervals[-1] = LiveInterval(last.version, last.start, self.clock())
            self._intervals.append(LiveInterval(version, self.clock()))

    def all(self) -> tuple[LiveInterval, ...]:
        """The newest few thousand."""
        with self._lock:
            return tuple(self._intervals)

    def between(self, start: float, end: float) -> tuple[LiveInterval, ...]:
        """Those that were live at some time between, cut to it. `LookupError` for a time that is forgotten."""
        intervals = self.all()
        if start < intervals[0].start:
            raise LookupError("this was so long ago that it is not known any more which version was live")
        return tuple(
            LiveInterval(interval.version, max(start, interval.start), end if interval.end is None else min(end, interval.end))
            for interval in intervals
            if interval.start <= end and (interval.end is None or interval.end >= start)
        )

"""Which version was live when: how completions are attributed to the weights that made them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..chain.version import Version

_KEPT = 4096


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`version` was live from `start` to `end` (seconds by `time.monotonic`; None if it still is). None is a version that is not known."""

    version: Version | None
    start: float
    end: float | None = None


@dataclass(slots=True)
class Attribution:
    """What a completion was made by. Filled when the generation has ended."""

    spans: tuple[VersionSpan, ...] = field(default=())

    @property
    def versions(self) -> tuple[Version | None, ...]:
        """Oldest first. More than one if weights were swapped in mid-generation."""
        return tuple(span.version for span in self.spans)


class VersionSpans:
    """The versions that were live, newest last. Spans do not touch: in between the engine was paused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._spans: deque[VersionSpan] = deque([VersionSpan(None, clock())], maxlen=_KEPT)

    def end(self) -> None:
        """No version is live from now on. Does nothing if none is."""
        with self._lock:
            last = self._spans[-1]
            if last.end is None:
                self._spans[-1] = VersionSpan(last.version, last.start, self.clock())

    def begin(self, version: Version | None) -> None:
        """This version is live from now on."""
        with self._lock:
            last = self._spans[-1]
            if last.end is None:
                self._spans[-1] = VersionSpan(last.version, last.start, self.clock())
            self._spans.append(VersionSpan(version, self.clock()))

    def all(self) -> tuple[VersionSpan, ...]:
        """The newest few thousand."""
        with self._lock:
            return tuple(self._spans)

    def between(self, start: float, end: float) -> tuple[VersionSpan, ...]:
        """Those that were live at some time between, cut to it. `LookupError` for a time that is forgotten."""
        spans = self.all()
        if start < spans[0].start:
            raise LookupError("this was so long ago that it is not known any more which version was live")
        return tuple(
            VersionSpan(span.version, max(start, span.start), end if span.end is None else min(end, span.end))
            for span in spans
            if span.start <= end and (span.end is None or span.end >= start)
        )

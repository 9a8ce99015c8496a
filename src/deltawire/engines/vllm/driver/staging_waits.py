"""Decides when the sidecar asks the workers whether they have staged a version.

Generation waits for each question. But as long as the answer is not known, the server serves the old version. So the sidecar guesses from
earlier versions when the workers will be done, asks often around that time, and seldom before and after it.

A GPU takes as long for a small version as for a large one, because it decodes blocks of all weights at a fixed pace. On a CPU the time
grows with the bytes. After one version the time of the next one therefore lies between the same time and a time in proportion to its bytes.
Versions of two sizes show how much of the time is fixed.
"""

from __future__ import annotations

_SHORTEST, _LONGEST, _LONGEST_BEFORE = 0.005, 0.25, 1.0
"""Seconds between two questions: at least, at most, and at most before the expected time. A guess may be far too late."""
_EARLY, _LATE = 0.97, 1.1
"""The questions are close together from the first share of the expected time on until the second."""
_CLOSE, _BETWEEN, _AFTER, _UNKNOWN = 0.02, 0.3, 0.15, 0.4
"""A wait is this share of the time so far: near an expected end; between two expected ends; after the last one; without any guess."""
_SIMILAR = 1.5
"""Versions whose sizes differ by less than this factor do not show how the time depends on the size."""


class StagingWaits:
    """When to ask about the version that is being staged."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        """The bytes of the last version, and the seconds that it took."""
        self._other: tuple[int, float] | None = None
        """The same for the last version of another size."""
        self._size = 0
        self._ends: tuple[float, ...] = ()
        self._open = 0.0

    def begin(self, size: int) -> None:
        """Begin to wait for a version.

        Parameters
        ----------
        size
            The bytes that the workers decode. 0 if they decode nothing, for example because they still have the values of the version.
        """
        self._size, self._open = size, 0.0
        self._ends = self._guess(size) if size else ()

    def next(self, elapsed: float) -> float:
        """Return the seconds to wait before the workers are asked again. They have just said that they are not done.

        Parameters
        ----------
        elapsed
            The seconds since the workers began.
        """
        self._open = elapsed
        if not self._size:
            return _SHORTEST
        if not self._ends:
            return _within(_UNKNOWN * elapsed, _LONGEST)
        if any(_EARLY * end <= elapsed <= _LATE * end for end in self._ends):
            return _within(_CLOSE * elapsed, _LONGEST)
        until = next((_EARLY * end - elapsed for end in self._ends if _EARLY * end > elapsed), None)
        if until is not None and elapsed < self._ends[0]:
            return _within(until, _LONGEST_BEFORE)
        return _within(_AFTER * elapsed if until is None else min(_BETWEEN * elapsed, until), _LONGEST)

    def note(self, elapsed: float) -> None:
        """Note that the workers are done. They have ended at some time since the question before.

        Parameters
        ----------
        elapsed
            The seconds since the workers began.
        """
        if not self._size:
            return
        if self._last is not None and not _is_similar(self._last[0], self._size):
            self._other = self._last
        self._last = self._size, (self._open + elapsed) / 2

    def _guess(self, size: int) -> tuple[float, ...]:
        """Return when the workers may end, the earliest first. Empty if nothing is known."""
        if self._last is None:
            return ()
        last, seconds = self._last
        low, high = sorted((seconds, seconds * size / last))
        if _is_similar(last, size):
            return (seconds * size / last,)
        if self._other is None:
            return low, high
        slope = (seconds - self._other[1]) / (last - self._other[0])
        return (min(high, max(low, seconds + slope * (size - last))),)


def _is_similar(one: int, other: int) -> bool:
    return max(one, other) < _SIMILAR * min(one, other)


def _within(wait: float, longest: float) -> float:
    return max(_SHORTEST, min(wait, longest))

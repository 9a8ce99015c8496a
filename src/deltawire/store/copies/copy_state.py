"""The knowledge of a reader about one copy of a chain: how near it is, what it has, and when to ask it again. Asks no store itself."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from ..base import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 300.0
"""Seconds for which a copy is left alone after its first failure in a row, and at most."""

_MOST_NOTES = 4096
_MEASURED_FOR = 600.0
"""Seconds after which a measured rate is forgotten, so that the copy is tried again."""

_WITHOUT_PROGRESS = 0.2
"""The share of the patience with a copy that has got nothing new since the reader began."""

_LEAST_MEASURED = 64 << 10
_NOTICEABLE = 0.005
"""Differences of latency below this many seconds do not count."""


class Copy:
    """One copy of a chain. May be used from several threads.

    Parameters
    ----------
    store
        The store that holds the copy.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.has_run = False
        """Whether the copy is of the origin's chain, as far as its `run.json` says."""
        self.is_read = False
        """Whether data were read from the copy since it was last left alone."""
        self.latency: float | None = None
        """The shortest time that it took to answer a small request."""
        self._rate: float | None = None
        self._measured_at = 0.0
        self._failures = 0
        self._not_before = float("-inf")
        self._newest = -1
        """The highest commit that the copy has shown."""
        self._given_up = -1
        """Data of this commit and later ones are not waited for. −1 if the copy keeps up."""
        self._progress_at = float("-inf")
        self._has_progressed = False
        """Whether something new has arrived since this reader looks: a relay runs. Before that, it may have stopped long ago."""
        self._missed: OrderedDict[str, float] = OrderedDict()
        self._excluded: OrderedDict[str, None] = OrderedDict()
        self._transfers = 0
        """How many objects are being read from the copy."""
        self._moved, self._moved_since = 0, 0.0
        """The bytes that arrived, and since when."""
        self._is_too_slow = False
        self._lock = threading.Lock()

    # Whether to ask it

    def is_due(self, now: float) -> bool:
        return now >= self._not_before

    def wait_until(self, when: float) -> None:
        """Ask nothing before this time."""
        self._not_before = when

    def leave(self, now: float) -> float:
        """Leave the copy alone for a time, which grows with each failure in a row. Return the seconds."""
        with self._lock:
            seconds = min(_FIRST_PAUSE * 2.0 ** min(self._failures, 30), _LONGEST_PAUSE)
            self._failures += 1
            self._not_before = now + seconds
            self.has_run = self.is_read = False
            return seconds

    def is_nearer_than(self, origin: float | None) -> bool:
        """Return whether the copy answers faster than the origin, or about as fast. True as long as one of them is not measured."""
        return origin is None or self.latency is None or self.latency <= 2 * origin + _NOTICEABLE

    def is_far_from(self, nearest: float | None) -> bool:
        return nearest is not None and self.latency is not None and self.latency > 4 * nearest + _NOTICEABLE

    def rank(self, now: float, nearest: float | None) -> tuple[int, float]:
        """Return the rank in the order in which copies are read: near ones that are not measured yet, then the fastest, then far ones."""
        measured = self._rate is not None and now < self._measured_at + _MEASURED_FOR
        link = self.store.link
        rate = link.goodput if measured and link is not None and link.goodput is not None else self._rate
        if measured and rate is not None:
            return 1, -rate
        return (2, 0.0) if self.is_far_from(nearest) else (0, 0.0)

    # Answers

    def answered(self, seconds: float) -> None:
        """Note that a small request took this long."""
        self.latency = seconds if self.latency is None else min(self.latency, seconds)

    def showed(self, seq: int | None, now: float) -> None:
        """Note that the copy has a commit. Its data were there before."""
        if seq is None or seq <= self._newest:
            return
        with self._lock:
            self._has_progressed = self._has_progressed or self._newest >= 0
            self._newest, self._progress_at, self._failures = seq, now, 0
            self._missed.clear()
            if seq >= self._given_up:
                self._given_up = -1

    def delivered(self, key: str, size: int, began: float, now: float) -> None:
        """Note that data were read."""
        with self._lock:
            self._failures = 0
            if self._missed.pop(key, None) is not None:
                self._progress_at, self._has_progressed = now, True
            if size >= _LEAST_MEASURED and now > began:
                rate = size / (now - began)
                self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
                self._measured_at = now
            elif self._rate is None:
                self._rate, self._measured_at = 0.0, now

    @contextmanager
    def reading(self, now: float) -> Iterator[None]:
        """Note that an object is being read, for the time of a context."""
        with self._lock:
            if not self._transfers:
                self._moved, self._moved_since, self._is_too_slow = 0, now, False
            self._transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1

    def is_too_slow(self, count: int, now: float, seconds: float, slowest: float) -> bool:
        """Note that bytes arrived. Return whether all transfers together brought fewer than `slowest` per second for so many seconds.

        All transfers are told so then, until they have ended.
        """
        with self._lock:
            self._moved += count
            passed = now - self._moved_since
            if passed >= seconds:
                self._is_too_slow = self._is_too_slow or self._moved < slowest * passed
                self._moved, self._moved_since = 0, now
            return self._is_too_slow

    # Content

    def may_have(self, key: str, seq: int) -> bool:
        """Return whether to look for data there."""
        return key not in self._excluded and not 0 <= self._given_up <= seq

    def exclude(self, key: str) -> None:
        """Do not read this object from here again."""
        with self._lock:
            self._excluded[key] = None
            while len(self._excluded) > _MOST_NOTES:
                self._excluded.popitem(last=False)

    def is_awaited(self, key: str, seq: int, now: float, patience: float) -> bool:
        """Return whether missing data may still come: the copy has not shown their commit, and its last progress is not long ago."""
        with self._lock:
            if seq <= self._newest:
                return False
            since = max(self._missed.setdefault(key, now), self._progress_at)
            while len(self._missed) > _MOST_NOTES:
                self._missed.popitem(last=False)
            return now < since + self._patience(patience)

    def is_waited_for(self, now: float, patience: float) -> bool:
        """Return whether data that were missing may still come. The copy cannot be blamed for what they lead to then."""
        with self._lock:
            return any(now < max(since, self._progress_at) + self._patience(patience) for since in self._missed.values())

    def _patience(self, longest: float) -> float:
        return longest if self._has_progressed else longest * _WITHOUT_PROGRESS

    def gave_up(self, seq: int) -> bool:
        """Note that data of a commit were waited for in vain. Return False if they were not waited for."""
        with self._lock:
            self._missed.clear()
            if seq <= self._newest or self._given_up == seq:
                return False
            self._given_up = seq
            return True

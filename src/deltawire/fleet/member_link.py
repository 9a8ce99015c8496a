"""Measures the link of a member, and how long updates take to reach it, for its heartbeats."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable

from ..chain.version import Version
from ..format.records.member_records import MAX_FAILURES, MAX_GOODPUT, MAX_MILLISECONDS, LinkReport
from ..store.base import Store

_REMEMBERED = 5
"""The report is the median of this many updates, so that one update that was late for another reason does not count."""


class MemberLink:
    """Measures one member. May be used from several threads.

    Parameters
    ----------
    store
        The store that the member reads and writes.
    clock
        Returns seconds since 1970. They are compared with the times of commits. If this clock or that of the publisher is wrong, so is the
        report, and the trainer's own observations bound it.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._started = clock()
        self._last: int | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def saw(self, version: Version | None) -> None:
        """Note the version that the engine has now. Call it often.

        Versions from before the member's start do not count, because they waited for the member, and not for its link.

        Parameters
        ----------
        version
            The version; None while the engine has none.
        """
        if version is None or version.seq == self._last:
            return
        with self._lock:
            is_news = self._last is not None and version.seq > self._last and version.time > self._started
            self._last = version.seq
            if is_news:
                self._seconds.append(max(0.0, self._clock() - version.time))

    def report(self) -> tuple[LinkReport | None, int | None]:
        """Return the link to the store, and the milliseconds that the last updates took. Each is None while it is unknown."""
        with self._lock:
            behind = round(1000 * statistics.median(self._seconds)) if self._seconds else None
        link = self._store.link
        if link is None or (link.goodput is None and link.latency is None):
            return None, None if behind is None else min(behind, MAX_MILLISECONDS)
        report = LinkReport(
            None if link.goodput is None else min(round(link.goodput), MAX_GOODPUT),
            None if link.latency is None else min(round(1000 * link.latency), MAX_MILLISECONDS),
            min(link.failures, MAX_FAILURES),
        )
        return report, None if behind is None else min(behind, MAX_MILLISECONDS)

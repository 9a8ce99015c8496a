"""Asks the store for its time, so that no other clock decides when a window ends."""

from __future__ import annotations

from collections.abc import Callable

from ...fleet.steps.requests import Steps
from ...store import live_keys
from ...store.base import ObjectInfo
from ...store.requests import Head, Put

_ASK_EVERY = 60.0
_CONTENT = b"{}"


class StoreClock:
    """The store's time, which is asked once a minute. In between, seconds are counted here.

    The answer is never ahead of the store: a window may end a little late, and never early.

    Parameters
    ----------
    ticks
        Returns seconds that never run backwards, such as `time.monotonic`. Only differences matter.
    """

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self._ahead: float | None = None
        self._asked = 0.0

    def now(self) -> Steps[float]:
        """Return the store's time in seconds since 1970."""
        if self._ahead is None or self._ticks() - self._asked >= _ASK_EVERY:
            yield Put(live_keys.CLOCK, _CONTENT, durable=False)
            info: ObjectInfo = yield Head(live_keys.CLOCK)
            self._asked = self._ticks()
            self._ahead = info.modified.timestamp() - self._asked
        return self._ticks() + self._ahead

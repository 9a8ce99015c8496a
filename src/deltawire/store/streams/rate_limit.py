"""Limit the bytes and the requests per second of a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_SECONDS, _LEAST_BURST = 0.25, 1 << 20
"""After a pause, this many seconds of bytes may pass at once, or this many bytes if that is more."""
_REQUEST_BURST = 1.0
"""After a pause, this many seconds of requests may be sent at once, but at least one request."""


class RateLimit:
    """Makes callers wait so that no more bytes and requests pass per second than allowed. May be used from several threads.

    Callers are served in the order in which they come. A caller that takes more than a burst waits for the rest afterwards.

    Parameters
    ----------
    bytes_per_second
        The most bytes per second. None means no limit.
    requests_per_second
        The most requests per second. None means no limit.
    clock
        Returns the current time in seconds.
    sleep
        Waits for a number of seconds.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        requests_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes = None if bytes_per_second is None else _Bucket(bytes_per_second, max(_BURST_SECONDS * bytes_per_second, _LEAST_BURST))
        self._requests = None if requests_per_second is None else _Bucket(requests_per_second, max(_REQUEST_BURST * requests_per_second, 1))
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def request(self) -> None:
        """Wait until a request may be sent."""
        self._take(self._requests, 1)

    def transfer(self, nbytes: int) -> None:
        """Wait until this many bytes may pass, or until those before them have passed if they came already."""
        self._take(self._bytes, nbytes)

    def _take(self, bucket: _Bucket | None, amount: int) -> None:
        if bucket is None or not amount:
            return
        with self._lock:
            wait = bucket.take(amount, self._clock())
        if wait > 0:
            self._sleep(wait)


class _Bucket:
    """Holds what may pass at once. It fills at `rate` per second up to `most`, and may be in debt."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = self._level = most
        self._last: float | None = None

    def take(self, amount: float, now: float) -> float:
        """Take an amount. Returns the seconds to wait until it was there. Later callers wait until after that."""
        if self._last is not None:
            self._level = min(self._most, self._level + max(0.0, now - self._last) * self._rate)
        self._last = now
        self._level -= amount
        return max(0.0, -self._level / self._rate)

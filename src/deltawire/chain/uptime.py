"""A clock for things that expire in the store. It continues while this machine is suspended."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def uptime() -> float:
    """Return seconds on a clock that never goes back and, on Linux, counts time in suspension.

    `time.monotonic` stands still during suspension, so an expired pin would look fresh.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)

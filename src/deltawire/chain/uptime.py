"""A clock for what expires in the store: it goes on while this machine is suspended."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def uptime() -> float:
    """Returns seconds on a clock that never goes back, and that counts time in suspension where the system can tell (Linux).

    `time.monotonic` stands still there, so a pin that expired meanwhile would look fresh.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)

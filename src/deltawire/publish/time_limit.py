"""A limit for the time that a call waits."""

from __future__ import annotations

import threading
from time import monotonic

_LONGEST = threading.TIMEOUT_MAX / 2
"""A longer time, such as infinity, is no limit. Python raises OverflowError if a thread is to wait for so long."""


class TimeLimit:
    """The time that is left to a call. It begins now.

    Parameters
    ----------
    seconds
        The limit. None or infinity: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._deadline = None if seconds is None or seconds > _LONGEST else monotonic() + seconds

    @property
    def left(self) -> float | None:
        """The seconds that are left; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

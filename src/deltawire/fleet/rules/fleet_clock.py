"""How old the objects of a fleet are, by a clock that only the trainer can set. The caller passes in the source of time."""

from __future__ import annotations

from collections.abc import Callable


class FleetClock:
    """The trainer's clock for leases, heartbeats and offers (docs/protocol.md §10, "Time").

    The store's clock may be wrong, and may be set forward or back at any time. The trainer uses the modification time of an object only to
    estimate how old the object already was when it first saw it. That estimate is bounded: the object is not from the future, and it is
    not older than the last look at the store that did not show it.

    Parameters
    ----------
    ticks
        Returns seconds that never run backwards, such as `time.monotonic`. Only differences matter.
    """

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self.now = ticks()
        """The time of the last look at the store."""
        self._began = self._before = float("-inf")
        self._ahead: float | None = None

    @property
    def is_set(self) -> bool:
        """True once the trainer has seen the store's time of an object that it wrote itself."""
        return self._ahead is not None

    @property
    def is_bounded(self) -> bool:
        """True if an earlier look bounds how old the objects are that the last look showed for the first time."""
        return self._before > float("-inf")

    def begin(self) -> float:
        """Return the time of this moment: at which a listing begins (see `looked`), or at which an object was written (see `wrote`)."""
        return self._ticks()

    def looked(self, began: float) -> None:
        """Note that the store was listed from `began` until now. Objects that this listing does not show did not exist at `began`."""
        self._before, self._began = self._began, began
        self.now = max(self.now, self._ticks())

    def wrote(self, modified: float, at: float) -> None:
        """Note the store's time of an object that the trainer wrote at the time `at` of this clock."""
        self._ahead = modified - at

    def since(self, modified: float) -> float:
        """Return when an object that the last listing showed for the first time was written, by this clock."""
        guess = self.now if self._ahead is None else modified - self._ahead
        return min(max(guess, self._before), self.now)

"""How old things in a fleet are, by a clock that nobody else can set. Pure: the caller passes in what tells the time."""

from __future__ import annotations

from collections.abc import Callable


class FleetClock:
    """The trainer's clock for leases, heartbeats and offers (docs/protocol.md §10, "Time").

    `ticks` gives seconds that never run backwards, such as `time.monotonic`; only differences matter. The store's clock may be wrong, and
    may be set forward or back at any time. Modification times of objects are only used to estimate how old an object already was when the
    trainer first saw it, and that estimate is bounded: the object is not from the future, and it is not older than the last look at the
    store that did not show it.
    """

    def __init__(self, ticks: Callable[[], float]) -> None:
        self._ticks = ticks
        self.now = ticks()
        """The time of the last look at the store."""
        self._began = self._before = float("-inf")
        self._ahead: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether the trainer has seen the store's time of an object that it wrote itself."""
        return self._ahead is not None

    def begin(self) -> float:
        """Returns the time at which a listing begins. Pass it to `looked` once the listing is complete."""
        return self._ticks()

    def looked(self, began: float) -> None:
        """Note that the store was listed from `began` until now. Objects that this listing does not show did not exist at `began`."""
        self._before, self._began = self._began, began
        self.now = max(self.now, self._ticks())

    def wrote(self, modified: float) -> None:
        """Note the store's time of an object that the trainer has just written."""
        self._ahead = modified - self._ticks()

    def since(self, modified: float) -> float:
        """Returns when an object that the last listing showed for the first time was written, by this clock."""
        guess = self.now if self._ahead is None else modified - self._ahead
        return min(max(guess, self._before), self.now)

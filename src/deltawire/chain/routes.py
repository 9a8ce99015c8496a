"""Ways to a version, without those that turned out not to lead there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..errors import DataMissing, DeltawireError, VersionGone
from ..events import OnEvent, emit
from ..format.records.chain_records import Commit, CommitRef
from .log import ChainLog
from .restore import Hop, Way, find_route


class HopFailed(Exception):
    """One hop of a way could not be done. `error` says why.

    With `is_data_lost`, its objects are damaged or missing in the store. Without, they are what their record says, but do not lead from the
    state at hand to the hop's target: one of both is wrong.
    """

    def __init__(self, hop: Hop, error: DeltawireError, *, is_data_lost: bool = False) -> None:
        super().__init__(f"{hop.source} to {hop.target.describe()}: {error}")
        self.hop = hop
        self.error = error
        self.is_data_lost = is_data_lost


class FindRoute(Protocol):
    """Finds ways, and learns which are of no use."""

    def find(self, have: CommitRef | None, target: Commit) -> list[Hop]: ...

    def avoid(self, failure: HopFailed) -> None: ...


class Routes:
    """The ways that a chain offers during one sync: damaged ones are tried again by the next, for somebody may have repaired them."""

    def __init__(self, log: ChainLog, *, on_event: OnEvent | None = None) -> None:
        self._log = log
        self._on_event = on_event
        self._without: set[Way] = set()
        self._failure: HopFailed | None = None

    def find(self, have: CommitRef | None, target: Commit) -> list[Hop]:
        """The cheapest way that is left. Where none is, raises what one of them failed with, one that may heal if there is such; or
        `VersionGone`."""
        try:
            return find_route(self._log, have, target, without=self._without)
        except VersionGone:
            if self._failure is None:
                raise
            raise self._failure.error from None

    def avoid(self, failure: HopFailed) -> None:
        """Find no way over this hop any more. Raises the failure's error if the hop was ruled out before: callers must not loop."""
        hop = failure.hop
        if hop.way in self._without:
            raise failure.error
        emit(self._on_event, "avoiding", source=hop.source, base=hop.base, target=hop.target.seq, reason=str(failure.error))
        self._without.add(hop.way)
        if self._failure is None or failure.error.retryable or not self._failure.error.retryable:
            self._failure = failure


def was_collected(log: ChainLog, hop: Hop) -> Callable[[], bool]:
    """To be asked when an object of this hop is missing: whether it was collected.

    One of a shortcut that was not is `DataMissing` at once. Its files are there before its record, so it is not worth waiting for (the
    writer may have been dead to the world while they were collected), and there are other ways.
    """

    def ask() -> bool:
        if log.floor() >= hop.target.seq:
            return True
        if hop.is_shortcut:
            raise DataMissing(f"the files of the {hop.source} to {hop.target.describe()} are not all in {log.store.url}.")
        return False

    return ask

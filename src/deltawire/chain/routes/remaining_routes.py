"""Routes to a version, without the hops that failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from ...errors import DataMissing, VersionGone
from ...events import OnEvent, emit
from ...format.records.record_parts import CommitRef
from ...format.records.version_records import Commit
from ..fetch import Fetcher
from ..log import ChainLog
from .restore import Hop, HopName, find_route
from .walk_route import AvoidsHops, HopFailed, taking


class FindRoute(AvoidsHops, Protocol):
    """Finds routes, and learns which hops to avoid."""

    def find(self, have: CommitRef | None, target: Commit) -> list[Hop]: ...


class Routes:
    """Find routes through a chain during one sync. The next sync starts anew, because damaged data may have been repaired by then.

    Parameters
    ----------
    log
        The chain.
    fetcher
        Fetches file lists. Without one, a missing list is not waited for.
    on_event
        Called with each event.
    """

    def __init__(self, log: ChainLog, *, fetcher: Fetcher | None = None, on_event: OnEvent | None = None) -> None:
        self._log = log
        self._fetcher = fetcher
        self._on_event = on_event
        self._without: set[HopName] = set()
        self._failure: HopFailed | None = None

    def find(self, have: CommitRef | None, target: Commit) -> list[Hop]:
        """Return the cheapest route that is left, with all files of its hops. A hop whose file list cannot be read is avoided.

        If none is left, raises the error of a hop that failed, preferably a retryable one, or `VersionGone` if no hop was tried.
        """
        while True:
            try:
                hops = find_route(self._log, have, target, without=self._without)
            except VersionGone:
                if self._failure is None:
                    raise
                raise self._failure.error from None
            try:
                return [self._with_files(hop) for hop in hops]
            except HopFailed as failure:
                self.avoid(failure)

    def _with_files(self, hop: Hop) -> Hop:
        """Return the same hop, with the files of its file list."""
        if not hop.has_unread_list:
            return hop
        with taking(hop):
            files = self._log.files_of(hop.record, fetcher=self._fetcher, collected=was_collected(self._log, hop))
        return dataclasses.replace(hop, files=files)

    def avoid(self, failure: HopFailed) -> None:
        """Leave this hop out of all later routes. Raises the failure's error if the hop was already ruled out, so that no caller loops."""
        hop = failure.hop
        if hop.name in self._without:
            raise failure.error
        emit(self._on_event, "avoiding", source=hop.source, base=hop.base, target=hop.target.seq, reason=str(failure.error))
        self._without.add(hop.name)
        if self._failure is None or failure.error.retryable or not self._failure.error.retryable:
            self._failure = failure


def was_collected(log: ChainLog, hop: Hop) -> Callable[[], bool]:
    """Return a function that tells whether a missing object of this hop was collected.

    The function raises `DataMissing` for the files of a shortcut that were not collected. They are written before the shortcut's record,
    so waiting for them is useless, and there are other routes.
    """

    def ask() -> bool:
        if log.floor() >= hop.target.seq:
            return True
        if hop.is_shortcut:
            raise DataMissing(f"the files of the {hop.source} to {hop.target.describe()} are not all in {log.store.url}.")
        return False

    return ask

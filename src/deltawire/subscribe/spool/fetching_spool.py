"""A spool whose readers fetch what they need themselves, for engines without a process beside them that does it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

from ...chain.fetch import Fetcher
from ...chain.reader_options import ReaderOptions
from ...chain.routes.remaining_routes import Routes
from ...chain.routes.restore import Hop
from ...chain.routes.walk_route import taking, walk_route
from ...errors import VersionUnknown
from ...events import OnEvent
from ...format.records.record_parts import CommitRef
from ...format.records.version_records import Commit
from ...store import Store
from ...store.copies.locations import Location
from ..cache.host_cache import open_host_cache
from ..chain_view import ChainView
from ..sync_context import SyncContext
from .delta_spool import DeltaSpool
from .spooled_hop import SpooledHop

KEPT_HOPS = 2
"""Hops that stay in the spool: the one that was taken last, and the one before, which another engine of this host may still need."""


class FetchingSpool(DeltaSpool):
    """A spool and the chain that it is filled from.

    All workers of a host may ask for the same hop at the same time: the first one fetches it. The store is opened when something is needed
    from there for the first time.

    Parameters
    ----------
    folder
        The directory.
    url
        The location of the chain, or an open store. Or a list of them: the origin, and copies that relays keep.
    options
        Which chain to accept, and how to read it.
    most_bytes
        Most bytes of delta files.
    on_event
        Called with each event.
    """

    def __init__(
        self,
        folder: Path,
        url: Location,
        *,
        options: ReaderOptions | None = None,
        most_bytes: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(folder, most_bytes=most_bytes)
        self._options = options or ReaderOptions()
        self._url = url
        self._on_event = on_event
        self._opening = threading.Lock()
        self._opened: ChainView | None = None

    def hop(self, base: CommitRef, seq: int) -> SpooledHop | None:
        """Return the hop from a commit to commit `seq`, and fetch it if it is not there. None if no single delta leads there.

        Fences on the way do not count: they have no files, and the version after them has the same base as they have.

        Raises the errors of `DeltaSpool.put`, and `VersionUnknown` if commit `seq` makes no version of the chain.
        """
        found = super().hop(base, seq)
        if found is not None:
            return found
        target = self._version(seq)
        context = self._context()

        def take(hops: Sequence[Hop]) -> SpooledHop | None:
            deltas = [hop for hop in hops if hop.source != "fence"]
            if len(deltas) != 1 or deltas[0].base is None:
                return None
            with taking(deltas[0]):
                put = self.put(dataclasses.replace(deltas[0], base=base.seq), context)
            self.keep_only(KEPT_HOPS)
            return put

        return walk_route(context.routes, lambda: context.routes.find(base, target), take)

    def route(self, have: CommitRef | None, seq: int) -> tuple[Sequence[Hop], SyncContext]:
        """Return the hops that lead to a version, and the sync in which they were found. It can fetch them (`put`, `shard`).

        Parameters
        ----------
        have
            The commit that the reader has. None for a route that begins with a full checkpoint.
        seq
            The number of the version's commit.
        """
        target = self._version(seq)
        context = self._context()
        return context.routes.find(have, target), context

    def _version(self, seq: int) -> Commit:
        target = self._chain.version_at(self._chain.head(), seq)
        if target.seq != seq:
            raise VersionUnknown(f"commit {seq} in {self._chain.log.store.url} is a fence, which makes no version.")
        return target

    @property
    def _chain(self) -> ChainView:
        with self._opening:
            if self._opened is None:
                store = self._options.open_store(self._url, on_event=self._on_event)
                self._opened = ChainView(self._options.open_log(store))
            return self._opened

    def _context(self) -> SyncContext:
        """Return a new sync."""
        log, patience = self._chain.log, self._options.patience
        shared = open_host_cache(self._options, self._on_event)
        fetcher = Fetcher(log.store, limits=log.limits, patience=patience, on_event=self._on_event, shared=shared)
        routes = Routes(log, fetcher=fetcher, on_event=self._on_event)
        return SyncContext(log, routes, patience=patience, on_event=self._on_event, shared=shared)

    def close(self) -> None:
        """Release the store. The files stay."""
        with self._opening:
            if self._opened is not None and not isinstance(self._url, Store):
                self._opened.log.store.close()
            self._opened = None

"""A replica in other processes of this host, such as the workers of an engine. They take deltas from a spool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from ..chain.fetch import Fetcher
from ..chain.reader_options import ReaderOptions
from ..chain.restore import Hop
from ..chain.routes import Routes
from ..chain.walk_route import HopFailed, taking, walk_route
from ..events import OnEvent, emit
from ..format.records.record_parts import CommitRef
from ..format.records.version_records import Commit
from ..store import Store, open_store
from .chain_view import ChainView
from .delta_spool import DeltaSpool, SpooledHop
from .sync_context import SyncContext

KEPT_HOPS = 2
"""Hops that stay in the spool: the one that was taken last, and the one before, which another engine of this host may still need."""


class SpoolReader(Protocol):
    """The processes that hold the weights."""

    @property
    def commit(self) -> Commit | None:
        """The commit that the weights have. None if it is unknown."""
        ...

    def take(self, hop: SpooledHop) -> None:
        """Bring the weights to the target of a hop, which is in the spool.

        Raises a `StateError` if the weights are not those of the hop's base, and a `DeltaError` if the hop does not lead to its target.
        Another route is tried then. Every other error ends the sync.
        """
        ...

    def load(self, checkpoint: Hop, context: SyncContext) -> None:
        """Load all weights from a full checkpoint, which is not in the spool."""
        ...


class SpoolReplica:
    """Brings the processes that read a spool to a version, hop by hop. For `Subscriber(replica=…)`.

    Parameters
    ----------
    spool
        Where the processes find hops.
    reader
        The processes.
    """

    def __init__(self, spool: DeltaSpool, reader: SpoolReader) -> None:
        self._spool = spool
        self._reader = reader

    @property
    def commit(self) -> Commit | None:
        commit = self._reader.commit
        return None if commit is None or commit.kind == "fence" else commit

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """Nothing: the weights are in other processes."""
        return {}

    @property
    def mirror(self) -> None:
        return None

    def move(self, target: Commit, context: SyncContext) -> None:
        """Take the hops of a route to a version. After an error, the weights are at a version between the old one and the target."""
        is_damaged = False

        def find() -> Sequence[Hop]:
            have = None if is_damaged else self._reader.commit
            with context.report.watch.phase("find"):
                return context.routes.find(None if have is None else context.log.ref(have), target)

        def take(hops: Sequence[Hop]) -> None:
            nonlocal is_damaged
            for hop in hops:
                if hop.base is None:
                    context.report.resynced = self._reader.commit is not None
                    with taking(hop):
                        self._reader.load(hop, context)
                    is_damaged = False
                else:
                    with taking(hop):
                        spooled = self._spool.put(hop, context)
                        with context.report.watch.phase("apply"):
                            self._reader.take(spooled)
                    self._spool.keep_only(KEPT_HOPS)
                context.report.hops += 1

        def drop_base(failure: HopFailed) -> None:
            nonlocal is_damaged
            is_damaged = True
            emit(context.on_event, "state-refused", seq=failure.hop.base, reason=str(failure.error))

        walk_route(context.routes, find, take, drop_base=drop_base)

    def close(self) -> None:
        """Do nothing. The processes keep their weights, and the spool its files."""


class FetchingSpool(DeltaSpool):
    """A spool whose readers fetch hops themselves, for engines without a process beside them that does it.

    All workers of a host may ask for the same hop at the same time: the first one fetches it.

    Parameters
    ----------
    folder
        The directory.
    url
        The location of the chain, or an open store.
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
        url: str | Path | Store,
        *,
        options: ReaderOptions | None = None,
        most_bytes: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(folder, most_bytes=most_bytes)
        self._options = options or ReaderOptions()
        self._owns_store = not isinstance(url, Store)
        self._store = open_store(url, options=self._options.store, on_event=on_event)
        self._chain = ChainView(self._options.open_log(self._store))
        self._on_event = on_event

    def hop(self, base: CommitRef, seq: int) -> SpooledHop | None:
        """Return the hop from a commit to commit `seq`, and fetch it if it is not there. None if no single hop leads there.

        Raises the errors of `DeltaSpool.put`, and `VersionUnknown` if the chain does not have commit `seq`.
        """
        found = super().hop(base, seq)
        if found is not None:
            return found
        target = self._chain.version_at(self._chain.head(), seq)
        if target.seq != seq:  # a fence, which makes no version
            return None
        context = self.context()

        def take(hops: Sequence[Hop]) -> SpooledHop | None:
            if len(hops) != 1 or hops[0].base is None:
                return None
            with taking(hops[0]):
                put = self.put(hops[0], context)
            self.keep_only(KEPT_HOPS)
            return put

        return walk_route(context.routes, lambda: context.routes.find(base, target), take)

    def context(self) -> SyncContext:
        """Return a new sync, such as `stream_anchor` needs."""
        log, patience = self._chain.log, self._options.patience
        fetcher = Fetcher(log.store, limits=log.limits, patience=patience, on_event=self._on_event)
        routes = Routes(log, fetcher=fetcher, on_event=self._on_event)
        return SyncContext(log, routes, patience=patience, on_event=self._on_event)

    def close(self) -> None:
        """Release the store. The files stay."""
        if self._owns_store:
            self._store.close()

"""The context of one sync: the chain, routes through it, and fetchers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..chain.fetch import Fetcher, SharedFiles, WasCollected
from ..chain.log import ChainLog
from ..chain.reader_options import PATIENCE
from ..chain.routes.remaining_routes import Routes, was_collected
from ..chain.routes.restore import Hop
from ..errors import RollbackDetected
from ..events import OnEvent
from ..format.records.record_parts import CommitRef, FileEntry
from ..store.base import Progress
from .files_ahead import FilesAhead
from .sync_report import SyncReport


@dataclass
class SyncContext:
    """One sync.

    Parameters
    ----------
    log
        The chain.
    routes
        Finds routes and avoids hops that failed.
    report
        Counts what the sync costs.
    newest
        Whether the target is the newest version, so that an even newer one is fine too.
    check_wanted
        Called when everything is ready, before the version is served. Raises an exception if the target is no longer wanted.
    in_one
        Whether versions between the present one and the target must not be served, not even for a moment.
    patience
        Seconds to wait for data that arrive after their commit.
    progress
        Called with the number of bytes fetched.
    ahead
        Files that were fetched before their commit was read.
    on_event
        Called with each event.
    is_halted
        Returns whether the sync should end early.
    shared
        Files that the processes of this host share.
    """

    log: ChainLog
    routes: Routes
    report: SyncReport = field(default_factory=SyncReport)
    newest: bool = True
    check_wanted: Callable[[], None] = lambda: None
    in_one: bool = False
    patience: float = PATIENCE
    progress: Progress | None = None
    ahead: FilesAhead | None = None
    on_event: OnEvent | None = None
    is_halted: Callable[[], bool] = lambda: False
    """Whether the sync should end early, because its result is no longer wanted."""
    shared: SharedFiles | None = None
    _abandoned: threading.Event = field(default_factory=threading.Event)

    def route_fetcher(self, hops: Sequence[Hop], *, resolved: Collection[FileEntry] = ()) -> RouteFetcher:
        """Return a fetcher for the delta files of a route, except for those that are resolved already."""
        return RouteFetcher(self.log, hops, self.progress, resolved=resolved, **self._fetching)

    def fetcher(self) -> Fetcher:
        """Return a fetcher with the settings of this sync."""
        return Fetcher(self.log.store, **self._fetching)

    def to_file(self, hop: Hop, entry: FileEntry, path: Path) -> None:
        """Fetch a file of a hop. Afterwards it is checked and on disk. A file that an earlier call did not finish is continued."""
        self.fetcher().fetch_to_file(entry, path, resume=True, collected=was_collected(self.log, hop), progress=self.progress)

    def to_memory(self, hop: Hop, entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, memoryview]]:
        """Fetch files of a hop in order, and check them."""
        return self.fetcher().prefetch(entries, collected=was_collected(self.log, hop), progress=self.progress)

    def abandon(self) -> None:
        """Stop waiting for data that are being fetched, because they are no longer wanted."""
        self._abandoned.set()
        self._abandoned = threading.Event()

    def vouch(self, ref: CommitRef) -> None:
        """Raise `RollbackDetected` unless a commit that another process put into the mirror belongs to the chain that this reader
        trusts.
        """
        commit = self.log.read(ref.seq)
        if commit is None or self.log.ref(commit) != ref:
            raise RollbackDetected(f"commit {ref.seq}, which the mirror holds, is not the one in {self.log.store.url}.")
        self.log.accept(commit)

    def _take_ahead(self, entry: FileEntry) -> memoryview | None:
        assert self.ahead is not None
        data = self.ahead.take(entry)
        if data is not None:
            self.report.came_ahead([entry])
        return data

    @property
    def _fetching(self) -> dict[str, Any]:
        abandoned = self._abandoned
        return {
            "limits": self.log.limits,
            "patience": self.patience,
            "watch": self.report.watch,
            "ahead": None if self.ahead is None else self._take_ahead,
            "on_event": self.on_event,
            "is_stopped": lambda: abandoned.is_set() or self.is_halted(),
            "shared": self.shared,
        }


class RouteFetcher(Fetcher):
    """Fetches the delta files of a route in the order of its hops. The files of the next hop are fetched while one hop is applied.

    Ask for exactly these files in exactly this order, hop by hop, and close it afterwards. Files in `resolved` are left out.
    """

    def __init__(
        self, log: ChainLog, hops: Sequence[Hop], arrived: Progress | None, *, resolved: Collection[FileEntry] = (), **fetching: Any
    ) -> None:
        super().__init__(log.store, **fetching)
        deltas = [(entry, hop) for hop in hops if hop.base is not None for entry in hop.files if entry not in resolved]
        self._collected = {entry.key: was_collected(log, hop) for entry, hop in deltas}
        coming = super().prefetch([entry for entry, _ in deltas], progress=arrived)
        self._coming = cast(Generator[tuple[FileEntry, memoryview], None, None], coming)

    def fetch(self, entry: FileEntry, *, collected: WasCollected | None = None, progress: Progress | None = None) -> memoryview:
        return super().fetch(entry, collected=self._collected.get(entry.key, collected), progress=progress)

    def prefetch(
        self, entries: Sequence[FileEntry], *, collected: WasCollected | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[FileEntry, memoryview]]:
        if any(entry.key not in self._collected for entry in entries):  # the shards of an anchor
            yield from super().prefetch(entries, collected=collected, progress=progress)
            return
        for entry in entries:
            coming, data = next(self._coming)
            assert coming == entry
            yield coming, data

    def hand_out(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        """Return these files, which were all fetched, from the next calls of `prefetch`. Each is kept in memory until then."""
        waiting = deque(files)
        self._coming = (waiting.popleft() for _ in range(len(waiting)))

    def close(self) -> None:
        """Stop fetching ahead."""
        self._coming.close()

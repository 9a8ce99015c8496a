"""A replica that fetches and checks the files of each version, and does not decode them: engines with GPUs do that from their spool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from deltawire.format.records.record_parts import FileEntry
from deltawire.format.records.version_records import Commit
from deltawire.subscribe.sync_context import SyncContext


class StagedReplica:
    """The commit whose files were fetched last.

    Parameters
    ----------
    commit
        The first version, which is there already.
    """

    def __init__(self, commit: Commit) -> None:
        self.commit = commit
        self._ahead: set[FileEntry] = set()

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return {}

    @property
    def mirror(self) -> None:
        return None

    def move(self, target: Commit, context: SyncContext) -> None:
        """Fetch and check all files on the way to a version."""
        with context.report.watch.phase("find"):
            hops = context.routes.find(context.log.ref(self.commit), target)
        fetcher = context.route_fetcher(hops, resolved=self._ahead)
        try:
            for hop in hops:
                for _ in fetcher.prefetch([entry for entry in hop.files if entry not in self._ahead]):
                    pass
                context.report.fetched(hop.files)
        finally:
            fetcher.close()
        self.commit = target
        self._ahead.clear()

    def wants_ahead(self) -> bool:
        return True

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        """Note files that were fetched before their commit was there."""
        self._ahead |= {entry for entry, _ in files}

    def close(self) -> None:
        """Do nothing."""

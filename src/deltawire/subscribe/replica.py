"""The replica that a subscriber keeps up to date: a copy of the model at some version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from .sync_context import SyncContext

if TYPE_CHECKING:
    from .mirror.mirror_replica import MirrorReplica


class Replica(Protocol):
    """A copy of the model. It always holds one complete version, or none yet, whatever fails."""

    @property
    def commit(self) -> Commit | None:
        """The commit of the version that the replica holds. It is never a fence. None before the first version."""
        ...

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """The weights, read-only. Empty before the first version."""
        ...

    @property
    def mirror(self) -> MirrorReplica | None:
        """The mirror that the replica is in, or gets its versions from. None if there is no mirror."""
        ...

    def move(self, target: Commit, context: SyncContext) -> None:
        """Bring the replica to the version of `target`.

        Parameters
        ----------
        target
            The commit to reach.
        context
            The chain, its routes, and the means to fetch what they need.
        """
        ...

    def wants_ahead(self) -> bool:
        """Return whether files of the next version should be fetched before its commit exists. Processes that share a directory answer
        yes in only one of them.
        """
        ...

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        """Prepare for the next version with files that have arrived before its commit. Its version stays as it is. Raises nothing.

        Parameters
        ----------
        files
            Files of a delta from the present version, and their bytes, which were compared with their hashes.
        """
        ...

    def close(self) -> None:
        """Release what the replica holds. It may be called twice."""
        ...

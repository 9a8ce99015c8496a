"""Files of the next version that are decoded against the present weights before the commit exists. The weights stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..chain.memory_state import MemoryState, Update
from ..errors import DeltawireError
from ..format.digest import Digest
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from .replica_weights import ReplicaWeights

_SHARE, _LEAST = 4, 16 << 20
"""Decoding ahead ends when the decoded changes take more memory than this share of the state, but 16 MiB are always allowed."""

Ahead = tuple[Update, dict[FileEntry, tuple[Digest, Digest]]]
"""An update, the files that it holds, and for each of them the digests before and after of what it covers."""


class ResolvedAhead:
    """One update that grows file by file. It can be used only as a whole, and only while the state is the one that it was made for.

    Parameters
    ----------
    weights
        The weights whose state it is.
    """

    def __init__(self, weights: ReplicaWeights) -> None:
        self._weights = weights
        self._of: tuple[MemoryState, Commit] | None = None
        self._update: Update | None = None
        self._files: dict[FileEntry, tuple[Digest, Digest]] = {}

    def add(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        """Decode more files against the present state. Raises nothing: files that cannot be decoded are left to the sync after the commit.

        Parameters
        ----------
        files
            The files and their bytes, which were compared with their hashes.
        """
        state = self._weights.state
        if state.version is None:
            return
        if not self._fits(state):
            self.drop()
            self._of = state, state.version
            try:
                self._update = self._weights.new_update()
            except DeltawireError:
                return
        most = max(state.version.state_bytes // _SHARE, _LEAST)
        for entry, data in files:
            if self._update is None or self._update.nbytes > most:
                return
            try:
                self._files[entry] = self._update.add(state.segment(entry), data)
            except DeltawireError:  # after an error the update must not be used
                self._update, self._files = None, {}
                return

    def take(self, files: Collection[FileEntry]) -> Ahead | None:
        """Return what was decoded. Afterwards nothing is held.

        Returns None unless all of them are among `files`, and were decoded against the present state. If other code can write to the
        weights, they are read once more for that.

        Parameters
        ----------
        files
            The files that a commit names.
        """
        update, held = self._update, self._files
        is_usable = update is not None and held and self._fits(self._weights.state) and held.keys() <= set(files)
        self.drop()
        if update is None or not is_usable or not self._weights.still_hold({entry: before for entry, (before, _) in held.items()}):
            return None
        return update, held

    def drop(self) -> None:
        """Forget what was decoded, for example because the state has changed."""
        self._of, self._update, self._files = None, None, {}

    def _fits(self, state: MemoryState) -> bool:
        return self._of is not None and self._of[0] is state and self._of[1] == state.version

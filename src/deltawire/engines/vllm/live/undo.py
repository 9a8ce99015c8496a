"""The last updates of a worker's weights, kept so that it can go back to earlier versions at once, without the store.

An update that was written holds the values that it replaced. Writing these is the update back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....format.digest import Digest
from ....format.records.record_parts import CommitRef, FileEntry
from ....format.records.version_records import Commit
from .update_types import LiveVersion, StagedUpdate

_MOST_UPDATES = 64


@dataclass(frozen=True, slots=True)
class HopBack:
    """A hop that was made, in the other direction.

    Parameters
    ----------
    base
        The version that the hop led to.
    target
        The version before it.
    target_ref
        The reference to that version's commit.
    files
        The files of the hop.
    """

    base: Commit
    target: Commit
    target_ref: CommitRef
    files: Sequence[FileEntry]


class LiveUndo:
    """Updates in the order in which they were written. The newest one led to the version that the weights have.

    Parameters
    ----------
    most_bytes
        The most memory that they may take. They stay where the weights are.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self.most_bytes = most_bytes
        self._kept: deque[StagedUpdate] = deque()
        """The old values of each update."""
        self._dropped: list[StagedUpdate] = []

    @property
    def versions(self) -> list[LiveVersion]:
        """The versions that the weights can go back to, the nearest first."""
        return [back.target for back in reversed(self._kept)]

    @property
    def nbytes(self) -> int:
        """The memory that the updates take."""
        return sum(back.nbytes for back in self._kept)

    def note(self, staged: StagedUpdate, before: LiveVersion) -> None:
        """Note that an update was written. An update back is forgotten; another one is kept if it fits.

        Parameters
        ----------
        staged
            The update.
        before
            The version that the weights had before it.
        """
        if staged.is_back:
            self._dropped.append(self._kept.pop())
            return
        if not self.most_bytes or (staged.update is not None and not staged.update.can_turn):
            self.clear()
            return
        back = HopBack(staged.hop.target, staged.hop.base, before.ref, staged.hop.files)
        unchecked = Digest(), Digest()  # what only some workers decode was compared on the way there
        self._kept.append(replace(staged, hop=back, before=staged.target.digest, target=before, unchecked=unchecked, is_back=True))
        while self._kept and (self.nbytes > self.most_bytes or len(self._kept) > _MOST_UPDATES):
            self._dropped.append(self._kept.popleft())

    def back_to(self, seq: int) -> StagedUpdate | None:
        """Return the update back to a commit. None if the version before the present one was not this commit, or is not kept.

        Parameters
        ----------
        seq
            The number of the commit.
        """
        return self._kept[-1] if self._kept and self._kept[-1].target.ref.seq == seq else None

    def clear(self) -> None:
        """Forget all updates, because the weights are not those that they led to. `free` frees their memory."""
        self._dropped.extend(self._kept)
        self._kept.clear()

    def free(self) -> None:
        """Free the memory of updates that are forgotten. This takes time."""
        self._dropped.clear()

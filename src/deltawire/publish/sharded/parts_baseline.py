"""The copy of its parts that each process keeps, to encode the next version against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ...format.records.record_parts import CommitRef
from ...tensors.bits import State
from ...tensors.state import state_digest
from ..baseline import Baseline
from ..snapshots import Arrays, SnapshotDevice
from ..upload.segments import Segment, TensorTable
from .division import Division, Parts
from .parts_source import copied_parts


class PartsBaseline(Baseline):
    """A process's own copy of its parts at the newest version. `digest` is that of the parts.

    Parameters
    ----------
    division
        Which elements this process publishes.
    parts
        The copy. The baseline owns this memory.
    segments
        The segments that are encoded and uploaded together.
    at
        The version that the parts are of.
    threads
        The number of threads that encode.
    """

    def __init__(self, division: Division, parts: Parts, segments: Sequence[Segment], at: CommitRef, *, threads: int | None) -> None:
        self.division = division
        self._given = tuple(segments)
        super().__init__(cast("Arrays", parts), at, state_digest(parts, threads=threads), threads=threads)

    @property
    def parts(self) -> Parts:
        """The parts of all tensors, by name."""
        return cast("Parts", self.arrays)

    def replace_parts(self, parts: Parts, at: CommitRef) -> None:
        """Start again from other parts of the same division. Deltas back are lost."""
        self.replace(cast("Arrays", parts), at, state_digest(parts, threads=self._threads))

    def parts_at(self, seq: int, index: int) -> Parts:
        """Return a copy of a segment of version `seq`, as `segment_at` does."""
        return cast("Parts", self.segment_at(seq, index))

    def rename(self, at: CommitRef) -> None:
        """Note that another version has the same weights. Deltas back are lost."""
        with self._lock:
            self._history.restart(at)

    def retire(self) -> None:
        """Free all memory. Threads that still read held versions get `HistoryDropped`."""
        with self._lock:
            self.intact = False
            self._history.forget()
            self.arrays = {}

    def _cut(self, arrays: Arrays) -> tuple[TensorTable, tuple[Segment, ...]]:
        return self.division.table, self._given

    def _copied_to(self, state: State, device: SnapshotDevice) -> Arrays:
        return cast("Arrays", copied_parts(self.parts, state, device))

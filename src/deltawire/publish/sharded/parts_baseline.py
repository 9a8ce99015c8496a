"""The copy of its parts that each process keeps, to encode the next version against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...delta.encode import encode_delta
from ...delta.resolve import apply_delta
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef
from ...tensors.bits import State, TensorPart, tensor_bits
from ...tensors.gpu_handover import GpuHandover
from ...tensors.state import state_digest
from ..history import History, Reverse, budget_for
from ..shortcuts.compose import Composition, compose
from ..snapshots import SnapshotDevice, copy_tensors, is_kept_like, new_array
from ..upload.segments import Segment
from .division import Division, Parts


def copied_parts(parts: Parts, like: Parts, device: SnapshotDevice) -> Parts:
    """Return a copy of parts in memory of their own, where copies of the parts `like`, which may be on a GPU, are kept."""
    copies: Parts = {}
    for name, part in parts.items():
        bits = tensor_bits(name, part.elements)
        memory = new_array(bits.dtype, (bits.size,), tensor_bits(name, like[name].elements).bits, device)
        copies[name] = TensorPart(memory, part.shape, part.start)
    copy_tensors(parts, copies)
    return copies


class PartsBaseline:
    """A process's own copy of its parts at the newest version, cut into segments, with deltas back to recent versions.

    `intact` is False while a move is in progress, as in `Baseline`.

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
    remember
        Keep deltas back to recent versions. Skips are made from them.
    """

    def __init__(
        self, division: Division, parts: Parts, segments: Sequence[Segment], at: CommitRef, *, threads: int | None, remember: bool
    ) -> None:
        self.division = division
        self.segments = tuple(segments)
        self.parts = parts
        self.digest = state_digest(parts, threads=threads)
        self.intact = True
        self._threads = threads
        self._remember = remember
        self._history = History(at, budget_for(sum(segment.raw for segment in segments)))

    def part(self, index: int) -> Parts:
        return {name: self.parts[name] for name in self.division.table.names_of(self.segments[index])}

    def part_of(self, state: State, index: int) -> State:
        return {name: state[name] for name in self.division.table.names_of(self.segments[index])}

    def move_by_copy(self, parts: Parts, deltas: Mapping[int, bytes], at: CommitRef, digest: Digest) -> None:
        """Copy a newer version. Only the segments that have a delta differ."""
        back: dict[int, bytes] | None = None
        if self._remember:
            back = {index: encode_delta(self.part_of(parts, index), self.part(index), threads=self._threads) for index in deltas}
        self.intact = False
        for index in deltas:
            copy_tensors(self.part_of(parts, index), self.parts)
        self.digest = digest
        if back is None:
            self._history.restart(at)
        else:
            self._history.advance(at, back, sum(map(len, deltas.values())))
        self.intact = True

    def move_by_deltas(self, deltas: Mapping[int, bytes], at: CommitRef, digest: Digest) -> None:
        """Move to a newer version by its deltas, if the new parts are not available. Deltas back are lost."""
        self.intact = False
        for index, delta in deltas.items():
            apply_delta(dict[str, Any](self.part(index)), delta, threads=self._threads)
            GpuHandover(self.part(index)).synchronize()
        self.digest = digest
        self._history.restart(at)
        self.intact = True

    def move_to_device(self, parts: Parts, device: SnapshotDevice) -> None:
        """Move the copy to where copies of such parts are kept. After a resume it is on the host."""
        if not is_kept_like(self.parts, parts, device):
            self.parts = copied_parts(self.parts, parts, device)

    def rename(self, at: CommitRef) -> None:
        """Note that another version has the same weights. Deltas back are lost."""
        self._history.restart(at)

    def compose(self, level: int) -> Composition | None:
        """Compose the deltas of several versions up to this one. Returns None if this level is not due, or its deltas were dropped."""
        steps = self._history.composable(level)
        return None if steps is None else compose(self, level, steps, threads=self._threads, break_off=False)

    def keep(self, reverse: Reverse) -> None:
        """Keep a composed delta instead of those that it was composed from."""
        self._history.add_composed(reverse)

    def forget(self) -> None:
        """Drop deltas that no later composition needs. Call it when all skips of this version are made."""
        self._history.prune()

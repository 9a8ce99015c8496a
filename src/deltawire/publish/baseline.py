"""The baseline: the publisher's copy of the newest published state, with deltas back to recent versions.

It moves only when a commit is known to have landed. One thread moves it; other threads may read segments of held versions meanwhile.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ..delta.encode import encode_many
from ..delta.resolve import apply_delta, apply_many
from ..format.digest import Digest
from ..format.records.record_parts import CommitRef
from ..tensors.bits import State
from ..tensors.columns import in_columns
from ..tensors.gpu_handover import GpuHandover, on_side_stream
from ..tensors.state import thread_count
from .history import History, Reverse, budget_for, versions_of
from .shortcuts.compose import Composition, compose
from .snapshots import Arrays, ScratchMemory, SnapshotDevice, copy_tensors, is_kept_like, new_arrays, scratch_size
from .upload.segments import SEGMENT_BYTES, Segment, TensorTable, cut_batches, cut_segments, part_of_state

_APPLIED_SHARE, _LEAST_APPLIED = 400, 8 << 20
"""The bytes of deltas that are applied at once: those of the state divided by the first number, or the second number if that is more.
A GPU needs about four times as many bytes for the decoded changes, so at most a hundredth of the state."""


@dataclass(frozen=True, slots=True)
class ComposingAt:
    """A version at which skips are due: its position in the history, its commit, and how its state is cut."""

    position: int
    at: CommitRef
    table: TensorTable
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Composed:
    """A delta over 4, 16, … versions. `forward` has the deltas of a skip. It is None if the skip would not save any bytes."""

    base: CommitRef
    target: CommitRef
    versions: int
    forward: Mapping[int, bytes] | None


class Baseline:
    """The state of version `at`, cut into segments.

    `intact` is False from the start of a move until it is complete. If a move is interrupted (by Ctrl-C), the baseline is a mix of two
    versions. It MUST NOT be encoded against then; rebuild it from the store.
    """

    digest: Digest
    table: TensorTable
    segments: tuple[Segment, ...]

    def __init__(
        self, arrays: Arrays, at: CommitRef, digest: Digest, *, threads: int | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._threads = threads
        self._threads_beside = max(1, thread_count(threads) // 2)
        """The number of threads that make shortcuts while the next version is encoded."""
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self.replace(arrays, at, digest)

    @property
    def at(self) -> CommitRef:
        """The version whose state this is."""
        return self._history.here

    @property
    def position(self) -> int:
        """The number of versions since the last replacement. It decides which skips are due."""
        return self._history.position

    @property
    def arrays(self) -> Arrays:
        """The tensors by name. They are never replaced one by one."""
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._state = in_columns(arrays)
        """The same tensors. Their columns are made only once."""

    def part(self, index: int) -> State:
        """Return the tensors of one segment. They are not copied."""
        return self.part_of(self._state, index)

    def part_of(self, state: State, index: int) -> State:
        """Return the same tensors of another state with the same table."""
        return part_of_state(state, self.table, self.segments[index])

    def move_by_copy(self, state: State, changed: Collection[int], at: CommitRef, digest: Digest, size: int, *, remember: bool) -> None:
        """Copy `state`, which differs in the segments `changed`. Readers fetch `size` bytes to get to it."""
        back = self._reverse(state, changed, remember)
        with self._moving(at, digest, back, size):
            for index in changed:
                copy_tensors(self.part_of(state, index), self.part(index), wait=False)
            GpuHandover(state, self._state).synchronize()

    def move_by_swap(self, arrays: Arrays, changed: Collection[int], at: CommitRef, digest: Digest, size: int, *, remember: bool) -> Arrays:
        """Replace the arrays by those of the next version, and return the old arrays, whose memory may be used again."""
        back = self._reverse(arrays, changed, remember)
        with self._moving(at, digest, back, size):
            old = self.arrays
            self.arrays = arrays
        return old

    def needs_reverse(self, *, remember: bool) -> bool:
        """Tell whether a move to the next version needs deltas back: for skips (`remember`), or because an older version is held."""
        with self._lock:
            return remember or self._history.held

    def move_by_deltas(
        self, deltas: Mapping[int, bytes], at: CommitRef, digest: Digest, back: Mapping[int, bytes] | None = None, size: int = 0
    ) -> None:
        """Move to the next version by its deltas, if the new state is not available. Without `back`, deltas back are lost.

        A GPU applies the deltas of as many segments at once as its memory allows. Readers fetch `size` bytes to get to it.
        """
        numbers = list(deltas)
        most = max(self.table.state_bytes // _APPLIED_SHARE, _LEAST_APPLIED)
        with self._moving(at, digest, back, size):
            for batch in cut_batches([len(deltas[index]) for index in numbers], most):
                chosen = [numbers[each] for each in batch]
                apply_many([(self.part(index), deltas[index]) for index in chosen], threads=self._threads)
            GpuHandover(self._state).synchronize()

    def replace(self, arrays: Arrays, at: CommitRef, digest: Digest) -> None:
        """Start again from another state, perhaps with another table. Deltas back are lost."""
        with self._lock:
            self.intact = False
            self.arrays = arrays
            self.digest = digest
            self.table, self.segments = self._cut(arrays)
            self._history = History(at, budget_for(sum(segment.raw for segment in self.segments)))
            self.intact = True

    def move_to_device(self, state: State, device: SnapshotDevice) -> None:
        """Move the arrays to the device where copies of such a state are kept. After a resume they are on the host."""
        if not is_kept_like(self._state, state, device):
            arrays = self._copied_to(state, device)
            with self._lock:
                self.arrays = arrays

    def hold(self) -> None:
        """Keep the present version available for `segment_at`, until `release`."""
        with self._lock:
            self._history.hold()

    def release(self, seq: int) -> None:
        """Stop holding version `seq`."""
        with self._lock:
            self._history.release(seq)

    def segment_at(self, seq: int, index: int, scratch: ScratchMemory | None = None) -> Arrays:
        """Return a copy of a segment of version `seq`, which is held. Raises `HistoryDropped` if the baseline was replaced since.

        On a GPU the copy is made on a side stream, and is complete. On the host it is in the memory of `scratch`, if that is given.
        """
        scratch = scratch or ScratchMemory()
        with self._lock:
            self._history.deltas_back(seq)
            size = scratch_size(self.part(index))
        scratch.reserve(size)  # the next version must not wait for this
        with self._lock:
            back = self._history.deltas_back(seq)
            now = self.part(index)
            with on_side_stream(now) as wait:
                part = scratch.copy(now)
                wait()  # before another thread or stream may change what is copied
        with on_side_stream(part) as wait:
            for reverse in back:
                if index in reverse.deltas:
                    apply_delta(part, reverse.deltas[index], threads=self._threads_beside)
            wait()
        return part

    def begin_composing(self) -> ComposingAt | None:
        """Keep what the skips that are due at this version need, until `compose` has made them. None if no skip is due.

        Call it after every move: it also shortens the history.
        """
        with self._lock:
            position = self._history.begin_composing()
            self._history.prune()
            return None if position is None else ComposingAt(position, self._history.here, self.table, self.segments)

    def compose(self, due: ComposingAt) -> Iterator[Composed]:
        """Yield the skips that are due at a version, the shortest first. Exhaust it. Another thread may move the baseline meanwhile.

        Raises `HistoryDropped` if what they need was dropped.
        """
        try:
            for level in itertools.count(1):
                made = self.compose_level(due, level, break_off=True)
                if made is None:
                    return
                worth_it = made.forward_bytes < made.replaced_bytes
                self.keep_composed(due, made.reverse(has_skip=worth_it))
                yield Composed(made.base, made.target, versions_of(level), made.forward if worth_it else None)
        finally:
            self.end_composing(due)

    def compose_level(self, due: ComposingAt, level: int, *, break_off: bool) -> Composition | None:
        """Make the composition of one level. Returns None if that level is not due, or its deltas were dropped. Raises as `compose`."""
        with self._lock:
            parts = self._history.composable(level, due.position)
        if parts is None or parts[0].target != due.at:
            return None
        return compose(_HeldVersion(self, due, ScratchMemory()), level, parts, threads=self._threads_beside, break_off=break_off)

    def keep_composed(self, due: ComposingAt, reverse: Reverse) -> None:
        """Keep a composed delta instead of those that it was composed from."""
        with self._lock:
            if self._history.is_at(due.position, due.at.seq):
                self._history.add_composed(reverse)

    def end_composing(self, due: ComposingAt) -> None:
        """Note that the skips that were due at a version are made, or failed."""
        with self._lock:
            self._history.end_composing(due.position, due.at.seq)

    def _cut(self, arrays: Arrays) -> tuple[TensorTable, tuple[Segment, ...]]:
        """Return the names, types and shapes of the tensors, and the segments that they are cut into."""
        table = TensorTable.of(arrays)
        return table, cut_segments(table.sizes, segment_bytes=self._segment_bytes)

    def _copied_to(self, state: State, device: SnapshotDevice) -> Arrays:
        """Return a copy of the arrays on the device where copies of such a state are kept."""
        arrays = new_arrays(self.table, state, device)
        copy_tensors(self.arrays, arrays)
        return arrays

    def _reverse(self, state: State, changed: Collection[int], remember: bool) -> dict[int, bytes] | None:
        if not self.needs_reverse(remember=remember):
            return None
        made = encode_many([(self.part_of(state, index), self.part(index)) for index in changed], threads=self._threads)
        return {index: delta for index, (delta, _) in zip(changed, made, strict=True)}

    @contextmanager
    def _moving(self, at: CommitRef, digest: Digest, back: Mapping[int, bytes] | None, size: int) -> Iterator[None]:
        with self._lock:
            self.intact = False
            yield
            self.digest = digest
            if back is None:
                self._history.restart(at)
            else:
                self._history.advance(at, back, size)
            self.intact = True


@dataclass(frozen=True, slots=True)
class _HeldVersion:
    """A version that is held, whether or not the baseline has moved on since. A segment of it is a copy, valid until the next one."""

    _baseline: Baseline
    _due: ComposingAt
    _scratch: ScratchMemory

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._due.segments

    def part(self, index: int) -> State:
        return self._baseline.segment_at(self._due.at.seq, index, self._scratch)

    def part_of(self, state: State, index: int) -> State:
        return part_of_state(state, self._due.table, self._due.segments[index])

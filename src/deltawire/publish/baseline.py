"""The publisher's own copy of the state that the chain has at its head, and the way back from it to recent versions.

It moves only when a commit is known to have landed. One thread moves it; others may ask for segments of held versions meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ..delta.encode import encode_delta
from ..delta.resolve import apply_delta
from ..format.digest import Digest
from ..format.records.chain_records import CommitRef
from ..tensors.bits import State
from ..tensors.gpu_handover import GpuHandover, on_side_stream
from .history import History, budget_for, span_of
from .shortcuts.compose import compose
from .snapshots import Arrays, SnapshotDevice, copy_of, copy_tensors, is_kept_like, new_arrays
from .upload.segments import SEGMENT_BYTES, Segment, TensorTable, cut_segments


@dataclass(frozen=True, slots=True)
class Composed:
    """Four versions, or sixteen, … in one step. `forward` are the deltas of a skip; None where it is not smaller than what it replaces."""

    base: CommitRef
    target: CommitRef
    span: int
    forward: Mapping[int, bytes] | None


class Baseline:
    """The state at version `at`, cut into segments.

    `intact` is False from the moment that a move begins until it is complete: a baseline whose move was cut off (by Ctrl-C) is a mix of two
    versions and MUST NOT be encoded against; rebuild it from the store.
    """

    arrays: Arrays
    digest: Digest
    table: TensorTable
    segments: tuple[Segment, ...]

    def __init__(
        self, arrays: Arrays, at: CommitRef, digest: Digest, *, threads: int | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._threads = threads
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self.replace(arrays, at, digest)

    @property
    def at(self) -> CommitRef:
        """The version that it is at."""
        return self._history.here

    @property
    def history_bytes(self) -> int:
        with self._lock:
            return self._history.size

    @property
    def position(self) -> int:
        """Versions since the last replacement: what spans of skips are counted by."""
        return self._history.position

    def part(self, index: int) -> Arrays:
        """The tensors of one segment, not copied."""
        return {name: self.arrays[name] for name in self.table.names_of(self.segments[index])}

    def part_of(self, state: State, index: int) -> State:
        """The same tensors of another state with the same table."""
        return {name: state[name] for name in self.table.names_of(self.segments[index])}

    def move_by_copy(self, state: State, changed: Collection[int], at: CommitRef, digest: Digest, size: int, *, remember: bool) -> None:
        """Move on to `state`, which differs in the segments `changed` and took readers `size` bytes; it is copied."""
        back = self._reverse(state, changed, remember)
        with self._moving(at, digest, back, size):
            for index in changed:
                copy_tensors(self.part_of(state, index), self.arrays)

    def move_by_swap(self, arrays: Arrays, changed: Collection[int], at: CommitRef, digest: Digest, size: int, *, remember: bool) -> Arrays:
        """Move on to `arrays`, which are the baseline's from now on; the memory that it had is returned, for another use."""
        back = self._reverse(arrays, changed, remember)
        with self._moving(at, digest, back, size):
            old = self.arrays
            self.arrays = arrays
        return old

    def move_by_deltas(self, deltas: Mapping[int, bytes], at: CommitRef, digest: Digest) -> None:
        """Move on by what readers got, where the new state itself is not at hand any more. The way back is lost."""
        with self._moving(at, digest, None, 0):
            for index, delta in deltas.items():
                apply_delta(self.part(index), delta, threads=self._threads)
                GpuHandover(self.part(index)).synchronize()

    def replace(self, arrays: Arrays, at: CommitRef, digest: Digest) -> None:
        """Start again from another state, of another table perhaps. The way back is lost."""
        with self._lock:
            self.intact = False
            self.arrays = arrays
            self.digest = digest
            self.table = TensorTable.of(arrays)
            self.segments = cut_segments(self.table.sizes, segment_bytes=self._segment_bytes)
            self._history = History(at, budget_for(self.table.state_bytes))
            self.intact = True

    def settle_beside(self, state: State, place: SnapshotDevice) -> None:
        """Bring the arrays to where they are kept for such a state: after a resume they are on the host."""
        if not is_kept_like(self.arrays, state, place):
            arrays = new_arrays(self.table, state, place)
            copy_tensors(self.arrays, arrays)
            with self._lock:
                self.arrays = arrays

    def hold(self) -> None:
        """Keep the present version within the reach of `segment_at`, until `release`."""
        with self._lock:
            self._history.hold()

    def release(self, seq: int) -> None:
        """The version `seq` was held, and is not needed any more."""
        with self._lock:
            self._history.release(seq)

    def segment_at(self, seq: int, index: int) -> Arrays:
        """A copy of a segment as it was at version `seq`, which is held. Raises `Forgotten` if the baseline has started again since.

        On a GPU it is made beside all other streams, and complete.
        """
        with self._lock:
            way = self._history.way_back(seq)
            now = self.part(index)
            with on_side_stream(now) as wait:
                part = {name: copy_of(array) for name, array in now.items()}
                wait()  # before anybody else, and any other stream, gets to change what is copied
        with on_side_stream(part) as wait:
            for reverse in way:
                if index in reverse.deltas:
                    apply_delta(part, reverse.deltas[index], threads=self._threads)
            wait()
        return part

    def compose(self) -> Iterator[Composed]:
        """The skips that are due at this version, shortest first. To be exhausted after every move: it is what keeps the history short."""
        level = 1
        try:
            while parts := self._history.composable(level):
                made = compose(self, level, parts, threads=self._threads, break_off=True)
                worth_it = made.forward_bytes < made.replaced_bytes
                with self._lock:
                    self._history.add_composed(made.reverse(has_skip=worth_it))
                yield Composed(made.base, made.target, span_of(level), made.forward if worth_it else None)
                level += 1
        finally:
            with self._lock:
                self._history.prune()

    def _reverse(self, state: State, changed: Collection[int], remember: bool) -> dict[int, bytes] | None:
        if not remember and not self._history.held:
            return None
        return {index: encode_delta(self.part_of(state, index), self.part(index), threads=self._threads) for index in changed}

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

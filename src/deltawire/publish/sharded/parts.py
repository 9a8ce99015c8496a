"""The parts of a model that one process publishes: found from what all of them hold, collected, and kept as the base of the next delta."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...delta.encode import encode_delta
from ...delta.resolve import apply_delta
from ...dtypes import dtype_named
from ...errors import PublishError
from ...format.digest import PART_ALIGNMENT, Digest, TensorKeys
from ...format.records.chain_records import CommitRef
from ...tensors.bits import State, TensorPart, tensor_bits
from ...tensors.state import state_digest
from ..history import History, Reverse, budget_for
from ..shortcuts.compose import Composition, compose
from ..upload.segments import Segment, TensorTable, cut_segments
from .ranks import Ranks, together
from .shares import Share, Span, divide

Parts = dict[str, TensorPart]
"""What a process publishes, by name; all names, also of tensors that it has nothing of."""

MOST_FILES = 160
"""Deltas of one version, by all processes together: a record has to name them all."""


@dataclass(frozen=True)
class Division:
    """Which process publishes what of a model. The same in all of them."""

    table: TensorTable
    """Of whole tensors."""
    shares: tuple[Share, ...]
    ranks: int

    @cached_property
    def tags(self) -> Digest:
        """What the digest of a state has beyond those of its parts (docs/format.md §6)."""
        return TensorKeys.of(zip(self.table.names, self.table.dtypes, self.table.shapes, strict=True)).tag()

    def segments(self, rank: int, segment_bytes: int) -> tuple[Segment, ...]:
        """Runs of tensors, the same for all ranks, with the bytes that this one has in each."""
        runs = cut_segments(self.table.sizes, segment_bytes=segment_bytes * self.ranks, most=max(MOST_FILES // self.ranks - 1, 1))
        return tuple(
            Segment(run.first, run.count, sum(self.nbytes(index, rank) for index in range(run.first, run.first + run.count)))
            for run in runs
        )

    def nbytes(self, index: int, rank: int) -> int:
        """Bytes of a tensor, by its place in the table, that a rank publishes."""
        start, stop = self.shares[index].spans[rank]
        return (stop - start) * self.table.dtypes[index].itemsize

    def new_parts(self, rank: int) -> Parts:
        """Memory for the parts of a rank; what is in it is undefined."""
        rows = zip(self.table.names, self.table.dtypes, self.table.shapes, self.shares, strict=True)
        return {
            name: TensorPart(np.empty(share.spans[rank][1] - share.spans[rank][0], dtype.numpy), shape, share.spans[rank][0])
            for name, dtype, shape, share in rows
        }


class Splitter:
    """Finds out what all processes hold, and gives each its parts. Layouts are compared at every call, and exchanged when one is new."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: bytes | None = None
        self._division: Division | None = None

    def split(self, held: Mapping[str, TensorPart]) -> tuple[Division, Parts]:
        """The division, and the parts to publish: memory of the caller's, but for those with edges that others hold.

        Of `held`, `start` may be anything. Raises a `TensorError` for what cannot be published, `PublishError` where what the processes
        hold is not one model.
        """
        division = self._agree(held)
        incoming = _hand_over(self._ranks, division, held)
        parts: Parts = {}
        for index, name in enumerate(division.table.names):
            start, stop = division.shares[index].spans[self._ranks.rank]
            own = held[name]
            elements = own.elements[max(start - own.start, 0) : max(stop - own.start, 0)]
            tails = [tail.view(own.elements.dtype) for tail in incoming.get(index, ())]
            parts[name] = TensorPart(np.concatenate([elements, *tails]) if tails else elements, own.shape, start)
        return division, parts

    def _agree(self, held: Mapping[str, TensorPart]) -> Division:
        layout = b""

        def describe() -> bool:
            nonlocal layout
            layout = _layout(held)
            return layout == self._known

        if all(together(self._ranks, describe)) and self._division is not None:
            return self._division
        self._known = None
        layouts = self._ranks.exchange(layout)
        self._division = _division_of(layouts)  # all see the same, so all come to the same, or fail in the same way
        self._known = layout
        return self._division


def _division_of(layouts: Sequence[bytes]) -> Division:
    tables = [json.loads(layout) for layout in layouts]
    facts = {name: (dtype, tuple(shape)) for name, dtype, shape, _, _ in tables[0]}
    for rank, table in enumerate(tables):
        other = {name: (dtype, tuple(shape)) for name, dtype, shape, _, _ in table}
        if other != facts:
            name = min(name for name in {*facts, *other} if facts.get(name) != other.get(name))
            raise PublishError(f"ranks 0 and {rank} do not hold shards of one model: tensor {name!r} is not the same in both.")
    names = tuple(row[0] for row in tables[0])
    dtypes = tuple(dtype_named(row[1]) for row in tables[0])
    shapes = tuple(tuple(row[2]) for row in tables[0])
    shares = []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        spans: list[Span] = [(table[index][3], table[index][4]) for table in tables]
        try:
            shares.append(divide(spans, math.prod(shape), PART_ALIGNMENT // dtype.itemsize))
        except PublishError as error:
            raise PublishError(f"tensor {name!r}: {error}") from None
    return Division(TensorTable(names, dtypes, shapes), tuple(shares), len(layouts))


def _layout(held: Mapping[str, TensorPart]) -> bytes:
    if not held:
        raise PublishError("the state has no tensors. Pass the weights of the model.")
    rows = []
    for name, part in sorted(held.items()):
        bits = tensor_bits(name, part.elements)
        if part.stop > math.prod(part.shape):
            raise PublishError(f"tensor {name!r} has {math.prod(part.shape)} elements, but a shard up to element {part.stop}.")
        rows.append([bits.name, bits.dtype.name, list(part.shape), part.start, part.stop])
    return json.dumps(rows).encode()


def _hand_over(ranks: Ranks, division: Division, held: Mapping[str, TensorPart]) -> dict[int, list[NDArray[np.uint8]]]:
    """Exchange the edges. What came here, by tensor, in order."""
    moves = [(index, move) for index, share in enumerate(division.shares) for move in share.moves]
    if not moves:
        return {}
    outgoing: list[list[bytes]] = [[] for _ in range(ranks.size)]
    for index, move in moves:
        if move.source == ranks.rank:
            own = held[division.table.names[index]]
            elements = own.elements[move.span[0] - own.start : move.span[1] - own.start]
            outgoing[move.target].append(elements.view(np.uint8).tobytes())
    arrived = [Reader(piece) for piece in ranks.deliver([b"".join(pieces) for pieces in outgoing])]
    incoming: dict[int, list[NDArray[np.uint8]]] = {}
    for index, move in moves:
        if move.target == ranks.rank:
            size = (move.span[1] - move.span[0]) * division.table.dtypes[index].itemsize
            incoming.setdefault(index, []).append(arrived[move.source].take(size))
    return incoming


class Reader:
    """Takes bytes off what was delivered, from the front."""

    def __init__(self, data: memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        self._at += size
        return self._data[self._at - size : self._at]


class PartsBaseline:
    """A process's own copy of its parts at version `at`, the head of the chain, cut into segments; and the way back to recent versions.

    `intact` is False from the moment that a move begins until it is complete, as with `Baseline`. Without `remember` there is no way back.
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
        """Move on to `parts`, which readers get by these deltas: the other segments are the same."""
        back: dict[int, bytes] | None = None
        if self._remember:
            back = {index: encode_delta(self.part_of(parts, index), self.part(index), threads=self._threads) for index in deltas}
        self.intact = False
        for index in deltas:
            for name, part in self.part(index).items():
                np.copyto(_bytes(part.elements), _bytes(parts[name].elements))
        self.digest = digest
        if back is None:
            self._history.restart(at)
        else:
            self._history.advance(at, back, sum(map(len, deltas.values())))
        self.intact = True

    def move_by_deltas(self, deltas: Mapping[int, bytes], at: CommitRef, digest: Digest) -> None:
        """Move on by what readers got, where the new parts themselves are not at hand any more. The way back is lost."""
        self.intact = False
        for index, delta in deltas.items():
            apply_delta(dict[str, Any](self.part(index)), delta, threads=self._threads)
        self.digest = digest
        self._history.restart(at)
        self.intact = True

    def rename(self, at: CommitRef) -> None:
        """The same parts are another version now. The way back is lost."""
        self._history.restart(at)

    def compose(self, level: int) -> Composition | None:
        """Versions up to this one in one step; None if none of that level is due here, or what it takes is forgotten."""
        ways = self._history.composable(level)
        return None if ways is None else compose(self, level, ways, threads=self._threads, break_off=False)

    def keep(self, reverse: Reverse) -> None:
        """Keep what was composed in place of what it was composed from."""
        self._history.add_composed(reverse)

    def forget(self) -> None:
        """Drop what no later composition needs. To be called when all of this version are made."""
        self._history.prune()


def whole_tensors(division: Division, indices: Sequence[int], arrived: Sequence[memoryview]) -> dict[str, NDArray[Any]]:
    """Tensors put together from the parts of all ranks: the inverse of `pieces_of`, at the place that all sent them to."""
    readers = [Reader(piece) for piece in arrived]
    tensors: dict[str, NDArray[Any]] = {}
    for index in indices:
        dtype = division.table.dtypes[index]
        flat = np.empty(division.table.sizes[index], np.uint8)
        for rank, (start, stop) in enumerate(division.shares[index].spans):
            flat[start * dtype.itemsize : stop * dtype.itemsize] = readers[rank].take((stop - start) * dtype.itemsize)
        tensors[division.table.names[index]] = flat.view(dtype.numpy).reshape(division.table.shapes[index])
    return tensors


def pieces_of(division: Division, indices: Sequence[int], parts: Parts) -> Iterator[NDArray[np.uint8]]:
    """The bytes of one's own parts of some tensors, in order."""
    return (_bytes(parts[division.table.names[index]].elements) for index in indices)


def _bytes(elements: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(elements).view(np.uint8)

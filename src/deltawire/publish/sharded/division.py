"""Which parts of a model each process publishes, and how elements get to the process that publishes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import dtype_named
from ...errors import PublishError
from ...format.digest import PART_ALIGNMENT, Digest, TensorKeys
from ...tensors.bits import TensorPart, tensor_bits
from ..upload.segments import Segment, TensorTable, cut_segments
from .ranges import ElementRange, TensorDivision, divide_tensor
from .ranks import Ranks, together

Parts = dict[str, TensorPart]
"""The parts of all tensors that one process publishes, by name. Parts may be empty, but every name is there."""

MOST_FILES = 160
"""Most delta files in one version, by all processes together. A record has to name them all."""


@dataclass(frozen=True)
class Division:
    """Which elements of a model each process publishes. All processes have the same division."""

    table: TensorTable
    """Names, types and shapes of the whole tensors."""
    tensors: tuple[TensorDivision, ...]
    ranks: int

    @cached_property
    def tags(self) -> Digest:
        """The part of a state's digest that does not come from its parts (docs/format.md §6)."""
        return TensorKeys.of(zip(self.table.names, self.table.dtypes, self.table.shapes, strict=True)).tag()

    def segments(self, rank: int, segment_bytes: int) -> tuple[Segment, ...]:
        """Return the segments, which have the same tensors at all ranks, with the bytes that this rank has in each."""
        runs = cut_segments(self.table.sizes, segment_bytes=segment_bytes * self.ranks, most=max(MOST_FILES // self.ranks - 1, 1))
        return tuple(
            Segment(run.first, run.count, sum(self.nbytes(index, rank) for index in range(run.first, run.first + run.count)))
            for run in runs
        )

    def nbytes(self, index: int, rank: int) -> int:
        """Return how many bytes of a tensor, given by its index in the table, a rank publishes."""
        start, stop = self.tensors[index].ranges[rank]
        return (stop - start) * self.table.dtypes[index].itemsize

    def new_parts(self, rank: int) -> Parts:
        """Return memory for the parts of a rank. Its contents are undefined."""
        ranges = [tensor.ranges[rank] for tensor in self.tensors]
        rows = zip(self.table.names, self.table.dtypes, self.table.shapes, ranges, strict=True)
        return {name: TensorPart(np.empty(stop - start, dtype.numpy), shape, start) for name, dtype, shape, (start, stop) in rows}


class Splitter:
    """Finds out what all processes hold, and gives each process its parts.

    Every call compares the layout with that of the last call. The processes exchange their layouts only if one has changed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: bytes | None = None
        self._division: Division | None = None

    def split(self, held: Mapping[str, TensorPart]) -> tuple[Division, Parts]:
        """Return the division and the parts that this process publishes. All processes call it.

        The parts are the caller's memory, except for those that need elements of other processes. Raises a `TensorError` if a tensor
        cannot be published, and `PublishError` if the processes do not hold one model together.
        """
        division = self._agree(held)
        incoming = _hand_over(self._ranks, division, held)
        parts: Parts = {}
        for index, name in enumerate(division.table.names):
            start, stop = division.tensors[index].ranges[self._ranks.rank]
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
        self._division = _division_of(layouts)  # all have the same layouts, so all get the same division, or the same error
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
    tensors = []
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        held: list[ElementRange] = [(table[index][3], table[index][4]) for table in tables]
        try:
            tensors.append(divide_tensor(held, math.prod(shape), PART_ALIGNMENT // dtype.itemsize))
        except PublishError as error:
            raise PublishError(f"tensor {name!r}: {error}") from None
    return Division(TensorTable(names, dtypes, shapes), tuple(tensors), len(layouts))


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
    """Exchange the elements at the edges. Returns those that this process received, by tensor, in order."""
    moves = [(index, move) for index, tensor in enumerate(division.tensors) for move in tensor.moves]
    if not moves:
        return {}
    outgoing: list[list[bytes]] = [[] for _ in range(ranks.size)]
    for index, move in moves:
        if move.source == ranks.rank:
            own = held[division.table.names[index]]
            elements = own.elements[move.range[0] - own.start : move.range[1] - own.start]
            outgoing[move.target].append(elements.view(np.uint8).tobytes())
    arrived = [Reader(piece) for piece in ranks.deliver([b"".join(pieces) for pieces in outgoing])]
    incoming: dict[int, list[NDArray[np.uint8]]] = {}
    for index, move in moves:
        if move.target == ranks.rank:
            size = (move.range[1] - move.range[0]) * division.table.dtypes[index].itemsize
            incoming.setdefault(index, []).append(arrived[move.source].take(size))
    return incoming


class Reader:
    """Reads bytes that were delivered, from the front."""

    def __init__(self, data: memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        self._at += size
        return self._data[self._at - size : self._at]


def whole_tensors(division: Division, indices: Sequence[int], arrived: Sequence[memoryview]) -> dict[str, NDArray[Any]]:
    """Assemble tensors from the parts of all ranks, which sent them by `pieces_of`."""
    readers = [Reader(piece) for piece in arrived]
    tensors: dict[str, NDArray[Any]] = {}
    for index in indices:
        dtype = division.table.dtypes[index]
        flat = np.empty(division.table.sizes[index], np.uint8)
        for rank, (start, stop) in enumerate(division.tensors[index].ranges):
            flat[start * dtype.itemsize : stop * dtype.itemsize] = readers[rank].take((stop - start) * dtype.itemsize)
        tensors[division.table.names[index]] = flat.view(dtype.numpy).reshape(division.table.shapes[index])
    return tensors


def pieces_of(division: Division, indices: Sequence[int], parts: Parts) -> Iterator[NDArray[np.uint8]]:
    """Return the bytes of this process's parts of some tensors, in order."""
    return (bytes_of(parts[division.table.names[index]].elements) for index in indices)


def bytes_of(elements: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array."""
    return np.ascontiguousarray(elements).view(np.uint8)

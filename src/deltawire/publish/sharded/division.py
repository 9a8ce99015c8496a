"""Decides which parts of a model each process publishes, and how elements get to the process that publishes them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from ...dtypes import dtype_named
from ...errors import PublishError
from ...format.content_hash import content_hash
from ...format.digest import PART_ALIGNMENT, Digest, TensorKeys
from ...format.records.file_list import MOST_IN_RECORD, MOST_LISTED
from ...tensors.bits import TensorPart, tensor_bits
from ...tensors.gpu_handover import on_side_stream
from ..upload.segments import Segment, TensorTable, cut_segments
from .ranges import EMPTY, ElementRange, Move, TensorDivision, divide_tensor
from .ranks import Ranks, together

Parts = dict[str, TensorPart]
"""The parts of all tensors that one process publishes, by name. Parts may be empty, but every name is there."""

Edge = tuple[str, ElementRange]
"""Elements of a tensor that one process holds and another one publishes."""

Tails = dict[str, list[NDArray[np.uint8]]]
"""Elements that other processes sent, as bytes, by tensor. They follow those that this process holds."""

MOST_RANKS = MOST_LISTED // 2
"""Most processes that publish together. Each may write two files for a version, and a file list has to name them all."""


@dataclass(frozen=True)
class Division:
    """Says which elements of a model each process publishes. All processes have the same division."""

    table: TensorTable
    """Names, types and shapes of the whole tensors."""
    tensors: tuple[TensorDivision, ...]
    """How each tensor is divided. Tensors that are divided in the same way share one object, because there may be thousands of ranks."""
    held: tuple[tuple[ElementRange, ...], ...]
    """The elements of each tensor that each rank holds. Tensors that are held in the same way share one object."""
    ranks: int

    @cached_property
    def tags(self) -> Digest:
        """The part of a state's digest that does not come from its parts (docs/format.md §6)."""
        return TensorKeys.of(zip(self.table.names, self.table.dtypes, self.table.shapes, strict=True)).tag()

    def segments(self, rank: int, segment_bytes: int) -> tuple[Segment, ...]:
        """Return the segments, which have the same tensors at all ranks, with the bytes that this rank has in each."""
        runs = cut_segments(self.table.sizes, segment_bytes=segment_bytes * self.ranks, most=max(MOST_IN_RECORD // self.ranks - 1, 1))
        return tuple(
            Segment(run.first, run.count, sum(self.nbytes(index, rank) for index in range(run.first, run.first + run.count)))
            for run in runs
        )

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.table.names)}

    def index_of(self, name: str) -> int:
        """Return the index of a tensor in the table."""
        return self._indices[name]

    def range_of(self, name: str, rank: int) -> ElementRange:
        """Return which elements of a tensor a rank publishes."""
        return self.tensors[self._indices[name]].ranges[rank]

    def ranges_array(self, index: int) -> NDArray[np.int64]:
        """Return which elements of a tensor each rank publishes: [rank, (start, stop)]."""
        return np.array(self.tensors[index].ranges, np.int64).reshape(-1, 2)

    def has_moves(self, without: Collection[str] = ()) -> bool:
        """Return whether elements of a tensor must be sent to another rank, except for those tensors."""
        return any(tensor.moves and name not in without for name, tensor in zip(self.table.names, self.tensors, strict=True))

    def moves_of(self, rank: int) -> tuple[tuple[int, Move], ...]:
        """Return the moves from or to a rank, each with the index of its tensor."""
        by_division = {
            id(tensor): [move for move in tensor.moves if rank in (move.source, move.target)]
            for tensor in {id(tensor): tensor for tensor in self.tensors}.values()
        }
        return tuple((index, move) for index, tensor in enumerate(self.tensors) for move in by_division[id(tensor)])

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
        self._known: HeldLayout | None = None
        self._division: Division | None = None
        self._moves: tuple[tuple[int, Move], ...] = ()

    def split(self, held: Mapping[str, TensorPart]) -> tuple[Division, Parts]:
        """Return the division and the parts that this process publishes. All processes call it.

        The parts are the caller's memory, except for those that need elements of other processes. Raises a `TensorError` if a tensor
        cannot be published, and `PublishError` if the processes do not hold one model together.
        """
        division = self.agree(lambda: HeldLayout.of(held))
        return division, self.hand_over(division, held)

    def hand_over(self, division: Division, held: Mapping[str, TensorPart]) -> Parts:
        """Return the parts that this process publishes of what it holds. Elements at the edges are exchanged.

        The division must be the one that `agree` returned last.
        """

        def cut(edges: Sequence[Edge]) -> list[Any]:
            return [elements_of(held[name], where) for name, where in edges]

        tails = self.exchange_edges(division, cut)
        return {name: self.joined(division, name, held[name], tails) for name in division.table.names}

    def exchange_edges(
        self, division: Division, elements_at: Callable[[Sequence[Edge]], list[Any]], without: Collection[str] = ()
    ) -> Tails:
        """Send elements at the edges to the processes that publish them, and return those that this process publishes.

        The division must be the one that `agree` returned last. All processes call it. Raises the errors of `elements_at` in all.

        Parameters
        ----------
        division
            Which elements each process publishes.
        elements_at
            Returns elements that this process holds, as they are published.
        without
            Tensors whose edges are not exchanged, because the processes hold what they publish.
        """
        if not division.has_moves(without):
            return {}
        names = division.table.names
        moves = [(names[index], move) for index, move in self._moves if names[index] not in without]
        own = [(name, move.target, move.range) for name, move in moves if move.source == self._ranks.rank]
        outgoing: list[list[bytes]] = [[] for _ in range(self._ranks.size)]

        def cut() -> None:
            for (_, target, _), elements in zip(own, elements_at([(name, where) for name, _, where in own]), strict=True):
                outgoing[target].append(bytes_of(elements).tobytes())

        together(self._ranks, cut)
        arrived = [Reader(piece) for piece in self._ranks.deliver([b"".join(pieces) for pieces in outgoing])]
        tails: Tails = {}
        for name, move in moves:
            if move.target == self._ranks.rank:
                size = (move.range[1] - move.range[0]) * division.table.dtypes[division.index_of(name)].itemsize
                tails.setdefault(name, []).append(arrived[move.source].take(size))
        return tails

    def joined(self, division: Division, name: str, own: TensorPart, tails: Tails) -> TensorPart:
        """Return the part of a tensor that this process publishes, of what it holds and of what other processes sent."""
        start, stop = division.range_of(name, self._ranks.rank)
        elements = own.elements[max(start - own.start, 0) : max(stop - own.start, 0)]
        more = tails.get(name, ())
        return TensorPart(_joined(elements, more) if more else elements, own.shape, start)

    def agree(self, describe_own: Callable[[], HeldLayout]) -> Division:
        """Return the division of tensors of which this process holds what `describe_own` says. The same object, unless one has changed.

        Raises as `split` does, also the errors of `describe_own` in any process.
        """
        layout: HeldLayout | None = None

        def describe() -> bool:
            nonlocal layout
            layout = describe_own()
            return layout == self._known

        if all(together(self._ranks, describe)) and self._division is not None:
            return self._division
        assert layout is not None
        self._known = None
        self._division = _agree_on_division(self._ranks, layout)
        self._moves = self._division.moves_of(self._ranks.rank)
        self._known = layout
        return self._division


@dataclass(frozen=True)
class HeldLayout:
    """The tensors of a model, by name, and the elements of each that one process holds."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    held: tuple[ElementRange, ...]

    @classmethod
    def of(cls, held: Mapping[str, TensorPart]) -> HeldLayout:
        """Return the layout of the parts that this process holds.

        Raises a `TensorError` if a tensor cannot be published, and `PublishError` if a part does not fit its tensor.
        """
        if not held:
            raise PublishError("the state has no tensors. Pass the weights of the model.")
        names, dtypes, shapes, ranges = [], [], [], []
        for name, part in sorted(held.items()):
            bits = tensor_bits(name, part.elements)
            if part.stop > math.prod(part.shape):
                raise PublishError(f"tensor {name!r} has {math.prod(part.shape)} elements, but a shard up to element {part.stop}.")
            names.append(bits.name)
            dtypes.append(bits.dtype.name)
            shapes.append(tuple(part.shape))
            ranges.append((part.start, part.stop) if part.start < part.stop else EMPTY)
        return cls(tuple(names), tuple(dtypes), tuple(shapes), tuple(ranges))

    @property
    def facts(self) -> list[Any]:
        """Return the values that must be the same in all processes, for JSON."""
        return [[name, dtype, list(shape)] for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)]

    @property
    def groups(self) -> list[list[int]]:
        """The indices of the tensors of each type and shape. Most processes hold the same elements of all tensors in a group."""
        groups: dict[Any, list[int]] = {}
        for index, kind in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            groups.setdefault(kind, []).append(index)
        return list(groups.values())

    def runs(self) -> list[list[list[int]]]:
        """Return what is held of each group's tensors, in order: [start, stop, number of tensors]. The lists are short for any model."""
        return [
            [[*held, sum(1 for _ in same)] for held, same in itertools.groupby(self.held[index] for index in group)]
            for group in self.groups
        ]


def _agree_on_division(ranks: Ranks, layout: HeldLayout) -> Division:
    """Return the division. Messages do not grow with the number of tensors, unless the processes hold each in another way."""
    facts = json.dumps(layout.facts).encode()
    message = {"facts": content_hash(facts), "held": layout.runs()}
    answers = [json.loads(answer) for answer in ranks.exchange(json.dumps(message).encode())]
    if any(answer["facts"] != answers[0]["facts"] for answer in answers):
        _refuse_other_tensors(ranks, layout, facts)
    by_pattern: dict[Any, TensorDivision] = {}
    divisions: dict[int, TensorDivision] = {}
    held_of: dict[int, tuple[ElementRange, ...]] = {}
    for number, group in enumerate(layout.groups):
        elements = math.prod(layout.shapes[group[0]])
        block = PART_ALIGNMENT // dtype_named(layout.dtypes[group[0]]).itemsize
        for indices, held in _patterns(group, [answer["held"][number] for answer in answers]):
            key = (held, elements, block)
            try:  # all have the same answers, so all get the same division, or the same error
                divided = by_pattern.get(key) or by_pattern.setdefault(key, divide_tensor(held, elements, block))
            except PublishError as error:
                raise PublishError(f"tensor {layout.names[indices[0]]!r}: {error}") from None
            divisions |= dict.fromkeys(indices, divided)
            held_of |= dict.fromkeys(indices, held)
    table = TensorTable(layout.names, tuple(map(dtype_named, layout.dtypes)), layout.shapes)
    indices = range(len(layout.names))
    return Division(table, tuple(divisions[index] for index in indices), tuple(held_of[index] for index in indices), ranks.size)


def _patterns(group: Sequence[int], runs: Sequence[list[list[int]]]) -> Iterator[tuple[Sequence[int], tuple[ElementRange, ...]]]:
    """Yield tensors of a group that every rank holds in the same way, and the elements of each that each rank holds."""
    at = [0] * len(runs)
    left = [run[0][2] for run in runs]
    done = 0
    while done < len(group):
        count = min(left)
        yield group[done : done + count], tuple((run[i][0], run[i][1]) for run, i in zip(runs, at, strict=True))
        done += count
        for rank, run in enumerate(runs):
            left[rank] -= count
            if not left[rank] and done < len(group):
                at[rank] += 1
                left[rank] = run[at[rank]][2]


def _refuse_other_tensors(ranks: Ranks, layout: HeldLayout, facts: bytes) -> NoReturn:
    """Raise `PublishError`, which names a tensor that one rank has and rank 0 does not have, or has with another type or shape."""
    wanted = {name: rest for name, *rest in json.loads(ranks.broadcast(facts))}
    own = {name: rest for name, *rest in layout.facts}
    names = [name for name in {*wanted, *own} if wanted.get(name) != own.get(name)]
    for rank, name in enumerate(together(ranks, lambda: min(names, default=None))):
        if name is not None:
            raise PublishError(f"ranks 0 and {rank} do not hold shards of one model: tensor {name!r} is not the same in both.")
    raise AssertionError("layouts with different hashes are the same")


def elements_of(part: TensorPart, where: ElementRange) -> Any:
    """Return elements of a part, which are given by their range in the whole tensor."""
    return part.elements[where[0] - part.start : where[1] - part.start]


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


class PartsByName(Protocol):
    """Parts of a state, which may be made when they are asked for. On a GPU they are complete."""

    def __getitem__(self, name: str, /) -> TensorPart: ...


def pieces_of(division: Division, indices: Sequence[int], parts: PartsByName) -> Iterator[NDArray[np.uint8]]:
    """Return the bytes of this process's parts of some tensors, in order. They are copied from a GPU on a side stream."""
    for index in indices:
        name = division.table.names[index]
        part = parts[name]
        with on_side_stream({name: part}):
            yield bytes_of(part.elements)


def bytes_of(elements: Any) -> NDArray[np.uint8]:
    """Return the bytes of elements. Those on a GPU are copied to the host."""
    if isinstance(elements, np.ndarray):
        return np.ascontiguousarray(elements).view(np.uint8)
    import torch

    found: NDArray[np.uint8] = elements.detach().contiguous().view(torch.uint8).cpu().numpy()
    return found


def _joined(elements: Any, tails: Sequence[NDArray[np.uint8]]) -> Any:
    """Return elements and further ones, which are given as bytes, in one array on the device of the first."""
    if isinstance(elements, np.ndarray):
        return np.concatenate([elements, *(tail.view(elements.dtype) for tail in tails)])
    import torch

    more = [torch.from_numpy(tail.copy()).to(elements.device) for tail in tails]
    return torch.cat([elements.detach().contiguous().view(torch.uint8), *more]).view(elements.dtype)

"""How a tensor is divided among processes, and which elements must change hands for that. Pure.

A process publishes the elements that it holds, except at the edges: parts begin at multiples of 512 bytes (docs/format.md §6). If a shard
begins elsewhere, its first elements are published by the process that holds the elements before them. Processes that hold the same elements
share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from ...errors import PublishError

ElementRange = tuple[int, int]
"""The first element of a tensor, in row-major order, and the one after the last. (0, 0) has no elements."""

EMPTY: ElementRange = (0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that rank `source` holds and rank `target` publishes."""

    source: int
    target: int
    range: ElementRange


@dataclass(frozen=True, slots=True)
class TensorDivision:
    """The elements of one tensor that each rank publishes, and those that must be sent to another rank first."""

    ranges: tuple[ElementRange, ...]
    moves: tuple[Move, ...]


def divide_tensor(held: Sequence[ElementRange], elements: int, block: int) -> TensorDivision:
    """Divide a tensor with this number of elements by what each rank holds of it. Every part begins at a multiple of `block` elements.

    Raises `PublishError` unless the ranks hold the whole tensor, and any two of them hold the same elements or none in common.
    """
    held = [each if each[0] < each[1] else EMPTY for each in held]
    distinct = sorted(set(held) - {EMPTY})
    for this, before in zip([*distinct, (elements, elements)], [EMPTY, *distinct], strict=True):
        if this[0] != before[1]:
            start, stop = sorted((this[0], before[1]))
            raise PublishError(f"elements {start} to {stop} are held by no rank, or by ranks whose shards overlap only in part.")
    ranges = [EMPTY] * len(held)
    moves: list[Move] = []
    holders: dict[ElementRange, list[int]] = {this: [] for this in distinct}
    for rank, each in enumerate(held):
        if each != EMPTY:
            holders[each].append(rank)
    for number, this in enumerate(distinct):
        start, stop = (min(-(-edge // block) * block, elements) for edge in this)
        blocks, among = -(-(stop - start) // block), holders[this]
        cuts = [min(start + blocks * share // len(among) * block, stop) for share in range(len(among) + 1)]
        for rank, each in zip(among, pairwise(cuts), strict=True):
            if each[0] < each[1]:
                ranges[rank] = each
        if start < stop:
            last = next(rank for rank in reversed(among) if ranges[rank] != EMPTY)
            later = takewhile(lambda other: other[0] < stop, islice(distinct, number + 1, None))  # noqa: B023
            moves += [Move(holders[other][0], last, (other[0], min(other[1], stop))) for other in later]
    return TensorDivision(tuple(ranges), tuple(moves))

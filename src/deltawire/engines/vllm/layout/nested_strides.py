"""Finds nested strides in lists of positions, and composes them.

A permutation of 10⁹ elements is not stored as a table. vLLM's kernels order weights by tiles of tiles, so a few nested strides describe
where each unit is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from .types import Nest

MOST_BLOCKS = 64
"""A list of positions that needs more nests than this has none."""
_PIECE = 1 << 24
"""The number of positions that are looked at in one operation, which bounds temporary memory."""

Dimension = tuple[int, int, int]
"""Size, stride in the source, stride in the target."""


def nest_of(dimensions: Iterable[Dimension], source_start: int = 0, target_start: int = 0) -> Nest | None:
    """Return the simplest nest with these dimensions, in any order. None if a unit of the source would be in it twice."""
    merged: list[Dimension] = []
    reach = 0
    for size, source, target in sorted((each for each in dimensions if each[0] != 1), key=lambda each: each[1]):
        if source <= reach:
            return None
        reach += (size - 1) * source
        if merged and source == merged[-1][0] * merged[-1][1] and target == merged[-1][0] * merged[-1][2]:
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, source, target))
    sizes, sources, targets = zip(*reversed(merged), strict=True) if merged else ((), (), ())
    return Nest(sizes, sources, targets, source_start, target_start)


def is_contiguous(nest: Nest) -> bool:
    """Return whether the nest moves one range to one range, in the same order. It must be as simple as `nest_of` makes it."""
    return not nest.sizes or (len(nest.sizes) == 1 and nest.sources == nest.targets == (1,))


def inverse(nest: Nest) -> Nest | None:
    """Return the nest from the target to the source. None if a unit of the target is in the nest twice."""
    return nest_of(zip(nest.sizes, nest.targets, nest.sources, strict=True), nest.target_start, nest.source_start)


def compose(first: Nest, second: Nest) -> Nest | None:
    """Return the nest that does both moves, one after the other.

    Returns None if no single nest does it, or if `second` does not have all targets of `first`. The rule is that of mixed-radix numbers: a
    step of `first` must be a whole number of steps in one dimension of `second`, or wrap around it completely, and no sum may carry over.
    A dimension of `first` that stays at one target does so in the result.
    """
    start = first.target_start - second.source_start
    if start < 0:
        return None
    digits: list[int] = []
    rest = start
    for source in second.sources:
        digits.append(rest // source)
        rest %= source
    if rest:
        return None
    highest = list(digits)
    dimensions: list[Dimension] = []
    for dimension in zip(first.sizes, first.sources, first.targets, strict=True):
        if not _split(dimension, second, highest, dimensions):
            return None
    if any(number >= size for number, size in zip(highest, second.sizes, strict=True)):
        return None
    target = second.target_start + sum(digit * stride for digit, stride in zip(digits, second.targets, strict=True))
    return nest_of(dimensions, first.source_start, target)


def _split(dimension: Dimension, second: Nest, highest: list[int], found: list[Dimension]) -> bool:
    """Add to `found` what a dimension becomes. `highest` counts the largest digit in each dimension of `second`."""
    size, source, stride = dimension
    if stride == 0:
        found.append(dimension)
        return True
    while size > 1:
        level = next((level for level, each in enumerate(second.sources) if stride % each == 0), None)
        if level is None:
            return False
        step = stride // second.sources[level]
        room = second.sizes[level]
        if highest[level] + (size - 1) * step < room:
            count = size
        elif highest[level] < step and room % step == 0 and size % (room // step) == 0:
            count = room // step  # it wraps: the rest of the steps are whole steps of an outer dimension
        else:
            return False
        if count == 1:
            return False
        found.append((count, source, step * second.targets[level]))
        highest[level] += (count - 1) * step
        size, source, stride = size // count, source * count, stride * count
    return True


def fit(positions: torch.Tensor) -> list[Nest] | None:
    """Return nests for a list of positions. None if there are too many.

    Every position is checked: the nests say exactly what the list says.

    Parameters
    ----------
    positions
        For each unit of the source, its position in the target, or −1 if it has none.
    """
    nests: list[Nest] = []
    for start, end in _present(positions):
        found = _fit_whole(positions[start:end], start)
        nests += found
        if not found or len(nests) > MOST_BLOCKS:
            return None
    return nests


def positions_of(nests: Sequence[Nest], first: int, last: int, device: torch.device) -> torch.Tensor:
    """Return the positions of the units from `first` to before `last` after all these moves. −1 if one of the nests does not have a unit.

    Parameters
    ----------
    nests
        The moves, in order.
    first
        The first unit.
    last
        The unit after the last one.
    device
        The device of the result.
    """
    kept = torch.arange(first, last, device=device)
    targets = kept.clone()
    for nest in nests:
        here, targets = nest.find(targets)
        kept = kept[here]
    positions = torch.full((last - first,), -1, dtype=torch.int64, device=device)
    positions[kept - first] = targets
    return positions


def _present(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Return the ranges without −1. If there are too many, return one more than allowed."""
    ranges: list[tuple[int, int]] = []
    total = positions.numel()
    before = False
    for start in range(0, total, _PIECE):
        piece = positions[start : start + _PIECE] >= 0
        edges = torch.nonzero(piece[1:] != piece[:-1]).flatten()[: 2 * MOST_BLOCKS + 2] + start + 1
        marks = ([start] if bool(piece[0]) != before else []) + edges.tolist()
        for mark in marks:
            if before:
                ranges[-1] = (ranges[-1][0], mark)
            else:
                ranges.append((mark, total))
            before = not before
            if len(ranges) > MOST_BLOCKS:
                return ranges
        before = bool(piece[-1])
    return ranges


def _fit_whole(positions: torch.Tensor, source_start: int) -> list[Nest]:
    """Return nests for positions without gaps; an empty list if there are too many.

    The inner dimension with stride s is as long as the greatest common divisor of all indices where the step is not s. Then the same is
    done with the first position of each run.
    """
    inner: list[Dimension] = []
    unit = 1
    while positions.numel() > 1:
        stride = int(positions[1] - positions[0])
        length, breaks = _run_length(positions, stride)
        if length == 1:
            if breaks is None:
                return []
            edges = [0, *breaks, positions.numel()]
            starts = [int(each) for each in positions[torch.tensor(edges[:-1], device=positions.device)]]
            pieces = zip(edges, edges[1:], starts, strict=False)
            nests = [nest_of([*inner, (b - a, unit, stride)], source_start + a * unit, start) for a, b, start in pieces]
            return [nest for nest in nests if nest is not None]
        inner.append((length, unit, stride))
        unit *= length
        positions = positions[::length]
    nest = nest_of(inner, source_start, int(positions[0]) if positions.numel() else 0)
    return [] if nest is None else [nest]


def _run_length(positions: torch.Tensor, stride: int) -> tuple[int, list[int] | None]:
    """Return how many positions in a row have this stride everywhere; 1 if there is no such number.

    Also returns the indices where the stride is another one, or None if they are too many.
    """
    length, breaks, count = positions.numel(), [], 0
    for start in range(0, positions.numel() - 1, _PIECE):
        piece = positions[start : start + _PIECE + 1]
        indices = torch.nonzero(piece[1:] - piece[:-1] != stride).flatten() + start + 1
        if not indices.numel():
            continue
        count += indices.numel()
        if count <= MOST_BLOCKS:
            breaks += indices.tolist()
        length = math.gcd(length, _common_divisor(indices))
        if length == 1 and count > MOST_BLOCKS:
            return 1, None
    return length, breaks if count <= MOST_BLOCKS else None


def _common_divisor(numbers: torch.Tensor) -> int:
    while numbers.numel() > 1:
        if numbers.numel() % 2:
            numbers = torch.cat([numbers, numbers[:1]])
        numbers = torch.gcd(numbers[::2], numbers[1::2])
    return int(numbers)

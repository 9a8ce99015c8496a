"""Who publishes which elements of a tensor that is spread over processes, and what little must change hands for that. Pure.

A process publishes what it holds, but for the edges: parts begin at multiples of 512 bytes (docs/format.md §6), so the head of a shard that
begins elsewhere is published by whoever holds the elements before it. Where several processes hold the same, they share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...errors import PublishError

Span = tuple[int, int]
"""Elements of a tensor in row-major order, from the first number up to, and without, the second. (0, 0) is none."""

NONE: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that `source` holds and `target` publishes."""

    source: int
    target: int
    span: Span


@dataclass(frozen=True, slots=True)
class Share:
    """Of one tensor: what each rank publishes, and what must be handed over before."""

    spans: tuple[Span, ...]
    moves: tuple[Move, ...]


def divide(held: Sequence[Span], elements: int, block: int) -> Share:
    """Divide a tensor by what each rank holds of it, in blocks of so many elements, the last of which may be shorter.

    `PublishError` unless the ranks hold all of it, and any two the same or nothing in common.
    """
    held = [span if span[0] < span[1] else NONE for span in held]
    runs = sorted(set(held) - {NONE})
    for run, before in zip([*runs, (elements, elements)], [NONE, *runs], strict=True):
        if run[0] != before[1]:
            raise PublishError(f"elements {min(run[0], before[1])} to {max(run[0], before[1])} are held by nobody, or by some in part.")
    spans = [NONE] * len(held)
    moves: list[Move] = []
    holders = {run: [rank for rank, span in enumerate(held) if span == run] for run in runs}
    for run in runs:
        start, stop = (min(-(-edge // block) * block, elements) for edge in run)
        blocks, among = -(-(stop - start) // block), holders[run]
        cuts = [min(start + blocks * number // len(among) * block, stop) for number in range(len(among) + 1)]
        for rank, span in zip(among, pairwise(cuts), strict=True):
            if span[0] < span[1]:
                spans[rank] = span
        if start < stop:
            last = next(rank for rank in reversed(among) if spans[rank] != NONE)
            later = [other for other in runs if run[1] <= other[0] < stop]
            moves += [Move(holders[other][0], last, (other[0], min(other[1], stop))) for other in later]
    return Share(tuple(spans), tuple(moves))

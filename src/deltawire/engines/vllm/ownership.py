"""Owners of elements: each element is digested by one worker, so that the digests of all workers add up to the digest of the state.

With tensor, expert or pipeline parallelism, several workers hold parts of a tensor, and some hold the same part. The owner of a part is the
lowest rank that holds it. If parts of two workers overlap without being equal, the sum is wrong and no version is adopted: the digest of a
version proves ownership, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .layout.types import Nest

Blocks: TypeAlias = Mapping[str, Sequence[tuple[Nest, ...]]]
"""For each tensor, the parts that a worker holds (`ModelLayout.blocks`). The sources of the nests are the units of the tensor."""


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of a tensor that a worker owns.

    Parameters
    ----------
    blocks
        The numbers of its parts that it owns.
    has_first
        Whether it owns the first element. The digest of a tensor also depends on its name, type and shape, which count once.
    """

    blocks: frozenset[int]
    has_first: bool


def find_owned(held: Sequence[Blocks], rank: int) -> tuple[dict[str, Owned], list[str]]:
    """Return what a worker owns of each tensor, and the tensors of which no worker holds anything.

    Parameters
    ----------
    held
        What each worker holds, by rank. All have the same tensors.
    rank
        The worker.
    """
    found: dict[str, Owned] = {}
    unheld: list[str] = []
    for name, own in held[rank].items():
        if not any(blocks[name] for blocks in held):
            unheld.append(name)
        lower = {_units(nests) for blocks in held[:rank] for nests in blocks[name]}
        mine: dict[object, int] = {}
        for number, nests in enumerate(own):
            if (units := _units(nests)) not in lower:
                mine.setdefault(units, number)
        has_first = any(_has_first(own[number]) for number in mine.values())
        has_first = has_first and not any(_has_first(nests) for blocks in held[:rank] for nests in blocks[name])
        found[name] = Owned(frozenset(mine.values()), has_first)
    return found, unheld


def _units(nests: tuple[Nest, ...]) -> object:
    """Return a value that is equal for parts with the same units of the tensor."""
    first, *rest = nests
    moves = tuple((nest.sizes, nest.sources, nest.source_start) for nest in rest)
    return first.sizes, first.sources, first.source_start, (first.targets, first.target_start, moves) if rest else None


def _has_first(nests: tuple[Nest, ...]) -> bool:
    return nests[0].source_start == 0

"""Owners of elements: each element is digested by one worker, so that the digests of all workers add up to the digest of the state.

With tensor, expert or pipeline parallelism, several workers hold parts of a tensor, and some hold the same part. The owner of a part is the
lowest rank that holds it. If parts of two workers overlap without being equal, the sum is wrong and no version is adopted: the digest of a
version proves ownership, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ....format.digest import Digest
from ..layout.types import Nest

Blocks: TypeAlias = Mapping[str, Sequence[tuple[Nest, ...]]]
"""For each tensor, the parts that a worker holds (`ModelLayout.blocks`). The sources of the nests are the units of the tensor."""


@dataclass(frozen=True, slots=True)
class Decoders:
    """The workers that decode each tensor: those that need it for their own memory. The others skip it.

    Parameters
    ----------
    bits
        For each tensor, the bits of the ranks that decode it. A tensor that no worker needs is decoded by the first one.
    rank
        The rank of this worker.
    count
        The number of workers.
    """

    bits: Mapping[str, int]
    rank: int
    count: int

    @classmethod
    def of(cls, needed: Sequence[Collection[str]], names: Iterable[str], rank: int) -> Decoders:
        """Return the decoders of all tensors.

        Parameters
        ----------
        needed
            The tensors that each worker needs, by rank.
        names
            All tensors.
        rank
            The rank of this worker.
        """
        found = {name: sum(1 << each for each, wanted in enumerate(needed) if name in wanted) or 1 for name in names}
        return cls(found, rank, len(needed))

    @property
    def everyone(self) -> int:
        """The bits of all workers."""
        return (1 << self.count) - 1

    def any_of(self, names: Iterable[str]) -> int:
        """Return the bits of the workers that decode any of these tensors."""
        found = 0
        for name in names:
            found |= self.bits[name]
        return found

    def includes(self, bits: int) -> bool:
        """Return whether this worker is among some."""
        return bool(bits >> self.rank & 1)

    def is_first(self, bits: int) -> bool:
        """Return whether this worker is the first one of some. It then answers for what they all decode."""
        return bits & -bits == 1 << self.rank


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of a tensor that a worker owns.

    Parameters
    ----------
    blocks
        The numbers of its parts that it owns.
    has_first
        Whether it owns the first element. The digest of a tensor also depends on its name, type and shape, which count once.
    holders
        The ranks that hold exactly the same parts as this worker, if there are several. Their parts must be equal.
    """

    blocks: frozenset[int]
    has_first: bool
    holders: tuple[int, ...] = ()


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
        lower = {units_of(nests) for blocks in held[:rank] for nests in blocks[name]}
        mine: dict[object, int] = {}
        for number, nests in enumerate(own):
            if (units := units_of(nests)) not in lower:
                mine.setdefault(units, number)
        has_first = any(_has_first(own[number]) for number in mine.values())
        has_first = has_first and not any(_has_first(nests) for blocks in held[:rank] for nests in blocks[name])
        same = set(map(units_of, own))
        holders = tuple(each for each, blocks in enumerate(held) if same and set(map(units_of, blocks[name])) == same)
        found[name] = Owned(frozenset(mine.values()), has_first, holders if len(holders) > 1 else ())
    return found, unheld


def replicas_agree(told: Sequence[Mapping[tuple[int, ...], Digest]]) -> bool:
    """Return whether all workers have the same digests of what they hold in common.

    Parameters
    ----------
    told
        The digests of each worker by the ranks that hold the same (`update_types.Digests.replicated`), by rank.
    """
    return all(told[rank].get(holders) == digest for each in told for holders, digest in each.items() for rank in holders)


def units_of(nests: tuple[Nest, ...]) -> object:
    """Return a value that is equal for parts with the same units of the tensor.

    Parameters
    ----------
    nests
        Where a part is.
    """
    first, *rest = nests
    moves = tuple((nest.sizes, nest.sources, nest.source_start) for nest in rest)
    return first.sizes, first.sources, first.source_start, (first.targets, first.target_start, moves) if rest else None


def _has_first(nests: tuple[Nest, ...]) -> bool:
    return nests[0].source_start == 0

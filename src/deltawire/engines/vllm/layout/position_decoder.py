"""Finds where processing has moved the units of a parameter, from results whose values are digits of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..modules.reachable import Path
from .nested_strides import fit
from .types import Nest
from .unit_values import PIECE, Fill, halves, storage_units, unit_values

MOST_COPIES = 8
"""The most positions of one unit. If processing repeats it more often, the result counts as computed."""


@dataclass(frozen=True, slots=True)
class UnitMap:
    """The positions to which processing moves the units of a raw parameter.

    Parameters
    ----------
    path
        How the tensor whose storage holds them is reached from the module.
    unit_bits
        The width of a unit.
    nests
        Blocks, each from units of the raw parameter's storage to units of the result's storage.
    table
        For each 4-bit value, the value in the result. None if they are the same.
    """

    path: Path
    unit_bits: int
    nests: tuple[Nest, ...]
    table: tuple[int, ...] | None = None


class PositionDecoder:
    """Decodes where the positions of one parameter are in one storage.

    Parameters
    ----------
    blank
        The result of a run in which all digits are 0.
    bits
        The width of a unit.
    count
        The number of units of the parameter.
    digit_bits
        The number of bits of a digit.
    offset
        The value for the digit 0.
    table
        For each 4-bit value, the value in the result. None if they are the same.
    """

    def __init__(
        self, blank: torch.Tensor, bits: int, count: int, digit_bits: int, offset: int, table: tuple[int, ...] | None = None
    ) -> None:
        self._bits, self._count, self._digit_bits, self._offset = bits, count, digit_bits, offset
        self._units = blank.untyped_storage().nbytes() * 8 // bits
        kind = torch.int32 if max(count, self._units) < 2**31 - 2 else torch.int64
        self._positions = torch.zeros(self._units, dtype=kind, device=blank.device)
        self._moved = torch.zeros(self._units, dtype=torch.bool, device=blank.device)
        self._is_good = True
        self._blank = blank
        self._table = table
        self._back = None if table is None else torch.tensor([table.index(value) for value in range(16)], device=blank.device)

    def add(self, number: int, after: torch.Tensor) -> None:
        """Take the result of a run with one digit of each position.

        Parameters
        ----------
        number
            The number of the digit.
        after
            The result.
        """
        for start in range(0, self._units if self._is_good else 0, PIECE):
            end = start + PIECE
            values = unit_values(after, self._bits, start, end)
            moved = values != unit_values(self._blank, self._bits, start, end)
            if self._back is not None:
                values = self._back[values]
            digits = values - self._offset
            outside = (digits < 0) | (digits >= 1 << self._digit_bits)
            self._is_good &= not bool((moved & outside).any())
            self._moved[start:end] |= moved
            self._positions[start:end] += torch.where(outside, 0, digits << (self._digit_bits * number)).to(self._positions.dtype)

    def maps(self, path: Path) -> list[UnitMap]:
        """Return the maps for this storage. An empty list means that its values are computed. Call it once."""
        if not self._is_good or not bool(self._moved.any()):
            return []
        for _, sources in self._moved_units():
            if bool((sources < 0).any()) or bool((sources >= self._count).any()):
                return []
        found: list[UnitMap] = []
        for _ in range(MOST_COPIES):
            where = torch.full((self._count,), self._units, dtype=self._positions.dtype, device=self._positions.device)
            for indices, sources in self._moved_units():
                where.scatter_reduce_(0, sources, indices.to(where.dtype), "amin")
            where.masked_fill_(where == self._units, -1)
            nests = fit(where)
            if nests is None:
                return []
            found.append(UnitMap(path, self._bits, tuple(nests), self._table))
            for indices, sources in self._moved_units():  # a unit that processing repeats has further indices
                self._moved[indices[where[sources] == indices]] = False
            if not bool(self._moved.any()):
                return found
        return []

    def _moved_units(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield where units were moved to, as indices, and the units, in pieces, because both have 8 bytes for each of them."""
        for start in range(0, self._units, PIECE):
            indices = torch.nonzero(self._moved[start : start + PIECE]).flatten() + start
            yield indices, self._positions[indices].to(torch.int64) - 1


def is_predicted(maps: Sequence[UnitMap], result: torch.Tensor, fill: Fill, neutral: torch.Tensor | None = None) -> bool:
    """Return whether a result has the values of a fill where the maps say, and neutral values everywhere else, if they are given.

    Parameters
    ----------
    maps
        Maps to the storage of `result`.
    result
        The result of a run.
    fill
        The values of the parameter in that run.
    neutral
        The result of a run with neutral values.
    """
    bits = maps[0].unit_bits
    words = storage_units(result, bits)
    if len(maps) == 1 and maps[0] == UnitMap(maps[0].path, bits, (whole_nest(words.numel()),)) and bits != 4:
        return fill.equals(words)  # nothing moved; this needs no further memory
    source, rest = fill.whole(), None if neutral is None else storage_units(neutral, bits).to(words.device)
    if bits == 4:
        words, source, rest = halves(words), halves(source), None if rest is None else halves(rest)
    expected = None if rest is None else rest.clone()
    for each in maps:
        table = None if each.table is None else torch.tensor(each.table, dtype=torch.int8, device=words.device)
        values = source if table is None else table[source.long()]
        for nest in each.nests:
            moved = Nest(nest.sizes, (), nest.sources, 0, nest.source_start).view(values)
            if expected is not None:
                nest.view(expected).copy_(moved)
            elif not torch.equal(nest.view(words), moved):
                return False
    return expected is None or torch.equal(words, expected)


def whole_nest(count: int) -> Nest:
    """Return the nest that leaves so many units where they are."""
    return Nest((count,), (1,), (1,))


def changed_values(after: torch.Tensor, before: torch.Tensor) -> set[int]:
    """Return the 4-bit values of all units that differ."""
    found: set[int] = set()
    for start in range(0, after.untyped_storage().nbytes() * 2, PIECE):
        now, then = (unit_values(each, 4, start, start + PIECE).to(after.device) for each in (after, before))
        found |= set(now[now != then].unique().tolist())
    return found


def complete_table(values: Mapping[int, set[int]]) -> tuple[int, ...] | None:
    """Return what each 4-bit value becomes, given the values that all but 0 become. None if it is not one value each."""
    if any(len(each) != 1 for each in values.values()):
        return None
    known = {value: min(each) for value, each in values.items()}
    left = set(range(16)) - set(known.values())
    return (left.pop(), *(known[value] for value in range(1, 16))) if len(left) == 1 else None

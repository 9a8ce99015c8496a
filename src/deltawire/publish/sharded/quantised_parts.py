"""Quantise a model of which each process holds some rows, with the same bytes as one process that holds them all (docs/quantise.md).

The processes agree on the scales first. Then each makes the codes of its own rows, where they are, when they are encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...errors import UnquantisableWeight
from ...quantise import QuantisedLayout
from ...quantise.layout import Output, QuantisedWeight
from ...tensors.bits import TensorPart
from ..quantising import Quantising
from .agreed_scales import ShardQuantisers, agree_on_scales
from .division import Division, HeldLayout, Parts, Splitter
from .quantised_source import QuantisedSource
from .ranges import EMPTY, ElementRange
from .ranks import Ranks, together
from .shares import Share


class QuantisedParts:
    """Turns the weights that the processes hold into the parts that they publish. All processes call each method at the same time.

    Parameters
    ----------
    ranks
        The processes.
    quantising
        The recipe, and the type of other tensors.
    threads
        The number of threads that quantise.
    """

    def __init__(self, ranks: Ranks, quantising: Quantising, threads: int | None) -> None:
        self._ranks = ranks
        self._quantising = quantising
        self._threads = threads
        self._sources = Splitter(ranks)
        self._outputs = Splitter(ranks)
        self._source: Division | None = None
        self._shares: list[Share] = []
        self.layout: QuantisedLayout | None = None
        """The tensors that are published, after `divide`."""

    def divide(self, held: Mapping[str, TensorPart]) -> Division:
        """Return which parts of the published tensors each process publishes.

        Raises `UnquantisableWeight` if a weight cannot be quantised, or a process does not hold whole rows of it.
        """
        source = self._sources.agree(partial(HeldLayout.of, held))
        if source is not self._source:
            self._source = None
            together(self._ranks, lambda: self._plan(source))
        division = self._outputs.agree(lambda: self._published(source))
        if self._source is None:
            self._shares = list(self._find_shares(source, division))
            self._source = source
        return division

    def quantise(self, held: Mapping[str, TensorPart], division: Division, previous: Parts | None) -> QuantisedSource:
        """Choose the scales, and return what makes the parts that this process publishes.

        `previous` are its parts of the version before, whose scales may stay. `held` must not change before the parts are made. Raises
        `NonFiniteWeights` in all processes if a weight that is quantised is NaN or infinite.
        """
        layout, ranks = self.layout, self._ranks
        assert layout is not None
        quantisers = ShardQuantisers(self._threads)
        scales = agree_on_scales(ranks, layout, self._shares, held, previous, quantisers)
        source = QuantisedSource(layout, self._shares, held, scales, quantisers, division, self._outputs, ranks.rank, self._threads)
        source.tails = self._outputs.exchange_edges(division, source.elements_at, source.small)
        return source

    def _plan(self, source: Division) -> None:
        table = source.table
        self.layout = self._quantising.layout_for(table)
        for weight in self.layout.weights:
            self._rows_of_all(source, weight)  # raises if a process does not hold whole rows

    def _rows_of_all(self, source: Division, weight: QuantisedWeight) -> NDArray[np.int64]:
        """Return the rows of a weight that each rank holds: [rank, (start, stop)], counted from the first row of the weight."""
        index = source.index_of(weight.source)
        held = source.held[index]
        shape = source.table.shapes[index]
        unit, rows = (shape[-1] * shape[-2], shape[-1]) if weight.is_transposed else (weight.columns, 1)
        ranges = np.array(held, np.int64).reshape(-1, 2)
        if (ranges % unit).any():
            what = "experts" if weight.is_transposed else "rows"
            raise UnquantisableWeight(f"a process holds a part of weight {weight.source!r} that does not consist of whole {what}.")
        return np.clip(ranges // unit * rows - weight.first_row, 0, weight.rows)

    def _published(self, source: Division) -> HeldLayout:
        """Return the published tensors, and the elements of them that this process makes.

        It makes the scales of a block if it holds the first row of the block.
        """
        assert self.layout is not None
        rank = self._ranks.rank
        outputs = sorted(self.layout.outputs.values(), key=lambda output: output.name)
        held = [self._held_of(output, source, rank) for output in outputs]
        facts = (tuple(o.name for o in outputs), tuple(o.dtype.name for o in outputs), tuple(o.shape for o in outputs))
        return HeldLayout(*facts, tuple(held))

    def _held_of(self, output: Output, source: Division, rank: int) -> ElementRange:
        weight = output.weight
        if weight is None:
            return source.held[source.index_of(output.name)][rank]
        assert self.layout is not None
        if output.role in ("global_scale", "shape") or (output.role == "scale" and self.layout.recipe.block.rows is None):
            return (0, math.prod(output.shape)) if rank == 0 else EMPTY
        start, stop = self._rows_of_all(source, weight)[rank].tolist()
        if output.role == "codes":
            each = math.prod(output.shape) // weight.rows
        else:
            height = self.layout.recipe.block.rows or 1
            start, stop = -(-start // height), -(-stop // height)
            each = math.prod(output.shape) // -(-weight.rows // height)
        return (start * each, stop * each) if start < stop else EMPTY

    def _find_shares(self, source: Division, division: Division) -> Iterator[Share]:
        assert self.layout is not None
        rank = self._ranks.rank
        for weight in self.layout.weights:
            rows = self._rows_of_all(source, weight)
            own: ElementRange = tuple(rows[rank].tolist())
            if self.layout.recipe.block.rows is None:
                yield Share(weight, own, (0, 1), (), ())
                continue
            index = division.index_of(weight.outputs["scale"])
            height = self.layout.recipe.block.rows
            width = math.prod(division.table.shapes[index]) // -(-weight.rows // height)
            needs = np.stack([rows[:, 0] // height, -(-rows[:, 1] // height)], axis=1) * width
            needs[rows[:, 0] >= rows[:, 1]] = 0
            publishes = division.ranges_array(index)
            grid: ElementRange = tuple(needs[rank].tolist())
            published: ElementRange = tuple(publishes[rank].tolist())
            yield Share(weight, own, grid, _overlaps(publishes, grid), _overlaps(needs, published))


def _overlaps(ranges: NDArray[np.int64], own: ElementRange) -> tuple[tuple[int, ElementRange], ...]:
    """Return which ranks have elements of `own`, and which elements."""
    starts, stops = np.maximum(ranges[:, 0], own[0]), np.minimum(ranges[:, 1], own[1])
    return tuple((int(rank), (int(starts[rank]), int(stops[rank]))) for rank in np.flatnonzero(starts < stops))

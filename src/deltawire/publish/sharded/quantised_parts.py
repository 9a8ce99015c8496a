"""Quantise a model of which each process holds some rows, with the same bytes as one process that holds them all (docs/quantise.md).

Each process finds the largest values of the blocks that it has rows of, and sends them to the process that publishes the scales of these
blocks. That one has the scales of the version before, chooses the scales, and sends them back. Then each process makes its own codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codec import default_codec
from ...codec.bits import in_host_memory, on_gpu
from ...dtypes import DType
from ...errors import UnquantisableWeight
from ...quantise import QuantisedLayout, reference
from ...quantise.layout import Output, QuantisedWeight
from ...quantise.quantise import Quantiser
from ...quantise.scales import Grid, Scales, choose_scales
from ...tensors.bits import TensorPart, tensor_bits, typed
from ...tensors.casting import Casts
from ...tensors.state import thread_count
from ..quantising import Quantising, refuse_nonfinite
from ..snapshots import host_array
from .division import Division, HeldLayout, Parts, Reader, Splitter
from .ranges import EMPTY, ElementRange
from .ranks import Ranks, together


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process does for a weight."""

    weight: QuantisedWeight
    rows: ElementRange
    """The rows of the weight that it holds."""
    grid: ElementRange
    """The elements of the scale tensor for these rows, including blocks that it shares with other processes."""
    asks: tuple[tuple[int, ElementRange], ...]
    """The processes that publish these scales, and which of them."""
    serves: tuple[tuple[int, ElementRange], ...]
    """The processes that hold rows of the scales which this process publishes, and which of them."""


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
        self._shares: list[_Share] = []
        self.layout: QuantisedLayout | None = None
        """Which tensors are published, after `divide`."""

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

    def quantise(self, held: Mapping[str, TensorPart], division: Division, previous: Parts | None) -> Parts:
        """Return the parts that this process publishes. `previous` are its parts of the version before, whose scales may stay.

        Raises `NonFiniteWeights` in all processes if a weight is NaN or infinite.
        """
        layout, ranks = self.layout, self._ranks
        assert layout is not None
        work = _Work(layout, self._shares, held, previous, self._threads)
        made: dict[str, TensorPart] = {}

        def find() -> None:
            work.find_maxima()
            made.update(_kept(layout, held, self._threads))

        together(ranks, find)
        if layout.recipe.shares_scales:
            largest = ranks.maximum(work.largest_of_groups())
            work.share(largest, ranks.broadcast(work.previous_numbers() if ranks.rank == 0 else b""))
        if layout.recipe.name != "fp8-tensor":
            arrived = ranks.deliver(work.maxima_for(ranks.size))
            scales: list[bytes] = []
            together(ranks, lambda: scales.extend(work.choose(arrived, ranks.size)))
            work.take_scales(ranks.deliver(scales))
        together(ranks, lambda: made.update(work.codes()))
        in_place = {output.name for output in layout.outputs.values() if output.role in ("scale", "global_scale", "shape")}
        made |= {name: work.scale_part(layout.outputs[name], division.range_of(name, ranks.rank)) for name in in_place}
        return self._outputs.hand_over(division, made, in_place=in_place)

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

    def _find_shares(self, source: Division, division: Division) -> Iterator[_Share]:
        assert self.layout is not None
        rank = self._ranks.rank
        for weight in self.layout.weights:
            rows = self._rows_of_all(source, weight)
            own: ElementRange = tuple(rows[rank].tolist())
            if self.layout.recipe.block.rows is None:
                yield _Share(weight, own, (0, 1), (), ())
                continue
            index = division.index_of(weight.outputs["scale"])
            height = self.layout.recipe.block.rows
            width = math.prod(division.table.shapes[index]) // -(-weight.rows // height)
            needs = np.stack([rows[:, 0] // height, -(-rows[:, 1] // height)], axis=1) * width
            needs[rows[:, 0] >= rows[:, 1]] = 0
            publishes = division.ranges_array(index)
            grid: ElementRange = tuple(needs[rank].tolist())
            published: ElementRange = tuple(publishes[rank].tolist())
            yield _Share(weight, own, grid, _overlaps(publishes, grid), _overlaps(needs, published))


def _overlaps(ranges: NDArray[np.int64], own: ElementRange) -> tuple[tuple[int, ElementRange], ...]:
    """Return which ranks have elements of `own`, and which elements."""
    starts, stops = np.maximum(ranges[:, 0], own[0]), np.minimum(ranges[:, 1], own[1])
    return tuple((int(rank), (int(starts[rank]), int(stops[rank]))) for rank in np.flatnonzero(starts < stops))


class _Work:
    """Quantises the shares of one process, for one version."""

    def __init__(
        self,
        layout: QuantisedLayout,
        shares: list[_Share],
        held: Mapping[str, TensorPart],
        previous: Parts | None,
        threads: int | None,
    ) -> None:
        self._layout = layout
        self._recipe = layout.recipe
        self._shares = shares
        self._held = held
        self._previous = previous if layout.recipe.sticky else None
        self._quantiser = _quantiser(threads)
        self._maxima: dict[str, Grid] = {}
        self._scales: dict[str, NDArray[Any]] = {}
        """The scales of the rows of each weight that this process holds."""
        self._published: dict[str, NDArray[Any]] = {}
        """The scales that this process publishes, by weight."""
        self._largest: dict[str, float] = {}
        """The largest magnitude in each group of weights that share a scale."""
        self._old_numbers: dict[str, NDArray[Any]] = {}
        """The previous scales that are one number per weight, where all weights of the group have the same."""
        self._numbers: dict[str, NDArray[Any]] = {}

    def find_maxima(self) -> None:
        """Find the largest values of the blocks. Raises `NonFiniteWeights`."""
        for share in self._shares:
            if share.rows[0] < share.rows[1]:
                found = self._quantiser.block_maxima(self._recipe, self._rows(share), share.rows[0], share.weight.source)
                self._maxima[share.weight.module] = found

    def largest_of_groups(self) -> NDArray[np.float32]:
        """Return the largest magnitude that this process has in each group."""
        found = dict.fromkeys(self._layout.groups, np.float32(0))
        for share in self._shares:
            if share.weight.module in self._maxima:
                found[share.weight.group] = max(found[share.weight.group], self._maxima[share.weight.module].max())
        return np.array(list(found.values()), np.float32)

    def previous_numbers(self) -> bytes:
        """Return the previous scales that are one number per weight. Call it in the first process, which publishes them."""
        if self._previous is None:
            return b""
        return b"".join(self._previous[self._number_output(share.weight).name].elements.tobytes() for share in self._shares)

    def share(self, largest: NDArray[np.float32], numbers: bytes) -> None:
        """Take what all processes share: the largest magnitude of each group, and the previous scales that are one number per weight."""
        self._largest = dict(zip(self._layout.groups, largest.tolist(), strict=True))
        by_group: dict[str, list[NDArray[Any]]] = {}
        at = 0
        for share in self._shares if numbers else ():
            output = self._number_output(share.weight)
            number = np.frombuffer(numbers, output.dtype.numpy, 1, at)
            at += output.dtype.itemsize
            by_group.setdefault(share.weight.group, []).append(number)
            self._old_numbers[share.weight.module] = number
        for share in self._shares:
            same = by_group.get(share.weight.group, [])
            if any(each.dtype != same[0].dtype or each.tobytes() != same[0].tobytes() for each in same):
                self._old_numbers.pop(share.weight.module, None)
        for share in self._shares:
            self._numbers[share.weight.module] = self._number(share)

    def maxima_for(self, size: int) -> list[bytes]:
        """Return the largest values of blocks for the processes that publish their scales."""
        pieces: list[list[bytes]] = [[] for _ in range(size)]
        for share in self._shares:
            for rank, (start, stop) in share.asks:
                flat = self._maxima[share.weight.module].reshape(-1)
                pieces[rank].append(flat[start - share.grid[0] : stop - share.grid[0]].tobytes())
        return [b"".join(each) for each in pieces]

    def choose(self, arrived: list[memoryview], size: int) -> list[bytes]:
        """Choose the scales that this process publishes. Returns them for the processes that hold their rows."""
        readers = [Reader(piece) for piece in arrived]
        pieces: list[list[bytes]] = [[] for _ in range(size)]
        for share in self._shares:
            if not share.serves:
                continue
            start = min(first for _, (first, _) in share.serves)
            stop = max(last for _, (_, last) in share.serves)
            maxima = np.zeros(stop - start, np.float32)
            for rank, (first, last) in share.serves:
                own = maxima[first - start : last - start]
                np.maximum(own, readers[rank].take(own.nbytes).view(np.float32), out=own)
            scale = self._chosen(share.weight, maxima).scale
            self._published[share.weight.module] = scale
            for rank, (first, last) in share.serves:
                pieces[rank].append(scale[first - start : last - start].tobytes())
        return [b"".join(each) for each in pieces]

    def take_scales(self, arrived: list[memoryview]) -> None:
        """Take the scales of this process's rows."""
        readers = [Reader(piece) for piece in arrived]
        for share in self._shares:
            dtype = self._layout.outputs[share.weight.outputs["scale"]].dtype
            taken = [readers[rank].take((stop - start) * dtype.itemsize).view(dtype.numpy) for rank, (start, stop) in share.asks]
            if taken:
                self._scales[share.weight.module] = np.concatenate(taken).reshape(self._maxima[share.weight.module].shape)

    def codes(self) -> dict[str, TensorPart]:
        """Return the codes of this process's rows."""
        found: dict[str, TensorPart] = {}
        for share in self._shares:
            weight = share.weight
            output = self._layout.outputs[weight.outputs["codes"]]
            each = math.prod(output.shape) // weight.rows
            elements: NDArray[Any] = np.empty(0, output.dtype.numpy)
            if share.rows[0] < share.rows[1]:
                scales = self._numbers_as_scales(weight) if weight.module not in self._scales else self._own_scales(weight)
                elements = self._quantiser.encode_codes(self._recipe, self._rows(share), scales, share.rows[0]).reshape(-1)
            found[output.name] = TensorPart(elements.view(output.dtype.numpy), output.shape, share.rows[0] * each)
        return found

    def scale_part(self, output: Output, where: ElementRange) -> TensorPart:
        """Return the part of a scale tensor, or of another small tensor, that this process publishes."""
        weight = output.weight
        assert weight is not None
        start, stop = where
        elements: NDArray[Any] = np.empty(0, output.dtype.numpy)
        if start < stop:
            if output.role == "shape":
                elements = np.array([weight.rows, weight.columns], np.int64)
            elif output.role == "global_scale" or self._recipe.block.rows is None:
                elements = self._numbers[weight.module].reshape(-1)
            else:
                elements = self._published[weight.module]
            assert elements.size == stop - start
        return TensorPart(elements, output.shape, start)

    def _chosen(self, weight: QuantisedWeight, maxima: Grid) -> Scales:
        before: Scales | None = None
        if self._previous is not None:
            old = self._old_numbers.get(weight.module)
            if not self._recipe.has_global_scale:
                before = Scales(self._previous[weight.outputs["scale"]].elements)
            elif old is not None:
                before = Scales(self._previous[weight.outputs["scale"]].elements, old)
        return choose_scales(self._recipe, weight.dtype, maxima, before, self._largest.get(weight.group, 0.0))

    def _number(self, share: _Share) -> NDArray[Any]:
        """Return the scale of a weight that is one number."""
        weight = share.weight
        largest, old = self._largest[weight.group], self._old_numbers.get(weight.module)
        nothing = np.zeros(1, np.float32)
        if not self._recipe.has_global_scale:
            return choose_scales(self._recipe, weight.dtype, nothing, None if old is None else Scales(old), largest).scale
        dtype = self._layout.outputs[weight.outputs["scale"]].dtype
        before = None if old is None else Scales(np.zeros(1, dtype.numpy), old)
        found = choose_scales(self._recipe, weight.dtype, nothing, before, largest).global_scale
        assert found is not None
        return found

    def _own_scales(self, weight: QuantisedWeight) -> Scales:
        return Scales(self._scales[weight.module], self._numbers.get(weight.module))

    def _numbers_as_scales(self, weight: QuantisedWeight) -> Scales:
        return Scales(self._numbers[weight.module])

    def _number_output(self, weight: QuantisedWeight) -> Output:
        return self._layout.outputs[weight.outputs["global_scale" if self._recipe.has_global_scale else "scale"]]

    def _rows(self, share: _Share) -> NDArray[Any]:
        """Return the rows of a weight that this process holds."""
        weight = share.weight
        part = self._held[weight.source]
        elements = _on_host(weight.source, part.elements, weight.dtype)
        if weight.is_transposed:
            inner, outer = part.shape[-2:]
            first = part.start // inner
            rows = elements.reshape(-1, inner, outer).swapaxes(-1, -2).reshape(-1, weight.columns)
        else:
            first = part.start // weight.columns
            rows = elements.reshape(-1, weight.columns)
        return rows[weight.first_row + share.rows[0] - first : weight.first_row + share.rows[1] - first]


def _quantiser(threads: int | None) -> Quantiser:
    codec = default_codec()
    if codec.name == "reference":
        return reference
    from ...quantise.native import NativeQuantiser

    return NativeQuantiser(thread_count(threads), codec.name)


def _on_host(name: str, elements: Any, dtype: DType) -> NDArray[Any]:
    """Return elements on the host. Those on a GPU are copied."""
    bits = tensor_bits(name, elements).bits
    return host_array(name, elements) if on_gpu(bits) else typed(in_host_memory(bits), dtype)


def _kept(layout: QuantisedLayout, held: Mapping[str, TensorPart], threads: int | None) -> dict[str, TensorPart]:
    """Return the parts of tensors that are not quantised, in the type in which they are published. Raises `NonFiniteWeights`."""
    casts = Casts()
    found: dict[str, TensorPart] = {}
    for output in layout.outputs.values():
        if output.weight is None:
            part = held[output.name]
            cast = casts.cast(tensor_bits(output.name, part.elements), output.dtype)
            found[output.name] = TensorPart(_on_host(output.name, typed(cast.bits, output.dtype), output.dtype), part.shape, part.start)
    refuse_nonfinite({name: part.elements for name, part in found.items()}, threads=threads)
    return found

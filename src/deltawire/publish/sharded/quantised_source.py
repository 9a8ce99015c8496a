"""The quantised parts of one process, made from its rows and the agreed scales. They are made some tensors at a time, on their device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...quantise import QuantisedLayout
from ...quantise.layout import Output
from ...quantise.row_shards import RowShard
from ...tensors import torch_types
from ...tensors.bits import TensorPart, UnwrittenTensor, tensor_bits, typed
from ...tensors.casting import Casts
from ..quantising import refuse_nonfinite
from .agreed_scales import AgreedScales, ShardQuantisers
from .division import Division, Edge, Parts, Splitter, Tails, elements_of
from .group_scales import chooses_group_scales
from .ranges import ElementRange
from .shares import Share


class QuantisedSource:
    """Makes quantised parts (`PartsSource`). Shards on a GPU are quantised there, and their parts are on that GPU.

    Parameters
    ----------
    layout
        What is published.
    shares
        What this process does for each weight.
    held
        The weights that this process holds.
    scales
        The agreed scales.
    quantisers
        What quantises shards.
    division
        Which elements each process publishes.
    splitter
        Cuts and joins the parts.
    rank
        The number of this process.
    threads
        The number of threads that look for weights that are not finite.
    """

    whole = None

    def __init__(
        self,
        layout: QuantisedLayout,
        shares: Sequence[Share],
        held: Mapping[str, TensorPart],
        scales: AgreedScales,
        quantisers: ShardQuantisers,
        division: Division,
        splitter: Splitter,
        rank: int,
        threads: int | None,
    ) -> None:
        self._layout = layout
        self._shares = {share.weight.module: share for share in shares}
        self._held = held
        self._scales = scales
        self._quantisers = quantisers
        self._division = division
        self._splitter = splitter
        self._rank = rank
        self._threads = threads
        self.small = {output.name for output in layout.outputs.values() if output.role in ("scale", "global_scale", "shape")}
        """Tensors of which each process has what it publishes already."""
        self.tails: Tails = {}
        """The elements at the edges that other processes sent."""

    @property
    def located(self) -> Mapping[str, Any]:
        outputs = self._layout.outputs.values()
        return {output.name: self._held[output.name if output.weight is None else output.weight.source].elements for output in outputs}

    def make(self, names: Iterable[str], *, may_be_unwritten: bool = False) -> Parts:
        outputs = [self._layout.outputs[name] for name in names]
        codes = [output for output in outputs if output.role == "codes"]
        found: Parts = {}
        if may_be_unwritten:
            unwritten = [(output, rows) for output in codes if (rows := self._rows_read_in_place(output)) is not None]
            found = self._unwritten(unwritten)
            codes = [output for output in codes if output.name not in found]
        own = {output.name: self._kept(output) for output in outputs if output.weight is None}
        refuse_nonfinite({name: part.elements for name, part in own.items()}, threads=self._threads)
        own |= zip((output.name for output in codes), self._codes([(output, self._rows(output)) for output in codes]), strict=True)
        for output in outputs:
            if output.name in self.small:
                found[output.name] = self._small(output)
            elif output.name not in found:
                found[output.name] = self._splitter.joined(self._division, output.name, own[output.name], self.tails)
        return found

    def written_bytes(self, name: str) -> int:
        output = self._layout.outputs[name]
        if output.weight is None:
            is_as_held = self._layout.specs[name].dtype == output.dtype and not self.tails.get(name)
        elif output.role == "codes":
            is_as_held = self._rows_read_in_place(output) is not None
        else:
            is_as_held = self._scales.was_chosen_on_gpu(output)
        start, stop = self._division.range_of(name, self._rank)
        return 0 if is_as_held else (stop - start) * output.dtype.itemsize

    def elements_at(self, edges: Sequence[Edge]) -> list[Any]:
        """Return elements that this process holds, as they are published."""
        found: dict[int, Any] = {}
        asked: list[tuple[Output, ElementRange]] = []
        numbers: list[int] = []
        for number, (name, where) in enumerate(edges):
            output = self._layout.outputs[name]
            if output.weight is None:
                found[number] = elements_of(self._kept(output, where), where)
            else:
                each = _elements_per_row(output)
                asked.append((output, (where[0] // each, -(-where[1] // each))))
                numbers.append(number)
        for number, part in zip(numbers, self._codes(asked), strict=True):
            found[number] = elements_of(part, edges[number][1])
        return [found[number] for number in range(len(edges))]

    def _rows(self, output: Output) -> ElementRange:
        assert output.weight is not None
        return self._shares[output.weight.module].rows

    def _rows_read_in_place(self, output: Output) -> ElementRange | None:
        """Return the rows of a weight whose codes this process publishes, if kernels of a GPU can quantise them when they encode them.

        These are most rows of most models. Others begin or end within a row or a block, or are stored transposed.
        """
        weight = output.weight
        assert weight is not None
        share, each = self._shares[weight.module], _elements_per_row(output)
        start, stop = self._division.range_of(output.name, self._rank)
        if weight.is_transposed or start >= stop or start % each or stop % each or self.tails.get(output.name):
            return None
        rows = start // each, stop // each
        source = self._held[weight.source].elements
        if torch_types.gpu_holding(source) is None or not share.rows[0] <= rows[0] < rows[1] <= share.rows[1]:
            return None
        from ...quantise.gpu.quantised_codes import rows_can_be_quantised_as_read

        return rows if rows_can_be_quantised_as_read(self._layout.recipe, share.shard(self._held, rows)) else None

    def _unwritten(self, asked: Sequence[tuple[Output, ElementRange]]) -> Parts:
        """Return rows of weights in place of their codes, which kernels make when they encode them."""
        shares = [self._shares[output.weight.module] for output, _ in asked if output.weight is not None]
        shards = [share.shard(self._held, rows) for share, (_, rows) in zip(shares, asked, strict=True)]
        scales = [self._scales.scales_of(share, rows) for share, (_, rows) in zip(shares, asked, strict=True)]
        found: Parts = {}
        for quantiser, own in self._quantisers.by_device(shards):
            assert chooses_group_scales(quantiser)
            itemsize = asked[own[0]][0].dtype.itemsize
            made = quantiser.unwritten_codes(self._layout.recipe, [shards[each] for each in own], [scales[each] for each in own], itemsize)
            for each, bits in zip(own, made, strict=True):
                output, rows = asked[each]
                unwritten = UnwrittenTensor(bits, output.dtype, lambda: None)  # the weights were checked when scales were chosen
                found[output.name] = TensorPart(unwritten, output.shape, rows[0] * _elements_per_row(output))
        return found

    def _codes(self, asked: Sequence[tuple[Output, ElementRange]]) -> list[TensorPart]:
        """Return the codes of rows of weights."""
        shards: list[RowShard] = []
        scales = []
        parts: dict[int, TensorPart] = {}
        numbers: list[int] = []
        for number, (output, rows) in enumerate(asked):
            assert output.weight is not None
            share = self._shares[output.weight.module]
            if rows[0] < rows[1]:
                numbers.append(number)
                shards.append(share.shard(self._held, rows))
                scales.append(self._scales.scales_of(share, rows))
            else:
                parts[number] = TensorPart(self._like_source(output, np.empty(0, output.dtype.numpy)), output.shape, 0)
        for quantiser, own in self._quantisers.by_device(shards):
            made = quantiser.codes_of(self._layout.recipe, [shards[each] for each in own], [scales[each] for each in own])
            for each, codes in zip(own, made, strict=True):
                output, rows = asked[numbers[each]]
                dtype = torch_types.torch_dtype(output.dtype) if torch_types.is_torch(codes) else output.dtype.numpy
                parts[numbers[each]] = TensorPart(codes.reshape(-1).view(dtype), output.shape, rows[0] * _elements_per_row(output))
        return [parts[number] for number in range(len(asked))]

    def _kept(self, output: Output, where: ElementRange | None = None) -> TensorPart:
        """Return the part of a tensor that is not quantised, in the type in which it is published; or only some elements of it."""
        part = self._held[output.name]
        start = part.start if where is None else where[0]
        elements = part.elements if where is None else elements_of(part, where)
        cast = Casts().cast(tensor_bits(output.name, elements), output.dtype)
        return TensorPart(typed(cast.bits, output.dtype), part.shape, start)

    def _small(self, output: Output) -> TensorPart:
        part = self._scales.scale_part(output, self._division.range_of(output.name, self._rank))
        if torch_types.is_torch(part.elements):
            return part
        return TensorPart(self._like_source(output, part.elements), part.shape, part.start)

    def _like_source(self, output: Output, array: Any) -> Any:
        """Return an array on the device of the weight that it belongs to."""
        assert output.weight is not None
        source = self._held[output.weight.source].elements
        if torch_types.gpu_holding(source) is None:
            return array
        return torch_types.to_torch(np.array(array)).to(source.device)


def _elements_per_row(output: Output) -> int:
    assert output.weight is not None
    return math.prod(output.shape) // output.weight.rows

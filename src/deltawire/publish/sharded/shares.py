"""Which rows of the weights that are quantised a process holds, and who publishes the scales of these rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...codec.bits import in_host_memory, on_gpu
from ...quantise.layout import QuantisedWeight
from ...quantise.row_shards import RowShard
from ...tensors.bits import Tensor, TensorPart, tensor_bits, typed
from .ranges import ElementRange


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one process in a weight."""

    weight: QuantisedWeight
    rows: ElementRange
    """The rows of the weight that it holds."""
    grid: ElementRange
    """The elements of the scale tensor for these rows, including blocks that it shares with other processes."""
    asks: tuple[tuple[int, ElementRange], ...]
    """The processes that publish these scales, and which of them."""
    serves: tuple[tuple[int, ElementRange], ...]
    """The processes that hold rows of the scales which this process publishes, and which of them."""

    def shard(self, held: Mapping[str, TensorPart], rows: ElementRange | None = None) -> RowShard:
        """Return rows of the weight that this process holds, where they are. By default all of them."""
        weight = self.weight
        first, last = self.rows if rows is None else rows
        part = held[weight.source]
        elements = _typed(weight.source, part.elements)
        start, stop = weight.first_row + first, weight.first_row + last
        if not weight.is_transposed:
            before = part.start // weight.columns
            return RowShard(weight.source, weight.dtype, elements.reshape(-1, weight.columns)[start - before : stop - before], first)
        inner, outer = part.shape[-2:]
        matrix, before = start // outer, part.start // (inner * outer)
        matrices = elements.reshape(-1, inner, outer)[matrix - before : -(-stop // outer) - before]
        rows_of_all = _contiguous(matrices.swapaxes(-1, -2)).reshape(-1, inner)
        return RowShard(weight.source, weight.dtype, rows_of_all[start - matrix * outer : stop - matrix * outer], first)


def _typed(name: str, elements: Tensor) -> Tensor:
    """Return elements in host memory as a NumPy array, and others as they are."""
    tensor = tensor_bits(name, elements)
    if isinstance(elements, np.ndarray) or not on_gpu(tensor.bits):
        return typed(in_host_memory(tensor.bits), tensor.dtype)
    return elements.detach()


def _contiguous(array: Tensor) -> Tensor:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()

"""Codes that are not written anywhere: the codec's kernels quantise weights as they read them, with scales that are chosen before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...codec.bits import ScalesOnDevice
from ...tensors import torch_types
from ...tensors.bits import State
from ..layout import QuantisedWeight
from ..recipe import Recipe
from ..row_shards import RowShard
from ..weight_table import WeightTable
from .quantiser import GpuQuantiser, PendingQuantisation

_ALIGNMENT = 16
_VECTOR = 8
"""The number of columns is a multiple of this."""


class ScaleQuantiser(GpuQuantiser):
    """Chooses scales only. If the table has no memory for them, it only finds out which of them change."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pending: PendingQuantisation | None = None
        self._is_done = False
        self._bad: int | None = None

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None:
        """Start to choose scales, and return None. `first_nonfinite` tells whether all weights are finite."""
        self._pending = self.start(recipe, weights, makes_codes=False, makes_scales=bool(weights.scales.any()))
        self._is_done = False
        return None

    def first_nonfinite(self) -> int | None:
        """Wait, and return the number of a weight that has an element that is NaN or infinite, or None. It waits only once."""
        if not self._is_done and self._pending is not None:
            self._bad = self._pending.first_nonfinite()
            self._is_done = True
        return self._bad

    def unwritten_scales(self, number: int, global_scale: torch.Tensor | None, previous: torch.Tensor | None) -> ScalesOnDevice:
        """Describe the scales of a weight that the last call did not write."""
        pending = self._pending
        assert pending is not None
        assert pending.changed is not None
        assert pending.changed_ends is not None
        start, end = ([0, *pending.changed_ends[:-1]][number], pending.changed_ends[number])
        fresh = None if pending.fresh is None else pending.fresh[number : number + 1]
        return ScalesOnDevice(None, global_scale, previous, pending.changed[int(start) : int(end)], fresh)

    def addresses(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64] | int]:
        """Return `ScalesOnDevice.changed` and `ScalesOnDevice.fresh` of all weights as addresses; 0 if previous scales count."""
        pending = self._pending
        assert pending is not None
        assert pending.changed is not None
        assert pending.changed_ends is not None
        starts = np.append(0, pending.changed_ends[:-1]).astype(np.uint64)
        fresh = 0 if pending.fresh is None else pending.fresh.data_ptr() + 4 * np.arange(starts.size, dtype=np.uint64)
        return pending.changed.data_ptr() + 2 * starts, fresh


def rows_can_be_quantised_as_read(recipe: Recipe, shard: RowShard) -> bool:
    """Tell whether the codec's kernels can quantise rows on a GPU where they are. They must not begin within a block."""
    rows, height = shard.rows_on_gpu, recipe.block.rows or 1
    return bool(
        rows.is_contiguous() and rows.shape[1] % _VECTOR == 0 and rows.data_ptr() % _ALIGNMENT == 0 and shard.first_row % height == 0
    )


def can_be_quantised_as_read(weights: Iterable[QuantisedWeight], state: State, device: torch.device) -> bool:
    """Tell whether the codec's kernels on a GPU can quantise all of these weights where they are."""
    addresses: dict[str, int] = {}
    for weight in weights:
        if weight.is_transposed or weight.columns % _VECTOR:
            return False
        address = addresses.get(weight.source)
        if address is None:
            source: Any = state.get(weight.source)
            if torch_types.gpu_holding(source) != device or not source.is_contiguous():
                return False
            address = addresses[weight.source] = source.data_ptr()
        if (address + weight.first_row * weight.columns * weight.dtype.itemsize) % _ALIGNMENT:
            return False
    return True

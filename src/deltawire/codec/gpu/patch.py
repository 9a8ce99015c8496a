"""Decoded changes on the device, ready to be written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .device import Gpu, KernelSet


class Patch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("firsts", "places", "values")]


@dataclass(slots=True)
class DevicePatch:
    """The changes of many tensors of one width: per tile of 2^14 elements, places (16 bits) and values, ascending."""

    gpu: Gpu
    kernels: KernelSet
    spans: torch.Tensor
    nspans: int
    ntiles: int
    firsts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    tiles: list[tuple[int, int]]
    """Of each tensor: its first tile, and the first after them. Tiles are counted over those chunks that change."""
    starts: list[tuple[int, int]]
    """Of each tensor: its first change, and the first after them."""

    def write(self, bases: Sequence[int], *, swap: bool) -> None:
        """Write the values to tensors that start at these addresses (0: not to this one), on the current stream.

        With `swap`, the patch keeps the values that it replaces: then the same call once more takes everything back.
        """
        addresses = self.gpu.upload(np.array(bases, np.uint64))
        blocks = min(-(-self.ntiles // 8), 32 * self.gpu.processors)
        arguments = [self.spans, ctypes.c_uint32(self.nspans), ctypes.c_uint32(self.ntiles), self._struct(), addresses]
        self.kernels.launch("swap_patch" if swap else "write_patch", blocks, 256, arguments)
        for tensor in (self.spans, self.firsts, self.places, self.values):
            self.gpu.keep(tensor, self.gpu.current())

    def indices(self, tensor: int) -> torch.Tensor:
        """Flat indices of a tensor's changes, ascending, 64 bits each."""
        first, end = self.starts[tensor]
        out = self.gpu.empty(end - first, torch.int64)
        first_tile, end_tile = self.tiles[tensor]
        arguments = [self.spans, *map(ctypes.c_uint32, (self.nspans, first_tile, end_tile)), self._struct(), out]
        self.kernels.launch("flat_indices", -(-(end_tile - first_tile) // 8), 256, arguments)
        return out

    def values_of(self, tensor: int) -> torch.Tensor:
        """The values of a tensor's changes, as integers: the new ones, or the old ones once they were swapped."""
        return self.values[slice(*self.starts[tensor])]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.spans, self.firsts, self.places, self.values))

    def _struct(self) -> Patch:
        return Patch(self.firsts.data_ptr(), self.places.data_ptr(), self.values.data_ptr())

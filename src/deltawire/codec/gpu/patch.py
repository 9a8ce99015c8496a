"""Decoded changes on the device, ready to be written."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Gpu, KernelSet


class Patch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("firsts", "tiles", "places", "values")]


@dataclass(slots=True)
class DevicePatch:
    """The changes of many tensors of one width, ascending: values, and places within blocks of 256 elements, 8 bits each.

    How many changes each block has is said by the tile (2^14 elements) that it is in.
    """

    gpu: Gpu
    kernels: KernelSet
    spans: torch.Tensor
    nspans: int
    ntiles: int
    firsts: torch.Tensor
    tiles: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    starts: NDArray[np.int64]
    """Of each tensor its first change, and after them how many there are."""

    def targets(self, bases: NDArray[np.uint64]) -> torch.Tensor:
        """Tensors to write to, which start at these addresses (0: not to this one). All that writing takes memory for."""
        return self.gpu.upload(bases)

    def write(self, targets: torch.Tensor, *, swap: bool) -> None:
        """Write the values to `targets`, on the current stream.

        With `swap`, the patch keeps the values that it replaces: then the same call once more takes everything back.
        """
        blocks = min(-(-self.ntiles // 8), 32 * self.gpu.processors)
        arguments = [self.spans, ctypes.c_uint32(self.nspans), ctypes.c_uint32(self.ntiles), self._struct(), targets]
        self.kernels.launch("swap_patch" if swap else "write_patch", blocks, 256, arguments)
        self._used_here()

    def changes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each tensor the flat indices of its changes, ascending, 64 bits each, and their values, as integers: the new ones, or the
        old ones once they were swapped."""
        sizes = np.diff(self.starts).tolist()
        indices = self.gpu.empty(int(self.starts[-1]), torch.int64)
        arguments = [self.spans, *map(ctypes.c_uint32, (self.nspans, 0, self.ntiles)), self._struct(), indices]
        self.kernels.launch("flat_indices", -(-self.ntiles // 8), 256, arguments)
        self._used_here()
        return list(zip(indices.split(sizes), self.values.split(sizes), strict=True))

    def _used_here(self) -> None:
        """The arrays were made for the codec's streams: dropped, they go back to those, while this one may still read them."""
        for tensor in self._arrays:
            self.gpu.keep(tensor, self.gpu.current())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._arrays)

    @property
    def _arrays(self) -> tuple[torch.Tensor, ...]:
        return self.spans, self.firsts, self.tiles, self.places, self.values

    def _struct(self) -> Patch:
        return Patch(*(array.data_ptr() for array in self._arrays[1:]))

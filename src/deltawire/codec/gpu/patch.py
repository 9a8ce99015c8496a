"""Decoded changes on the device, ready to be written."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Gpu, KernelSet


class Patch(ctypes.Structure):
    """See `Patch` in locate.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("firsts", "tiles", "positions", "values")]


@dataclass(slots=True)
class DevicePatch:
    """The changes of many tensors of one width, ascending: values, and 8-bit positions within blocks of 256 elements.

    The number of changes of each block is stored in its tile.
    """

    gpu: Gpu
    kernels: KernelSet
    ranges: torch.Tensor
    nranges: int
    ntiles: int
    firsts: torch.Tensor
    tiles: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    starts: NDArray[np.int64]
    """The number of each tensor's first change; and at the end the number of all changes."""

    def targets(self, bases: NDArray[np.uint64]) -> torch.Tensor:
        """Upload the addresses of the tensors to write to; 0 skips a tensor. `write` allocates no other memory."""
        return self.gpu.upload(bases)

    def write(self, targets: torch.Tensor, *, swap: bool) -> None:
        """Write the values to `targets`, on the current stream.

        With `swap`, the patch keeps the values that it replaces, so that a second call with the same arguments restores them.
        """
        blocks = min(-(-self.ntiles // 8), 32 * self.gpu.processors)
        arguments = [self.ranges, ctypes.c_uint32(self.nranges), ctypes.c_uint32(self.ntiles), self._struct(), targets]
        self.kernels.launch("swap_patch" if swap else "write_patch", blocks, 256, arguments)
        self._used_here()

    def changes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the changes of each tensor: ascending flat indices, 64 bits each, and values as integers.

        These are the new values; after a swap, the old ones.
        """
        sizes = np.diff(self.starts).tolist()
        indices = self.gpu.empty(int(self.starts[-1]), torch.int64)
        arguments = [self.ranges, *map(ctypes.c_uint32, (self.nranges, 0, self.ntiles)), self._struct(), indices]
        self.kernels.launch("flat_indices", -(-self.ntiles // 8), 256, arguments)
        self._used_here()
        return list(zip(indices.split(sizes), self.values.split(sizes), strict=True))

    def _used_here(self) -> None:
        """Keep the arrays for the current stream: they were allocated for the codec's streams, which could reuse them too early."""
        for tensor in self._arrays:
            self.gpu.keep(tensor, self.gpu.current())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._arrays)

    @property
    def _arrays(self) -> tuple[torch.Tensor, ...]:
        return self.ranges, self.firsts, self.tiles, self.positions, self.values

    def _struct(self) -> Patch:
        return Patch(*(array.data_ptr() for array in self._arrays[1:]))

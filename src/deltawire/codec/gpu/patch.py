"""Decoded changes on the device, ready to be written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Gpu, KernelSet
from .kernel_table import SUMS, Numbers


class Patch(ctypes.Structure):
    """See `Patch` in locate.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("firsts", "tiles", "positions", "values")]


@dataclass(slots=True)
class DevicePatch:
    """The changes of many tensors of one width, ascending: values, and 8-bit positions within blocks of 256 cells.

    A cell is an element; or a byte, if two elements share one. The number of changes of each block is stored in its tile.
    """

    gpu: Gpu
    kernels: KernelSet
    width: int
    tensors: torch.Tensor
    tile_starts: Numbers
    """The number of each tensor's first tile, and at the end the number of all tiles."""
    firsts: torch.Tensor
    tiles: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor

    def targets(self, bases: NDArray[np.uint64]) -> torch.Tensor:
        """Upload the addresses of the tensors to write to; 0 skips a tensor. Writing allocates no other memory."""
        return self.gpu.upload(bases)

    def write(self, targets: torch.Tensor, *, swap: bool) -> None:
        """Write the values to `targets`, on the current stream.

        With `swap`, the patch keeps the values that it replaces, so that a second call with the same arguments restores them.
        """
        blocks = min(-(-self._ntiles // 8), 32 * self.gpu.processors)
        self.kernels.launch("swap_patch" if swap else "write_patch", blocks, 256, [*self._numbers(), self._struct(), targets])
        self._used_here()

    def new_sums(self) -> torch.Tensor:
        """Return room for the word sums that `exchange` computes: `SUMS` for each tensor. Loads its kernel, so that it does not have to."""
        self._blocks_to_exchange()
        return self.gpu.empty((self.tile_starts.size - 1) * SUMS.itemsize, torch.uint8)

    def exchange(self, targets: torch.Tensor, sums: torch.Tensor) -> None:
        """Do as `write` with `swap`, and digest what `targets` have then in the same pass, on the current stream.

        The word sums of each tensor go to "before" of its `SUMS`. They are those of the values that the kernel stores. It does not read
        them back from memory.
        """
        sums.zero_()
        self.kernels.launch("exchange_patch", self._blocks_to_exchange(), 256, [*self._numbers(), self._struct(), targets, sums])
        self._used_here()
        self.gpu.keep(sums, self.gpu.current())

    def _blocks_to_exchange(self) -> int:
        return min(-(-self._ntiles // 8), self.kernels.resident_blocks("exchange_patch", 256, 0) * self.gpu.processors)

    def changes(self, tensors: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the changes of tensors: ascending flat indices of cells, 64 bits each, and values as integers.

        These are the new values; after a swap, the old ones.
        """
        starts, values, listed, nothing = self.firsts, self.values, self.values, ctypes.c_void_p()
        warps = -(-self._ntiles // 8)
        if self.width < 8:  # several changed elements may share a cell
            counts = self.gpu.zeros(self._ntiles + 1, torch.int32)
            self.kernels.launch("count_cells", warps, 256, [ctypes.c_uint32(self._ntiles), self._struct(), counts])
            starts = (counts.cumsum(0, dtype=torch.int32) - counts).contiguous()
            values = listed = self.gpu.empty(self.values.numel(), self.values.dtype)
        indices = self.gpu.empty(self.values.numel(), torch.int64)
        lists = [starts, indices, listed if self.width < 8 else nothing]
        self.kernels.launch("list_cells", warps, 256, [*self._numbers(), self._struct(), *lists])
        self._used_here()
        bounds = self.bounds(starts)
        return [(indices[bounds[n] : bounds[n + 1]], values[bounds[n] : bounds[n + 1]]) for n in tensors]

    def bounds(self, starts: torch.Tensor) -> list[int]:
        """Return where the changes of each tensor start, and at the end the number of all changes, given where those of each tile start."""
        found: list[int] = self.starts(starts).cpu().numpy().view(np.uint32).tolist()
        return found

    def starts(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the same on the device, as 32-bit numbers."""
        return starts[self.gpu.upload(self.tile_starts).view(torch.int64)]

    def _used_here(self) -> None:
        """Keep the arrays for the current stream: they were allocated for the codec's streams, which could reuse them too early."""
        for tensor in self._arrays:
            self.gpu.keep(tensor, self.gpu.current())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._arrays)

    @property
    def _ntiles(self) -> int:
        return int(self.tile_starts[-1])

    @property
    def _arrays(self) -> tuple[torch.Tensor, ...]:
        return self.tensors, self.firsts, self.tiles, self.positions, self.values

    def _numbers(self) -> list[object]:
        return [self.tensors, ctypes.c_uint32(self.tile_starts.size - 1), ctypes.c_uint32(self._ntiles)]

    def _struct(self) -> Patch:
        return Patch(*(array.data_ptr() for array in self._arrays[1:]))

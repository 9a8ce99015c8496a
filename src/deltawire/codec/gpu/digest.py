"""The state digest on the GPU (docs/format.md §2), in one pass at the speed of memory."""

from __future__ import annotations

import ctypes

import torch

from ..base import Sums
from .device import Gpu
from .kernel_table import SUMS, KernelTable, TensorRows

_BLOCKS = 3
"""Thread blocks per processor."""


def digest_tensors(table: KernelTable, gpu: Gpu) -> Sums:
    """Return the word sums of tensors of one width, computed on the current stream."""
    found: Sums = start_digest(table, gpu).cpu().numpy().view(SUMS)["before"]
    return found


def start_digest(table: KernelTable, gpu: Gpu) -> torch.Tensor:
    """Start to compute the word sums, and return `SUMS` of all tensors on the device without waiting."""
    sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
    digest_rows(table.rows(table.base != 0), table.width, sums, gpu)
    return sums


def digest_rows(tensors: TensorRows, width: int, sums: torch.Tensor, gpu: Gpu) -> None:
    """Add the words of these tensors to their sums."""
    ntiles = tensors.ntiles
    if ntiles:
        arguments = [gpu.upload(tensors.rows), ctypes.c_uint32(len(tensors.rows)), ctypes.c_uint32(ntiles), sums]
        gpu.kernels(width).launch("digest", min(-(-ntiles // 8), _BLOCKS * gpu.processors), 256, arguments)

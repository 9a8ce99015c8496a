"""Finding tensors on a GPU that have an element whose magnitude reaches a limit, in one pass over all tensors."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Gpu
from .kernel_table import Numbers

_TENSOR: Final = np.dtype(
    [
        *((name, "u8") for name in ("data", "bytes", "unit0")),
        *((name, "u4") for name in ("low", "add", "high", "is_unsigned", "is_wide", "unused")),
    ]
)
"""See `Tensor` in reaching.cuh."""

_THREADS, _UNIT = 256, 1 << 16
_BLOCKS = 8
"""Thread blocks per processor."""

ALIGNMENT: Final = 16
"""Addresses of tensors are multiples of this."""


@functools.cache
def _source() -> str:
    return (resources.files(__package__) / "kernels" / "reaching.cuh").read_text()


def start_reaching(
    addresses: NDArray[np.uint64],
    sizes: Numbers,
    itemsizes: NDArray[np.uint8],
    masks: NDArray[np.uint64],
    limits: NDArray[np.uint64],
    gpu: Gpu,
) -> torch.Tensor:
    """Start to find out which tensors have an element that is at least the limit, after it was masked.

    Return a number for each tensor, on the GPU, without waiting: 1 if it has one, or else 0. The work is on the current stream.

    Parameters
    ----------
    addresses
        Where the tensors begin, at multiples of `ALIGNMENT`. They are contiguous.
    sizes
        The numbers of their elements, at least 1.
    itemsizes
        The bytes of an element: 1, 2, 4 or 8.
    masks
        All bits of an element, or all except the sign. If all, the uppermost bit of the limit is set.
    limits
        The limits. Those of elements of 8 bytes have zeros in the lower 4 bytes.
    gpu
        Where the tensors are.
    """
    rows = np.zeros(len(addresses), _TENSOR)
    nbytes = sizes * itemsizes
    units = -(-nbytes // _UNIT)
    rows["data"], rows["bytes"], rows["unit0"] = addresses, nbytes, np.cumsum(units) - units
    bits = 8 * np.minimum(itemsizes, 4).astype(np.uint64)  # of the part of an element that decides
    sign = np.uint64(1) << (bits - np.uint64(1))
    least = (limits >> np.where(itemsizes == 8, np.uint64(32), np.uint64(0))) & (sign - np.uint64(1))
    repeated = np.uint64(0xFFFFFFFF) // ((np.uint64(1) << bits) - np.uint64(1))
    rows["low"], rows["add"], rows["high"] = (sign - np.uint64(1)) * repeated, (sign - least) * repeated, sign * repeated
    rows["is_unsigned"], rows["is_wide"] = masks >> (np.uint64(8) * itemsizes - np.uint64(1)), itemsizes == 8
    found = gpu.zeros(len(rows), torch.int32)
    total = int(units.sum())
    arguments = [gpu.upload(rows), ctypes.c_uint32(len(rows)), ctypes.c_uint64(total), found]
    gpu.other_kernels(_source()).launch("find_reaching", min(total, _BLOCKS * gpu.processors), _THREADS, arguments)
    return found

"""What kernels are told of tensors: the structures of `kernels/common.cuh`, made for many tensors at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DType
from ..base import Lanes

BLOCK, TILE, UNIT = 1 << 24, 1 << 14, 1 << 10
CONTEXTS, UNITS = 16, 16

SPAN = np.dtype(
    [("base", "u8"), ("next", "u8"), ("seed", "u8"), ("first", "u8")]
    + [(name, "u4") for name in ("count", "tile0", "tensor", "top", "shift", "mask", "start", "mode")]
)
SUMS = np.dtype([("changed", "u8"), ("before", "u4", 4), ("change", "u4", 4)])


class Changes(ctypes.Structure):
    """See `Changes` in scan.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slots", "sizes", "counts", "ranks", "pairs")),
        ("capacity", ctypes.c_uint32),
        ("cursor", ctypes.c_void_p),
    ]


class Bodies(ctypes.Structure):
    """See `Bodies` in plan.cuh."""

    _fields_ = [("words", ctypes.c_void_p), ("capacity", ctypes.c_uint64), ("cursor", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class Facts:
    """One tensor as kernels see it; addresses 0 stand for zeros, or for no elements."""

    base: int
    next: int
    count: int
    seed: int
    dtype: DType
    appears: bool = False
    """It had no base: then it has a payload even if nothing changes."""


def spans_of(tensors: Sequence[Facts], size: int = BLOCK) -> NDArray[np.void]:
    """The blocks of all tensors, of at most `size` elements each."""
    counts = np.array([t.count for t in tensors], np.int64)
    blocks = -(-counts // size)
    owner = np.repeat(np.arange(len(tensors)), blocks)
    within = np.arange(owner.size) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    spans = np.zeros(owner.size, SPAN)
    if not owner.size:
        return spans
    first = within * size
    width = np.array([t.dtype.itemsize for t in tensors], np.uint64)[owner]
    for field in ("base", "next"):
        address = np.array([getattr(t, field) for t in tensors], np.uint64)[owner]
        spans[field] = np.where(address != 0, address + first.astype(np.uint64) * width, 0)
    spans["seed"] = np.array([t.seed for t in tensors], np.uint64)[owner]
    spans["first"] = first
    spans["count"] = np.minimum(counts[owner] - first, size)
    spans["tensor"] = owner
    spans["shift"] = np.array([t.dtype.exponent_shift for t in tensors])[owner]
    spans["mask"] = np.array([(1 << t.dtype.exponent_bits) - 1 for t in tensors])[owner]
    place_tiles(spans)
    return spans


def place_tiles(spans: NDArray[np.void]) -> int:
    """Number the tiles of these spans from 0 on; returns how many there are."""
    tiles = tiles_of(spans)
    ends = np.cumsum(tiles)
    spans["tile0"] = ends - tiles
    return int(ends[-1]) if ends.size else 0


def tiles_of(spans: NDArray[np.void]) -> NDArray[np.int64]:
    return -(-spans["count"].astype(np.int64) // TILE)


def upload(array: NDArray[np.void] | NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The bytes of a small array on the device, by way of pinned memory: nothing waits for the copy."""
    pinned = torch.empty(max(array.nbytes, 1), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return pinned.to(device, non_blocking=True)


def lanes(words: NDArray[np.uint32]) -> list[Lanes]:
    """Rows of four words each."""
    return [(a, b, c, d) for a, b, c, d in words.tolist()]

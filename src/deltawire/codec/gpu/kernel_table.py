"""What kernels are told of tensors: the structures of `kernels/common.cuh`, made for many tensors at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DTYPES

BLOCK, TILE, UNIT = 1 << 24, 1 << 14, 1 << 10
CONTEXTS = 16

SPAN = np.dtype(
    [("base", "u8"), ("next", "u8"), ("seed", "u8"), ("first", "u8")]
    + [(name, "u4") for name in ("count", "tile0", "tensor", "top", "shift", "mask", "start", "mode")]
)
SUMS = np.dtype([("changed", "u8"), ("before", "u4", 4), ("change", "u4", 4)])

SHIFTS = np.array([dtype.exponent_shift for dtype in DTYPES], np.uint32)
MASKS = np.array([(1 << dtype.exponent_bits) - 1 for dtype in DTYPES], np.uint32)
"""By code of the type."""


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


@dataclass(slots=True)
class KernelTable:
    """The facts of many tensors of one width, a column each: models have thousands of tensors, and Python is slow with each of them."""

    base: NDArray[np.uint64]
    next: NDArray[np.uint64]
    """Addresses; 0 stands for zeros, or for no elements."""
    count: NDArray[np.int64]
    seed: NDArray[np.uint64]
    codes: NDArray[np.uint8]
    """Of their types."""
    appears: NDArray[np.bool_]
    """They had no base: then they have a payload even if nothing changes."""
    next_is_float32: bool
    """`next` are float32, to be rounded to the type (bfloat16)."""

    @classmethod
    def of(
        cls,
        base: Sequence[int],
        count: Sequence[int],
        seed: Sequence[int],
        codes: Sequence[int],
        next: Sequence[int] = (),
        appears: Sequence[bool] = (),
        *,
        next_is_float32: bool = False,
    ) -> KernelTable:
        """Of at least one tensor. Without `next` and `appears`, there is nothing to follow, and none appears."""
        return cls(
            np.array(base, np.uint64),
            np.array(next, np.uint64) if next else np.zeros(len(base), np.uint64),
            np.array(count, np.int64),
            np.array(seed, np.uint64),
            np.frombuffer(bytes(codes), np.uint8),
            np.array(appears, np.bool_) if appears else np.zeros(len(base), np.bool_),
            next_is_float32,
        )

    def __len__(self) -> int:
        return self.base.size

    @property
    def width(self) -> int:
        """Of an element, in bits."""
        return DTYPES[int(self.codes[0])].width

    @property
    def itemsize(self) -> int:
        return DTYPES[int(self.codes[0])].itemsize

    @property
    def nbytes(self) -> int:
        return int(self.count.sum()) * self.itemsize

    def blocks(self, which: NDArray[Any] | None = None) -> NDArray[np.void]:
        """The blocks (2²⁴ elements at most) of all tensors, or of those whose numbers are given."""
        numbers = np.arange(len(self)) if which is None else which
        each = -(-self.count[numbers] // BLOCK)
        owner = np.repeat(numbers, each)
        first = (np.arange(owner.size) - np.repeat(np.cumsum(each) - each, each)) * BLOCK
        spans = self.spans(owner, first)
        spans["count"] = np.minimum(self.count[owner] - first, BLOCK)
        spans["base"] = addresses(self.base, owner, first, self.itemsize)
        spans["next"] = addresses(self.next, owner, first, 4 if self.next_is_float32 else self.itemsize)
        place_tiles(spans)
        return spans

    def spans(self, owner: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.void]:
        """Spans of these tensors from these elements on, without lengths and addresses."""
        spans = np.zeros(owner.size, SPAN)
        spans["seed"] = self.seed[owner]
        spans["first"] = first
        spans["tensor"] = owner
        spans["shift"] = SHIFTS[self.codes[owner]]
        spans["mask"] = MASKS[self.codes[owner]]
        return spans


def addresses(column: NDArray[np.uint64], owner: NDArray[np.int64], first: NDArray[np.int64], itemsize: int) -> NDArray[np.uint64]:
    """Of these elements of tensors that start where the column says."""
    start = column[owner]
    return np.where(start != 0, start + first.astype(np.uint64) * np.uint64(itemsize), np.uint64(0))


def place_tiles(spans: NDArray[np.void]) -> int:
    """Number the tiles of these spans from 0 on; returns how many there are."""
    tiles = tiles_of(spans)
    ends = np.cumsum(tiles)
    spans["tile0"] = ends - tiles
    return int(ends[-1]) if ends.size else 0


def tiles_of(spans: NDArray[np.void]) -> NDArray[np.int64]:
    return -(-spans["count"].astype(np.int64) // TILE)

"""The structures that tell kernels about tensors (see `kernels/common.cuh`), made for many tensors at a time."""

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

RANGE = np.dtype(
    [("base", "u8"), ("next", "u8"), ("seed", "u8"), ("first", "u8")]
    + [(name, "u4") for name in ("count", "tile0", "tensor", "top", "shift", "mask", "start", "mode")]
)
SUMS = np.dtype([("changed", "u8"), ("before", "u4", 4), ("change", "u4", 4)])

SHIFTS = np.array([dtype.exponent_shift for dtype in DTYPES], np.uint32)
MASKS = np.array([(1 << dtype.exponent_bits) - 1 for dtype in DTYPES], np.uint32)
"""Exponent shifts and masks, by type code."""


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
    """Facts about many tensors of one width, in columns: models have thousands of tensors, and Python objects for each would be slow."""

    base: NDArray[np.uint64]
    next: NDArray[np.uint64]
    """Addresses of the old and the new elements; 0 stands for zeros, or for no elements."""
    count: NDArray[np.int64]
    seed: NDArray[np.uint64]
    codes: NDArray[np.uint8]
    """The codes of their types."""
    appears: NDArray[np.bool_]
    """Whether each tensor is added. Then it has a payload even if all its elements are zero."""
    next_is_float32: bool
    """Whether `next` are float32 master weights, which kernels round to the type of the tensors (bfloat16)."""

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
        """Make the table of at least one tensor. Without `next`, there are no new elements; without `appears`, no tensor is added."""
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
        """The width of an element in bits."""
        return DTYPES[int(self.codes[0])].width

    @property
    def itemsize(self) -> int:
        return DTYPES[int(self.codes[0])].itemsize

    @property
    def nbytes(self) -> int:
        return int(self.count.sum()) * self.itemsize

    def blocks(self, which: NDArray[Any] | None = None) -> NDArray[np.void]:
        """Return the blocks (at most 2²⁴ elements each) of all tensors, or of those with the given numbers."""
        numbers = np.arange(len(self)) if which is None else which
        each = -(-self.count[numbers] // BLOCK)
        owner = np.repeat(numbers, each)
        first = (np.arange(owner.size) - np.repeat(np.cumsum(each) - each, each)) * BLOCK
        ranges = self.ranges(owner, first)
        ranges["count"] = np.minimum(self.count[owner] - first, BLOCK)
        ranges["base"] = addresses(self.base, owner, first, self.itemsize)
        ranges["next"] = addresses(self.next, owner, first, 4 if self.next_is_float32 else self.itemsize)
        number_tiles(ranges)
        return ranges

    def ranges(self, owner: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.void]:
        """Return ranges of these tensors that start at these elements, without lengths and addresses."""
        ranges = np.zeros(owner.size, RANGE)
        ranges["seed"] = self.seed[owner]
        ranges["first"] = first
        ranges["tensor"] = owner
        ranges["shift"] = SHIFTS[self.codes[owner]]
        ranges["mask"] = MASKS[self.codes[owner]]
        return ranges


def addresses(column: NDArray[np.uint64], owner: NDArray[np.int64], first: NDArray[np.int64], itemsize: int) -> NDArray[np.uint64]:
    """Return the addresses of elements, given the addresses of their tensors in `column`; 0 if the tensor has no address."""
    start = column[owner]
    return np.where(start != 0, start + first.astype(np.uint64) * np.uint64(itemsize), np.uint64(0))


def number_tiles(ranges: NDArray[np.void]) -> int:
    """Number the tiles of these ranges from 0 on. Return how many there are."""
    tiles = tiles_of(ranges)
    ends = np.cumsum(tiles)
    ranges["tile0"] = ends - tiles
    return int(ends[-1]) if ends.size else 0


def tiles_of(ranges: NDArray[np.void]) -> NDArray[np.int64]:
    return -(-ranges["count"].astype(np.int64) // TILE)

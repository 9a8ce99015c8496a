"""What kernels are told of tensors: the structures of `kernels/common.cuh`, made for many tensors at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DTYPES, DType
from ..base import Lanes

BLOCK, TILE, UNIT = 1 << 24, 1 << 14, 1 << 10
CONTEXTS, UNITS = 16, 16

SPAN = np.dtype(
    [("base", "u8"), ("next", "u8"), ("seed", "u8"), ("first", "u8")]
    + [(name, "u4") for name in ("count", "tile0", "tensor", "top", "shift", "mask", "start", "mode")]
)
SUMS = np.dtype([("changed", "u8"), ("before", "u4", 4), ("change", "u4", 4)])

_SHIFTS = np.array([dtype.exponent_shift for dtype in DTYPES], np.uint32)
_MASKS = np.array([(1 << dtype.exponent_bits) - 1 for dtype in DTYPES], np.uint32)
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


class Facts(NamedTuple):
    """One tensor as kernels see it; addresses 0 stand for zeros, or for no elements."""

    base: int
    next: int
    elements: int
    seed: int
    dtype: DType
    appears: bool = False
    """It had no base: then it has a payload even if nothing changes."""
    masters: bool = False
    """`next` are float32, to be rounded to the type (bfloat16). All tensors of a call, or none."""


@dataclass(slots=True)
class Table:
    """The facts of many tensors of one width, a column each: models have thousands of tensors, and Python is slow with each of them."""

    base: NDArray[np.uint64]
    next: NDArray[np.uint64]
    count: NDArray[np.int64]
    seed: NDArray[np.uint64]
    dtypes: Sequence[DType]
    codes: NDArray[np.uint8]
    shift: NDArray[np.uint32]
    mask: NDArray[np.uint32]
    appears: Sequence[bool]
    masters: bool

    @classmethod
    def of(cls, tensors: Sequence[Facts]) -> Table:
        base, following, count, seed, dtypes, appears, masters = zip(*tensors, strict=True)
        first = dtypes[0]
        alike = dtypes.count(first) == len(dtypes)
        codes = np.full(len(dtypes), first.code, np.uint8) if alike else np.array([dtype.code for dtype in dtypes], np.uint8)
        return cls(
            np.array(base, np.uint64),
            np.array(following, np.uint64),
            np.array(count, np.int64),
            np.array(seed, np.uint64),
            dtypes,
            codes,
            _SHIFTS[codes],
            _MASKS[codes],
            appears,
            masters[0],
        )

    def __len__(self) -> int:
        return len(self.dtypes)

    @property
    def width(self) -> int:
        """Of an element, in bits."""
        return self.dtypes[0].width

    @property
    def itemsize(self) -> int:
        return self.dtypes[0].itemsize

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
        spans["next"] = addresses(self.next, owner, first, 4 if self.masters else self.itemsize)
        place_tiles(spans)
        return spans

    def spans(self, owner: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.void]:
        """Spans of these tensors from these elements on, without lengths and addresses."""
        spans = np.zeros(owner.size, SPAN)
        spans["seed"] = self.seed[owner]
        spans["first"] = first
        spans["tensor"] = owner
        spans["shift"] = self.shift[owner]
        spans["mask"] = self.mask[owner]
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


def lanes(words: NDArray[np.uint32]) -> list[Lanes]:
    """Rows of four words each."""
    rows: list[Lanes] = np.ascontiguousarray(words).view([(f"{i}", "u4") for i in range(4)]).reshape(-1).tolist()
    return rows

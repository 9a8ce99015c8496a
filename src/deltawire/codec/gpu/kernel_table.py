"""The structures that tell kernels about tensors (see `kernels/common.cuh`), made for many tensors at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import PAYLOAD_TYPES

TILE, UNIT = 1 << 14, 1 << 10
CONTEXTS = 16

TENSOR = np.dtype(
    [
        *((name, "u8") for name in ("base", "next", "seed", "count", "element0")),
        *((name, "u4") for name in ("tile0", "is_float32")),
        ("quantised", "u8"),
    ]
)
QUANTISED = np.dtype(
    [
        *((name, "u8") for name in ("scales", "global_scale", "previous", "changed", "fresh")),
        *((name, "u4") for name in ("kind", "group", "columns", "source", "width", "flags")),
    ]
)
MAKES_SCALES, MAKES_BASE = 1, 2
"""The `flags` of weights that are quantised to scales, or to elements of the base."""

RUN = np.dtype(
    [("body", "u8")] + [(name, "u4") for name in ("tile0", "tiles", "top", "shift", "mask", "elements", "start", "mode", "block", "bytes")]
)
SUMS = np.dtype([("changed", "u8"), ("before", "u4", 4), ("change", "u4", 4)])

_SHIFTS = np.array([payload_type.exponent_shift for payload_type in PAYLOAD_TYPES], np.uint32)
_MASKS = np.array([(1 << payload_type.exponent_bits) - 1 for payload_type in PAYLOAD_TYPES], np.uint32)
"""Exponent shifts and masks, by type code."""

OLD_BLOCK_TILES = 1 << 10
"""The most tiles of a block in versions 1 and 2 of the format."""

Numbers = NDArray[np.int64]


def block_tiles(width: int) -> int:
    """Return the most tiles of a block of a group, by the width of an element in bits (docs/format.md §3)."""
    return {4: 1 << 12, 8: 1 << 11}.get(width, 1 << 10)


class Tiles(ctypes.Structure):
    """See `Tiles` in scan.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tensors", "runs")),
        *((name, ctypes.c_uint32) for name in ("ntensors", "nruns", "first", "end")),
    ]


class SlabTensors(ctypes.Structure):
    """See `Slab` in chunks.cuh."""

    _fields_ = [("tensors", ctypes.c_void_p), ("ntensors", ctypes.c_uint32), ("first_tile", ctypes.c_uint32)]


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
    """Facts about many tensors of one width, in columns: models have thousands of tensors, and Python objects for each would be slow.

    The tensors form groups, one after the other. The blocks of a group are runs of its tiles, and may have tiles of many tensors.
    """

    width: int
    """The width of an element in bits. All counts are in these elements: there are two 4-bit elements in each byte of a tensor."""
    base: NDArray[np.uint64]
    next: NDArray[np.uint64]
    """Addresses of the old and the new elements; 0 means that all elements are zero, or that there are none."""
    count: Numbers
    seed: NDArray[np.uint64]
    group_ends: Numbers
    """The number of the first tensor after each group."""
    group_codes: NDArray[np.uint8]
    """The code of each group's payload type."""
    group_tiles: int
    """The most tiles of a block."""
    is_float32: NDArray[np.bool_] | None = None
    """Which `next` are float32 master weights. Kernels round them to the type of the tensors (bfloat16)."""
    quantised: NDArray[np.uint64] | None = None
    """The addresses of `QUANTISED` on the device, for those `next` that are weights which kernels quantise; 0 for the others."""

    @classmethod
    def of_tensors(
        cls,
        width: int,
        codes: NDArray[np.uint8],
        base: NDArray[np.uint64],
        count: Numbers,
        seed: NDArray[np.uint64],
    ) -> KernelTable:
        """Make the table of tensors that are each on their own, as in versions 1 and 2 of the format. There are no new elements."""
        return cls(width, base, np.zeros(base.size, np.uint64), count, seed, np.arange(1, base.size + 1), codes, OLD_BLOCK_TILES)

    @classmethod
    def of_groups(
        cls,
        width: int,
        groups: Sequence[tuple[int, int]],
        base: NDArray[np.uint64],
        count: Numbers,
        seed: NDArray[np.uint64],
        next: NDArray[np.uint64] | None = None,
        *,
        is_float32: NDArray[np.bool_] | None = None,
    ) -> KernelTable:
        """Make the table of groups, given the number of tensors and the type code of each group."""
        sizes, codes = zip(*groups, strict=True)
        nowhere = np.zeros(base.size, np.uint64)
        ends, types = np.cumsum(sizes, dtype=np.int64), np.array(codes, np.uint8)
        return cls(width, base, nowhere if next is None else next, count, seed, ends, types, block_tiles(width), is_float32)

    def __len__(self) -> int:
        return self.base.size

    @property
    def nbytes(self) -> int:
        return int(self.count.sum()) * self.width // 8

    @property
    def group_starts(self) -> Numbers:
        return np.append(0, self.group_ends[:-1])

    def rows(self, which: NDArray[np.bool_] | None = None) -> TensorRows:
        """Return the table as kernels read it. Tensors that are not chosen count as tensors without elements."""
        count = self.count if which is None else np.where(which, self.count, 0)
        tile_ends, element_ends = np.cumsum(-(-count // TILE)), np.cumsum(count)
        rows = np.zeros(len(self), TENSOR)
        rows["base"], rows["next"], rows["seed"], rows["count"] = self.base, self.next, self.seed, count
        rows["tile0"][1:], rows["element0"][1:] = tile_ends[:-1], element_ends[:-1]
        if self.is_float32 is not None:
            rows["is_float32"] = self.is_float32
        if self.quantised is not None:
            rows["quantised"] = self.quantised
        return TensorRows(rows, np.append(0, tile_ends), np.append(0, element_ends))

    def blocks(self, tensors: TensorRows) -> tuple[NDArray[np.void], Numbers]:
        """Return all blocks, and the number of each group's first block, followed by the number of all blocks."""
        first, end = tensors.tiles[self.group_starts], tensors.tiles[self.group_ends]
        each = -(-(end - first) // self.group_tiles)
        starts = np.append(0, np.cumsum(each))
        group = np.repeat(np.arange(each.size), each)
        blocks = np.zeros(group.size, RUN)
        blocks["tile0"] = first[group] + (np.arange(group.size) - starts[group]) * self.group_tiles
        blocks["tiles"] = np.minimum(end[group] - blocks["tile0"], self.group_tiles)
        self.set_coding(blocks, group)
        tensors.set_elements(blocks)
        return blocks, starts

    def set_coding(self, runs: NDArray[np.void], group: Numbers) -> None:
        """Set where elements of blocks or chunks have their exponents. `group` are the numbers of their groups."""
        codes = self.group_codes[group]
        runs["shift"], runs["mask"] = _SHIFTS[codes], _MASKS[codes]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A table of tensors as kernels read it, and where each tensor's tiles and elements begin, followed by the numbers of all of them."""

    rows: NDArray[np.void]
    tiles: Numbers
    elements: Numbers

    @property
    def ntiles(self) -> int:
        return int(self.tiles[-1])

    def elements_before(self, tiles: NDArray[Any]) -> Numbers:
        """Return the number of elements in all tiles before the given ones."""
        owner = np.searchsorted(self.tiles[1:], tiles, "right")
        return self.elements[owner] + (tiles - self.tiles[owner]) * TILE

    def set_elements(self, runs: NDArray[np.void]) -> None:
        """Set the number of elements of blocks or chunks that follow each other without gaps."""
        if runs.size:
            last = int(runs["tile0"][-1]) + int(runs["tiles"][-1])
            runs["elements"] = np.diff(self.elements_before(np.append(runs["tile0"].astype(np.int64), last)))


def storage_type(width: int) -> torch.dtype:
    """Return the torch type that kernels use for values of this width: bytes if two elements share a byte."""
    found: torch.dtype = getattr(torch, f"int{max(width, 8)}")
    return found

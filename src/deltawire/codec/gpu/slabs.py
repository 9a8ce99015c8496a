"""Which chunks are processed together as a slab, and the memory that a slab needs on the device. These are pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernel_table import CONTEXTS, Numbers
from .payloads import SLACK

Slab = tuple[int, int]
"""The number of the first chunk, and of the first one after the slab."""

_ALIGNMENT = 512


class Chunks:
    """All chunks of a delta, in order. `ends` are the running sums of their changes."""

    def __init__(self, runs: NDArray[Any], ends: Numbers, ntiles: int) -> None:
        self._starts = np.append(0, ends)
        self._bodies = runs["body"].astype(np.int64)
        self._body_ends = self._bodies + runs["bytes"].astype(np.int64)
        self._tiles = np.append(runs["tile0"], ntiles).astype(np.int64)

    def slabs(self, first: int, *, changes: int, window: int, wave: int) -> list[Slab]:
        """Cut the chunks from `first` on into slabs.

        A slab has at most `changes` changes and `window` bytes of payloads, unless it is a single chunk. If it has more than `wave` tiles,
        their number is a multiple of `wave`, as far as chunks allow.
        """
        count = self._bodies.size
        slabs = []
        while first < count:
            end = int(np.searchsorted(self._starts, self._starts[first] + changes, "right")) - 1
            end = max(min(end, int(np.searchsorted(self._body_ends, self._bodies[first] + window, "right"))), first + 1)
            tiles = int(self._tiles[end] - self._tiles[first])
            if tiles > wave and end < count:
                end = max(first + 1, int(np.searchsorted(self._tiles, self._tiles[first] + tiles // wave * wave, "right")) - 1)
            slabs.append((first, end))
            first = end
        return slabs

    def tiles(self, slab: Slab) -> tuple[int, int]:
        """Return the number of a slab's first tile, and of the first one after it."""
        return int(self._tiles[slab[0]]), int(self._tiles[slab[1]])

    def changes(self, slab: Slab) -> tuple[int, int]:
        """Return the number of a slab's first change, and of the first one after it."""
        return int(self._starts[slab[0]]), int(self._starts[slab[1]])

    def body(self, slab: Slab) -> tuple[int, int]:
        """Return the range of a slab's bodies in the image."""
        return int(self._bodies[slab[0]]), int(self._body_ends[slab[1] - 1])

    def lists(self, slabs: Sequence[Slab], itemsize: int, *, windows: bool) -> Lists:
        """Return the arrays that each of these slabs needs: ranks and operands of changes, starts of tiles, and optionally two windows."""
        changes, tiles, window = (
            max((end - begin for begin, end in map(bounds, slabs)), default=0) for bounds in (self.changes, self.tiles, self.body)
        )
        window = window + SLACK if windows else 0
        return Lists([4 * changes, itemsize * changes, 4 * CONTEXTS * tiles, window, window])


class Lists:
    """Arrays that follow each other in one allocation."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        self.size = self._ends[-1] + _ALIGNMENT

    def addresses(self, memory: int) -> list[int]:
        begin = -(-memory // _ALIGNMENT) * _ALIGNMENT
        return [begin + end for end in (0, *self._ends[:-1])]

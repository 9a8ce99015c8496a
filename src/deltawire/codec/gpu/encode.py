"""Encoding on the GPU, one slab of blocks at a time, so that memory stays bounded however much changes.

While the host reads the report of one slab, the device already works on the next. If the changes of a slab do not fit into memory, it is
done again in smaller parts. This is rare, because the size of a slab depends on the density of changes in earlier ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..base import Buffer, Encodings
from .device import Gpu
from .kernel_table import BLOCK, SUMS, TILE, UNIT, Bodies, Changes, KernelTable, number_tiles

_SHARE = 0.0082
"""The share of the weights' bytes that the list of changes may take. There is always room for one block whose elements all change."""

_PLAN_SHARE = 0.005
"""The share that the working memory of encoding thread blocks may take. Each processor has two of them, and at least one."""

_FULL = 0.93
"""The share of the list that a slab should fill, according to the density of the slab before it."""

_FIRST_SLAB = 4 * BLOCK
_MOST_SLAB = 1 << 31
"""Elements of the first slab, if no similar call was made before; and of any slab, because counters of changes have 32 bits."""

_learnt: dict[tuple[torch.device, int, int], int] = {}
"""The size of the last slab, by device, size of an element and length of the list."""

_SCAN_BLOCKS = 4
"""Thread blocks per processor."""

_GRANT = 1024
"""Slots of the list that a warp takes at a time."""


def encode_tensors(table: KernelTable, gpu: Gpu) -> Encodings:
    """Encode tensors of one width, on the current stream. When this returns, all bytes are in pinned host memory."""
    ranges = table.blocks()
    upto = np.concatenate([[0], np.cumsum(ranges["count"], dtype=np.int64)])
    work = _Workspace(table, gpu)
    pieces: list[memoryview] = []
    sizes = np.zeros(len(table), np.int64)

    def start(first: int, size: int) -> _Slab | None:
        if first == len(ranges):
            return None
        end = max(first + 1, int(np.searchsorted(upto, upto[first] + size, "right")) - 1)
        return work.start(first, end, ranges[first:end].copy())

    size = _learnt.get(work.kind, _FIRST_SLAB)
    slab = start(0, size)
    while slab is not None:
        work.plan(slab)
        following = start(slab.end, size)
        size = work.next_size(slab)
        if slab.fits:
            pieces.append(memoryview(work.join(slab).numpy()))  # its bytes are still being copied
            np.add.at(sizes, slab.ranges["tensor"], slab.sizes)
        elif slab.end - slab.first == 1:
            raise AssertionError("one block does not fit the workspace")
        else:
            work.sums.copy_(slab.sums_before)
            following = start(slab.first, size)
        slab = following
    _learnt[work.kind] = size
    sums = work.sums.cpu().numpy().view(SUMS).reshape(-1)
    work.copies.synchronize()
    changed = sums["changed"].astype(np.int64)
    unchanged = (changed == 0) & ~table.appears
    found = Encodings(
        _without(pieces, sizes, unchanged),
        np.where(unchanged, 0, sizes),
        changed,
        sums["before"],
        sums["before"] + sums["change"],
    )
    nothing = table.appears & (table.count == 0)
    if nothing.any():  # an added tensor without elements still has a payload: its type
        codes = [bytes([code]) if is_empty else b"" for code, is_empty in zip(table.codes.tolist(), nothing.tolist(), strict=True)]
        found = Encodings.of([row._replace(payload=[code] if code else row.payload) for row, code in zip(found, codes, strict=True)])
    return found


def _without(pieces: Sequence[memoryview], sizes: NDArray[np.int64], left_out: NDArray[np.bool_]) -> list[Buffer]:
    """Return the bytes of the tensors that are not left out. `pieces` have the bytes of all tensors, one after the other."""
    ends = np.cumsum(sizes)
    # The first and the end of each run of tensors that stay.
    bounds = np.flatnonzero(np.diff(left_out, prepend=True, append=True)).reshape(-1, 2)
    begins, stops = (ends - sizes)[bounds[:, 0]], ends[bounds[:, 1] - 1]
    kept: list[Buffer] = []
    at = 0
    for piece in pieces:
        runs = slice(np.searchsorted(stops, at, "right"), np.searchsorted(begins, at + len(piece)))
        for begin, stop in zip((begins[runs] - at).tolist(), (stops[runs] - at).tolist(), strict=True):
            kept.append(piece[max(begin, 0) : stop])
        at += len(piece)
    return kept


@dataclass(slots=True)
class _Slab:
    """Blocks `first` … `end`, which the device works on. `report` has the facts for the host after the event `reported`."""

    first: int
    end: int
    ranges: NDArray[np.void]
    ntiles: int
    on_device: torch.Tensor
    found: torch.Tensor | None
    """Facts of tiles that are needed until chunks are encoded: elements, counts, slots and sizes."""
    chunks: torch.Tensor
    """Three arrays of chunks by first tile: their facts, the list of chunks, and where their bytes end."""
    progress: torch.Tensor
    """The cursors of changes and of bodies, the numbers of chunks listed and taken, and then the bytes of each range."""
    changes: Changes
    sums_before: torch.Tensor
    report: torch.Tensor | None = None
    reported: torch.cuda.Event | None = None
    fits: bool = False
    nchunks: int = 0

    def address(self, word: int) -> ctypes.c_void_p:
        """Return the address of a word of `progress`."""
        return ctypes.c_void_p(self.progress.data_ptr() + 8 * word)

    def chunk_arrays(self) -> list[ctypes.c_void_p]:
        """Return the addresses of the arrays in `chunks`."""
        return [ctypes.c_void_p(self.chunks.data_ptr() + offset * self.ntiles) for offset in (0, 24, 28)]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each range."""
        assert self.report is not None
        sizes: NDArray[np.int64] = self.report.numpy()[4:]
        return sizes


class _Workspace:
    """Device memory that all slabs of one call share."""

    def __init__(self, table: KernelTable, gpu: Gpu) -> None:
        self.gpu = gpu
        self.kernels = gpu.kernels(table.width)
        self.width = table.itemsize
        self.next_is_float32 = table.next_is_float32
        scan_shared, self.plan_shared, scratch, masters_shared = self.kernels.constants("encode_sizes", 4)
        masters = table.next_is_float32
        self.scan, self.scan_shared = ("find_changes_of_masters", masters_shared) if masters else ("find_changes", scan_shared)
        elements, units, ntiles = (int((-(-table.count // size)).sum()) for size in (1, UNIT, TILE))
        # A unit never takes more slots than it has elements, so one block always fits.
        wanted = max(int(_SHARE * elements * self.width / (2 + 2 * self.width)), BLOCK)
        self.capacity = min(wanted, units * UNIT)
        self.kind = (gpu.device, self.width, self.capacity)
        affordable = int(_PLAN_SHARE * elements * self.width / scratch)
        self.encode_blocks = min(max(affordable, gpu.processors), 2 * gpu.processors, ntiles)
        self.ranks = gpu.empty(self.capacity, torch.int16)
        self.pairs = gpu.empty(self.capacity * 2 * self.width, torch.uint8)
        self.scratch = gpu.empty(self.encode_blocks * scratch, torch.uint8)
        # A body is shorter than the elements of its chunk; with each rounded up, the bodies of one block always fit.
        self.body_words = max(self.capacity // 4, min(elements, BLOCK) * self.width // 4 + 4 * min(ntiles, BLOCK // TILE) + 16)
        self.bodies = gpu.zeros(self.body_words, torch.int32)
        self.used = 0
        self.sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
        self.codes = gpu.upload(table.codes)
        self.copies = gpu.stream("copies")

    def start(self, first: int, end: int, ranges: NDArray[np.void]) -> _Slab:
        """Start to find the changes of blocks and to cut the blocks into chunks."""
        ntiles = number_tiles(ranges)
        on_device = self.gpu.upload(ranges)
        found, chunks = self.gpu.empty(ntiles * 160, torch.uint8), self.gpu.empty(ntiles * 32, torch.uint8)
        progress = self.gpu.zeros(4 + len(ranges), torch.int64)
        elements, counts, slots, sizes = (found.data_ptr() + offset * ntiles for offset in (0, 32, 64, 128))
        changes = Changes(slots, sizes, counts, self.ranks.data_ptr(), self.pairs.data_ptr(), self.capacity, progress.data_ptr())
        slab = _Slab(first, end, ranges, ntiles, on_device, found, chunks, progress, changes, self.sums.clone())
        facts, work, _ = slab.chunk_arrays()
        nranges, tiles, pointer = ctypes.c_uint32(len(ranges)), ctypes.c_uint32(ntiles), ctypes.c_void_p
        launch = self.kernels.launch
        launch("choose_tops", len(ranges), 256, [on_device])
        arguments = [on_device, nranges, tiles, pointer(elements), changes, self.sums]
        launch(self.scan, self._scan_blocks(ntiles), 128, arguments, self.scan_shared)
        launch("cut_chunks", len(ranges), 256, [on_device, pointer(counts), facts, work, slab.address(2)])
        return slab

    def plan(self, slab: _Slab) -> None:
        """Start to encode all chunks, in any order, and to copy the report to the host."""
        assert slab.found is not None
        self.bodies[: self.used].zero_()
        bodies = Bodies(self.bodies.data_ptr(), self.body_words, slab.address(1))
        facts, work, ends = slab.chunk_arrays()
        arguments = [slab.on_device, facts, work, slab.address(2), slab.address(3), slab.found, slab.changes, self.scratch, bodies]
        self.kernels.launch("encode_chunks", min(self.encode_blocks, slab.ntiles), 512, arguments, self.plan_shared)
        self.kernels.launch("measure_chunks", len(slab.ranges), 256, [slab.on_device, facts, ends, slab.address(4), slab.changes])
        slab.found = None  # the next slab may use this memory
        slab.report = self.gpu.pinned(slab.progress.numel(), torch.int64)
        slab.report.copy_(slab.progress, non_blocking=True)
        slab.reported = self.gpu.mark()

    def next_size(self, slab: _Slab) -> int:
        """Wait for the report of a slab, and return how many elements the next slab should have."""
        assert slab.report is not None
        assert slab.reported is not None
        slab.reported.synchronize()
        listed, words, chunks = (int(number) for number in slab.report[:3])
        slab.nchunks = chunks
        slab.fits = listed <= self.capacity and words <= self.body_words
        self.used = min(words, self.body_words)
        elements = int(slab.ranges["count"].sum(dtype=np.int64))
        # Each warp leaves a part of its last grant empty: half of it on average, and all of it in the worst case.
        lost = _GRANT * 4 * self._scan_blocks(slab.ntiles)
        density = max(listed - lost // 2, listed // 4, 1) / elements
        room = max(_FULL * self.capacity - lost, self.capacity / 4)
        size = min(room / density, elements * _FULL * self.body_words / max(words, 1))
        # One block always fits. As many elements in small tensors may not fit, because their last units leave much of their grants empty.
        return min(max(int(size), BLOCK if slab.fits else 1), _MOST_SLAB)

    def join(self, slab: _Slab) -> torch.Tensor:
        """Start to put the chunks in order and to copy them to the host."""
        size = int(slab.sizes.sum())
        out = self.gpu.empty(size, torch.uint8)
        facts, work, ends = slab.chunk_arrays()
        range_ends = slab.progress[4:].cumsum(0)
        arguments = [
            slab.on_device,
            facts,
            work,
            slab.address(2),
            ends,
            range_ends,
            self.bodies,
            self.codes,
            ctypes.c_uint32(self.next_is_float32),
            out,
        ]
        self.kernels.launch("join_chunks", min(slab.nchunks, 16 * self.gpu.processors), 128, arguments)
        host = self.gpu.pinned(size)
        self.copies.wait_stream(self.gpu.current())
        with self.gpu.using(self.copies):
            host.copy_(out, non_blocking=True)
        self.gpu.keep(out, self.copies)
        return host

    def _scan_blocks(self, ntiles: int) -> int:
        return int(min(_SCAN_BLOCKS * self.gpu.processors, -(-ntiles // 4)))

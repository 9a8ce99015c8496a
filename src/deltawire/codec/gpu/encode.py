"""Encode on the GPU: slabs of whole blocks, so that memory stays bounded however much changes.

While the host looks at what one slab came to, the device is already at the next. A slab whose changes turn out not to fit is done again,
in smaller parts; sizes go by what was found before, so that this is rare.
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
from .kernel_table import BLOCK, SUMS, TILE, UNIT, Bodies, Changes, KernelTable, place_tiles

_SHARE = 0.0082
"""Share of the weights' bytes that the list of changes may take. There is always room for one block, all of it changed."""

_PLAN_SHARE = 0.005
"""Share that the working memory of thread blocks which encode chunks may take: two on each processor, but one at least."""

_FULL = 0.93
"""How much of the list a slab is meant to fill, going by the slab before it."""

_FIRST_SLAB = 4 * BLOCK
_MOST_SLAB = 1 << 31
"""Elements of a slab: the first, if there was no call like it to learn density from; and at most, as counters of changes have 32 bits."""

_learnt: dict[tuple[torch.device, int, int], int] = {}
"""How many elements were taken last, by device, size of an element and length of the list."""

_SCAN_BLOCKS = 4
"""Thread blocks per processor."""

_GRANT = 1024
"""Slots of the list that a warp of the scan takes at a time."""


def encode_tensors(table: KernelTable, gpu: Gpu) -> Encodings:
    """Encode tensors of one width, on the current stream. Returns when all bytes are on the host, in pinned memory."""
    spans = table.blocks()
    upto = np.concatenate([[0], np.cumsum(spans["count"], dtype=np.int64)])
    work = _Workspace(table, gpu)
    pieces: list[memoryview] = []
    sizes = np.zeros(len(table), np.int64)

    def start(first: int, size: int) -> _Slab | None:
        if first == len(spans):
            return None
        end = max(first + 1, int(np.searchsorted(upto, upto[first] + size, "right")) - 1)
        return work.start(first, end, spans[first:end].copy())

    size = _learnt.get(work.kind, _FIRST_SLAB)
    slab = start(0, size)
    while slab is not None:
        work.plan(slab)
        following = start(slab.end, size)
        size = work.next_size(slab)
        if slab.fits:
            pieces.append(memoryview(work.join(slab).numpy()))  # its bytes are on their way
            np.add.at(sizes, slab.spans["tensor"], slab.sizes)
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
        _without(pieces, sizes, unchanged), np.where(unchanged, 0, sizes), changed, sums["before"], sums["before"] + sums["change"]
    )
    nothing = table.appears & (table.count == 0)
    if nothing.any():  # what appears without elements has a payload all the same: its type
        codes = [bytes([code]) if is_empty else b"" for code, is_empty in zip(table.codes.tolist(), nothing.tolist(), strict=True)]
        found = Encodings.of([row._replace(payload=[code] if code else row.payload) for row, code in zip(found, codes, strict=True)])
    return found


def _without(pieces: Sequence[memoryview], sizes: NDArray[np.int64], left_out: NDArray[np.bool_]) -> list[Buffer]:
    """What tensors have in these pieces, one after the other, less some of them."""
    ends = np.cumsum(sizes)
    bounds = np.flatnonzero(np.diff(left_out, prepend=True, append=True)).reshape(-1, 2)  # of tensors in a row that stay: first and end
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
    """Blocks `first` … `end` on their way. What the host is told stands in `report` once `reported` has come."""

    first: int
    end: int
    spans: NDArray[np.void]
    ntiles: int
    on_device: torch.Tensor
    found: torch.Tensor | None
    """What is known of tiles until chunks are encoded: elements, counts, slots and sizes."""
    chunks: torch.Tensor
    """By first tile: facts, which of them there are, and where their bytes end."""
    progress: torch.Tensor
    """Cursors of changes and of bodies; chunks listed, chunks taken; then how many bytes each span comes to."""
    changes: Changes
    sums_before: torch.Tensor
    report: torch.Tensor | None = None
    reported: torch.cuda.Event | None = None
    fits: bool = False
    nchunks: int = 0

    def address(self, word: int) -> ctypes.c_void_p:
        """Of a word of `progress`."""
        return ctypes.c_void_p(self.progress.data_ptr() + 8 * word)

    def chunk_arrays(self) -> list[ctypes.c_void_p]:
        """Addresses of the arrays in `chunks`."""
        return [ctypes.c_void_p(self.chunks.data_ptr() + place * self.ntiles) for place in (0, 24, 28)]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each span."""
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

    def start(self, first: int, end: int, spans: NDArray[np.void]) -> _Slab:
        """Find the changes and cut them into chunks."""
        ntiles = place_tiles(spans)
        on_device = self.gpu.upload(spans)
        found, chunks = self.gpu.empty(ntiles * 160, torch.uint8), self.gpu.empty(ntiles * 32, torch.uint8)
        progress = self.gpu.zeros(4 + len(spans), torch.int64)
        elements, counts, slots, sizes = (found.data_ptr() + place * ntiles for place in (0, 32, 64, 128))
        changes = Changes(slots, sizes, counts, self.ranks.data_ptr(), self.pairs.data_ptr(), self.capacity, progress.data_ptr())
        slab = _Slab(first, end, spans, ntiles, on_device, found, chunks, progress, changes, self.sums.clone())
        facts, work, _ = slab.chunk_arrays()
        nspans, tiles, pointer = ctypes.c_uint32(len(spans)), ctypes.c_uint32(ntiles), ctypes.c_void_p
        launch = self.kernels.launch
        launch("choose_tops", len(spans), 256, [on_device])
        arguments = [on_device, nspans, tiles, pointer(elements), changes, self.sums]
        launch(self.scan, self._scan_blocks(ntiles), 128, arguments, self.scan_shared)
        launch("cut_chunks", len(spans), 256, [on_device, pointer(counts), facts, work, slab.address(2)])
        return slab

    def plan(self, slab: _Slab) -> None:
        """Encode all chunks, to wherever there is room, and start to tell the host what came of it."""
        assert slab.found is not None
        self.bodies[: self.used].zero_()
        bodies = Bodies(self.bodies.data_ptr(), self.body_words, slab.address(1))
        facts, work, ends = slab.chunk_arrays()
        arguments = [slab.on_device, facts, work, slab.address(2), slab.address(3), slab.found, slab.changes, self.scratch, bodies]
        self.kernels.launch("encode_chunks", min(self.encode_blocks, slab.ntiles), 512, arguments, self.plan_shared)
        self.kernels.launch("measure_chunks", len(slab.spans), 256, [slab.on_device, facts, ends, slab.address(4), slab.changes])
        slab.found = None  # the next slab has it after this one
        slab.report = self.gpu.pinned(slab.progress.numel(), torch.int64)
        slab.report.copy_(slab.progress, non_blocking=True)
        slab.reported = self.gpu.mark()

    def next_size(self, slab: _Slab) -> int:
        """Wait for the report of a slab, and say how many elements to take next."""
        assert slab.report is not None
        assert slab.reported is not None
        slab.reported.synchronize()
        listed, words, chunks = (int(number) for number in slab.report[:3])
        slab.nchunks = chunks
        slab.fits = listed <= self.capacity and words <= self.body_words
        self.used = min(words, self.body_words)
        elements = int(slab.spans["count"].sum(dtype=np.int64))
        # Each warp leaves a part of its last grant empty: half of it, or in the worst case all.
        lost = _GRANT * 4 * self._scan_blocks(slab.ntiles)
        density = max(listed - lost // 2, listed // 4, 1) / elements
        room = max(_FULL * self.capacity - lost, self.capacity / 4)
        size = min(room / density, elements * _FULL * self.body_words / max(words, 1))
        # One block always fits, but not so many elements in tensors whose last units leave much of their grants empty.
        return min(max(int(size), BLOCK if slab.fits else 1), _MOST_SLAB)

    def join(self, slab: _Slab) -> torch.Tensor:
        """Put the chunks in order and start their way to the host."""
        size = int(slab.sizes.sum())
        out = self.gpu.empty(size, torch.uint8)
        facts, work, ends = slab.chunk_arrays()
        span_ends = slab.progress[4:].cumsum(0)
        arguments = [
            slab.on_device,
            facts,
            work,
            slab.address(2),
            ends,
            span_ends,
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

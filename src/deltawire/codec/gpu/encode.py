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

from ..base import Buffer
from .device import Gpu
from .kernel_table import SUMS, UNIT, Bodies, Changes, KernelTable, Numbers, SlabTensors, TensorRows, Tiles, storage_type

_SHARE, _NARROW_SHARE = 0.0082, 0.0055
"""The share of the weights' bytes that the list of changes may take; the second one if elements have at most 8 bits, because then all that
is kept for each tile takes a larger share."""

_LEAST_LIST = 1 << 22
"""The least number of changes that the list has room for. The list becomes longer if a single block has more."""

_LEAST_BODIES = 1 << 19
"""The least number of words for encoded bodies. There is more room if a single block needs it."""

_PLAN_SHARE = 0.005
"""The share that the working memory of encoding thread blocks may take. Each processor has two of them, and at least one. Few 4-bit
elements change, so half as many are enough."""

_LEAST_PER_BLOCK = 1 << 16
"""Few elements, such as scales, get one encoding thread block for this many of them: they are encoded while other elements are."""

_FULL = 0.93
"""The share of the list that a slab should fill, according to the density of the slab before it."""

_FIRST_SLAB = 1 << 26
_MOST_SLAB = 1 << 31
"""Elements of the first slab, if no similar call was made before; and of any slab, because counters of changes have 32 bits. A slab of
4-bit elements has at most half as many, because what is kept for each tile takes a large share of them."""

_learnt: dict[tuple[torch.device, int, int], int] = {}
"""The size of the last slab, by device, width of an element and length of the list."""

_SCAN_THREADS = 128
_MOST_SCAN_BLOCKS = 4
"""The most thread blocks per processor. A processor gets as many as it runs at the same time, because others would run alone at the end."""

_GRANT = 1024
"""Slots of the list that a warp takes at a time."""


@dataclass(slots=True)
class EncodedBlocks:
    """The chunks of blocks, one block after the other. All bytes are in pinned host memory."""

    pieces: list[memoryview]
    sizes: Numbers
    """The bytes of each block."""
    unchanged: Numbers
    """How many of these bytes, at the end of the block, are a chunk that changes nothing."""
    sums: NDArray[np.void]
    """`SUMS` of all tensors, over the elements of these blocks."""

    def cut(self, ranges: Sequence[tuple[int, int]]) -> list[list[Buffer]]:
        """Return ranges of the bytes, ascending, as pieces of host memory."""
        found: list[list[Buffer]] = []
        at = number = 0  # the piece that the next range begins in, and where it begins
        for begin, end in ranges:
            parts: list[Buffer] = []
            while begin < end:
                while begin >= at + len(self.pieces[number]):
                    at, number = at + len(self.pieces[number]), number + 1
                parts.append(self.pieces[number][begin - at : end - at])
                begin += len(parts[-1])
            found.append(parts)
        return found


def encode_blocks(table: KernelTable, tensors: TensorRows, blocks: NDArray[np.void], gpu: Gpu) -> EncodedBlocks:
    """Encode blocks, which follow each other, on the current stream. When this returns, all bytes are in pinned host memory.

    Kernels must be able to read all tensors that have elements in these blocks.
    """
    if not blocks.size:
        return EncodedBlocks([], np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(len(table), SUMS))
    upto = np.append(0, np.cumsum(blocks["elements"], dtype=np.int64))
    work = _Workspace(table, tensors, int(upto[-1]), int(blocks["tiles"].sum(dtype=np.int64)), gpu)
    pieces: list[memoryview] = []
    facts: list[NDArray[np.int64]] = []

    def start(first: int, size: int) -> _Slab | None:
        if first == len(blocks):
            return None
        end = max(first + 1, int(np.searchsorted(upto, upto[first] + size, "right")) - 1)
        return work.start(first, end, blocks[first:end])

    size = _learnt.get(work.kind, _FIRST_SLAB)
    slab = start(0, size)
    while slab is not None:
        work.plan(slab)
        following = start(slab.end, size)
        size = work.next_size(slab)
        if slab.fits:
            pieces.append(memoryview(work.join(slab).numpy()))  # its bytes are still being copied
            facts.append(slab.facts)
        else:
            if slab.end - slab.first == 1:
                work.grow(slab)
            work.sums.copy_(slab.sums_before)
            following = start(slab.first, size)
        slab = following
    _learnt[work.kind] = size
    sums = work.sums.cpu().numpy().view(SUMS).reshape(-1)
    work.copies.synchronize()
    sizes, unchanged = np.concatenate(facts, axis=1)
    return EncodedBlocks(pieces, sizes, unchanged, sums)


@dataclass(slots=True)
class _Slab:
    """Blocks `first` … `end`, which the device works on. `report` has the facts for the host after the event `reported`."""

    first: int
    end: int
    blocks: NDArray[np.void]
    first_tile: int
    ntiles: int
    on_device: torch.Tensor
    """The blocks."""
    found: torch.Tensor | None
    """Elements and changes by context, slots and numbers of changes of every unit. Each is an array over all tiles."""
    chunks: torch.Tensor
    """The facts of all chunks, the list of chunks to encode, and where they end. Each is an array over all tiles."""
    progress: torch.Tensor
    """Slots of the list and words of bodies that are taken, the number of chunks, the number of the next one to encode; then the sizes
    of all blocks, and the sizes of chunks at their ends that change nothing."""
    changes: Changes
    sums_before: torch.Tensor
    report: torch.Tensor | None = None
    reported: torch.cuda.Event | None = None
    nchunks: int = 0
    words: int = 0
    listed: int = 0
    fits: bool = False

    def address(self, word: int) -> ctypes.c_void_p:
        """Return the address of a number in `progress`."""
        return ctypes.c_void_p(self.progress.data_ptr() + 8 * word)

    def chunk_arrays(self) -> list[ctypes.c_void_p]:
        """Return the addresses of the arrays in `chunks`."""
        return [ctypes.c_void_p(self.chunks.data_ptr() + offset * self.ntiles) for offset in (0, 24, 28)]

    @property
    def facts(self) -> NDArray[np.int64]:
        """The bytes of each block, and of the chunk at its end if that changes nothing."""
        assert self.report is not None
        found: NDArray[np.int64] = self.report.numpy()[4:].reshape(2, -1)
        return found


class _Workspace:
    """Device memory that all slabs of one call share."""

    def __init__(self, table: KernelTable, tensors: TensorRows, elements: int, ntiles: int, gpu: Gpu) -> None:
        self.gpu = gpu
        self.kernels = gpu.kernels(table.width)
        self.tensors, self.ntensors = gpu.upload(tensors.rows), len(table)
        scan_shared, self.plan_shared, scratch, masters_shared, self.contexts = self.kernels.constants("encode_sizes", 5)
        masters = (table.is_float32 is not None and bool(table.is_float32.any())) or table.quantised is not None
        self.scan, self.scan_shared = ("find_changes_of_masters", masters_shared) if masters else ("find_changes", scan_shared)
        resident = self.kernels.resident_blocks(self.scan, _SCAN_THREADS, self.scan_shared)
        self.scan_blocks = min(resident, _MOST_SCAN_BLOCKS) * gpu.processors
        nbytes = elements * table.width // 8
        self.value_size = storage_type(table.width).itemsize
        # A unit never takes more slots than a grant has.
        share = _SHARE if table.width > 8 else _NARROW_SHARE
        wanted = max(int(share * nbytes / (2 + 2 * self.value_size)), _LEAST_LIST)
        self.capacity = min(wanted, (-(-elements // UNIT) + ntiles) * UNIT)
        self.kind = (gpu.device, table.width, self.capacity)
        affordable = int(_PLAN_SHARE * nbytes / scratch)
        least, self.most_slab = (gpu.processors, _MOST_SLAB) if table.width > 4 else (max(gpu.processors // 2, 1), _MOST_SLAB // 2)
        self.encode_blocks = min(max(affordable, least), 2 * gpu.processors, ntiles, max(1, elements // _LEAST_PER_BLOCK))
        self.scratch = gpu.empty(self.encode_blocks * scratch, torch.uint8)
        self._new_list()
        # A body is shorter than the elements of its chunk, but is rounded up.
        self.body_words = min(max(self.capacity // 4, _LEAST_BODIES), nbytes // 4 + 4 * ntiles + 16)
        self.bodies = gpu.zeros(self.body_words, torch.int32)
        self.used = 0
        self.sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
        self.copies = gpu.stream("copies")

    def _new_list(self) -> None:
        self.ranks = self.gpu.empty(self.capacity, torch.int16)
        self.pairs = self.gpu.empty(self.capacity * 2 * self.value_size, torch.uint8)

    def start(self, first: int, end: int, blocks: NDArray[np.void]) -> _Slab:
        """Start to find the changes of blocks and to cut the blocks into chunks."""
        first_tile = int(blocks["tile0"][0])
        ntiles = int(blocks["tile0"][-1]) + int(blocks["tiles"][-1]) - first_tile
        on_device = self.gpu.upload(blocks)
        arrays = (0, 2 * self.contexts, 4 * self.contexts, 4 * self.contexts + 64)
        found, chunks = self.gpu.empty(ntiles * (arrays[-1] + 32), torch.uint8), self.gpu.empty(ntiles * 32, torch.uint8)
        progress = self.gpu.zeros(4 + 2 * len(blocks), torch.int64)
        elements, counts, slots, sizes = (found.data_ptr() + offset * ntiles for offset in arrays)
        changes = Changes(slots, sizes, counts, self.ranks.data_ptr(), self.pairs.data_ptr(), self.capacity, progress.data_ptr())
        slab = _Slab(first, end, blocks, first_tile, ntiles, on_device, found, chunks, progress, changes, self.sums.clone())
        facts, work, _ = slab.chunk_arrays()
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        tiles = Tiles(self.tensors.data_ptr(), on_device.data_ptr(), self.ntensors, len(blocks), first_tile, first_tile + ntiles)
        launch = self.kernels.launch
        launch("choose_tops", len(blocks), 256, [self.tensors, number(self.ntensors), on_device])
        launch(self.scan, self._scan_blocks(ntiles), _SCAN_THREADS, [tiles, pointer(elements), changes, self.sums], self.scan_shared)
        launch("cut_chunks", len(blocks), 256, [on_device, number(first_tile), pointer(counts), facts, work, slab.address(2)])
        return slab

    def plan(self, slab: _Slab) -> None:
        """Start to encode all chunks, in any order, and to copy the report to the host."""
        assert slab.found is not None
        self.bodies[: self.used].zero_()
        bodies = Bodies(self.bodies.data_ptr(), self.body_words, slab.address(1))
        facts, work, ends = slab.chunk_arrays()
        lists = [facts, work, slab.address(2), slab.address(3)]
        arguments = [self._tensors_of(slab), slab.on_device, *lists, slab.found, slab.changes, self.scratch, bodies]
        self.kernels.launch("encode_chunks", min(self.encode_blocks, slab.ntiles), 512, arguments, self.plan_shared)
        totals, unchanged = slab.address(4), slab.address(4 + len(slab.blocks))
        arguments = [slab.on_device, ctypes.c_uint32(slab.first_tile), facts, ends, totals, unchanged, slab.changes]
        self.kernels.launch("measure_chunks", len(slab.blocks), 256, arguments)
        slab.found = None  # the next slab may use this memory
        slab.report = self.gpu.pinned(slab.progress.numel(), torch.int64)
        slab.report.copy_(slab.progress, non_blocking=True)
        slab.reported = self.gpu.mark()

    def next_size(self, slab: _Slab) -> int:
        """Wait for the report of a slab, and return how many elements the next slab should have."""
        assert slab.report is not None
        assert slab.reported is not None
        slab.reported.synchronize()
        slab.listed, slab.words, slab.nchunks = (int(number) for number in slab.report[:3])
        slab.fits = slab.listed <= self.capacity and slab.words <= self.body_words
        self.used = min(slab.words, self.body_words)
        elements = int(slab.blocks["elements"].sum(dtype=np.int64))
        # Each warp leaves a part of its last grant empty: half of it on average, and all of it in the worst case.
        lost = _GRANT * 4 * self._scan_blocks(slab.ntiles)
        density = max(slab.listed - lost // 2, slab.listed // 4, 1) / elements
        room = max(_FULL * self.capacity - lost, self.capacity / 4)
        size = min(room / density, elements * _FULL * self.body_words / max(slab.words, 1))
        return min(max(int(size), 1), self.most_slab)

    def grow(self, slab: _Slab) -> None:
        """Make room for a slab that is a single block and does not fit."""
        if slab.listed > self.capacity:
            self.capacity = slab.listed
            self._new_list()
        if slab.words > self.body_words:
            self.body_words = slab.words
            self.bodies = self.gpu.zeros(self.body_words, torch.int32)

    def join(self, slab: _Slab) -> torch.Tensor:
        """Start to put the chunks in order and to copy them to the host."""
        size = int(slab.facts[0].sum())
        out = self.gpu.empty(size, torch.uint8)
        facts, work, ends = slab.chunk_arrays()
        block_ends = slab.progress[4 : 4 + len(slab.blocks)].cumsum(0)
        arguments = [self._tensors_of(slab), facts, work, slab.address(2), ends, block_ends, self.bodies, out]
        self.kernels.launch("join_chunks", min(slab.nchunks, 16 * self.gpu.processors), 128, arguments)
        host = self.gpu.pinned(size)
        self.copies.wait_stream(self.gpu.current())
        with self.gpu.using(self.copies):
            host.copy_(out, non_blocking=True)
        self.gpu.keep(out, self.copies)
        return host

    def _tensors_of(self, slab: _Slab) -> SlabTensors:
        return SlabTensors(self.tensors.data_ptr(), self.ntensors, slab.first_tile)

    def _scan_blocks(self, ntiles: int) -> int:
        return int(min(self.scan_blocks, -(-ntiles // 4)))

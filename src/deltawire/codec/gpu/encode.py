"""Encoding on the GPU, one slab of blocks at a time, so that memory stays bounded however much changes.

While the host reads the report of one slab, the device already works on the next, which may have elements of another width. If the changes
of a slab do not fit into memory, it is done again in smaller parts. This is rare, because the size of a slab depends on the density of
changes in earlier ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
"""Few elements, such as scales, get one encoding thread block for this many of them."""

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
"""Entries of the list that a warp takes at a time."""

_ALIGNMENT = 16


class EncodedBlocks:
    """The known facts about the blocks of a table that are encoded already. Blocks are encoded in order.

    Parameters
    ----------
    tensors
        The number of tensors.
    blocks
        The number of blocks.
    """

    def __init__(self, tensors: int, blocks: int) -> None:
        self.done = 0
        """The number of blocks that are encoded."""
        self.sums = np.zeros(tensors, SUMS)
        """`SUMS` of all tensors, over the elements of these blocks."""
        self._ends = np.zeros(blocks + 1, np.int64)
        """Where each block ends in the bytes of all blocks, after a 0."""
        self._unchanged = np.zeros(blocks, np.int64)
        """How many bytes, at the end of each block, are a chunk that changes nothing."""
        self._pieces: list[memoryview] = []
        self._starts: list[int] = []
        """Where each piece begins in the bytes of all blocks."""

    def add(self, piece: memoryview, sizes: Numbers, unchanged: Numbers) -> None:
        """Add the bytes of the next blocks, which are in pinned host memory."""
        first, end = self.done, self.done + sizes.size
        self._pieces.append(piece)
        self._starts.append(int(self._ends[first]))
        self._ends[first + 1 : end + 1] = self._ends[first] + np.cumsum(sizes)
        self._unchanged[first:end] = unchanged
        self.done = end

    def payload(self, first: int, end: int) -> list[Buffer]:
        """Return the payload of a group, whose blocks these are, as pieces of host memory. Chunks after its last change are left out."""
        sizes = np.diff(self._ends[first : end + 1])
        changes = np.flatnonzero(sizes > self._unchanged[first:end])
        if not changes.size:
            return []
        last = first + int(changes[-1])
        begin, stop = int(self._ends[first]), int(self._ends[last + 1] - self._unchanged[last])
        found: list[Buffer] = []
        for start, piece in zip(self._starts, self._pieces, strict=True):
            if start < stop and begin < start + len(piece):
                found.append(piece[max(begin - start, 0) : stop - start])
        return found


@dataclass(frozen=True, slots=True)
class BlockJob:
    """Blocks of a table to encode, which follow those that `encoded` has already. Kernels must be able to read all of their tensors."""

    table: KernelTable
    tensors: TensorRows
    blocks: NDArray[np.void]
    encoded: EncodedBlocks


def encode_blocks(jobs: Sequence[BlockJob], gpu: Gpu, advanced: Callable[[], None] = lambda: None) -> None:
    """Encode the blocks of jobs, one job after the other, on the current stream. When this returns, all bytes are in pinned host memory.

    `advanced` is called when more blocks are encoded, while the device encodes the next ones. It must not use the device.
    """
    works = [_Workspace(job, gpu) for job in jobs if job.blocks.size]
    if not works:
        return
    memory = _SlabMemory(works, gpu)
    joined: _Joined | None = None
    slab: _Slab | None = works[0].start(0, memory)
    while slab is not None:
        work = slab.work
        work.plan(slab, memory)
        following = _start_following(works, slab, memory)
        if joined is not None:
            joined.finish()
            advanced()
            joined = None
        work.read_report(slab, memory)
        if slab.fits:
            joined = work.join(slab, memory)
        else:
            if slab.end - slab.first == 1:
                work.grow(slab, memory)
            for undone in (following, slab):
                if undone is not None:
                    undone.work.sums.copy_(undone.sums_before)
            following = work.start(slab.first, memory)
        slab = following
    if joined is not None:
        joined.finish()
        advanced()
    _learnt.update((work.kind, work.size) for work in works)


def _start_following(works: Sequence[_Workspace], slab: _Slab, memory: _SlabMemory) -> _Slab | None:
    """Start the slab after this one, which may belong to the next job; None if there is none."""
    if slab.end < len(slab.work.blocks):
        return slab.work.start(slab.end, memory)
    number = works.index(slab.work) + 1
    return works[number].start(0, memory) if number < len(works) else None


@dataclass(slots=True)
class _Slab:
    """Blocks `first` … `end` of a job, which the device works on. `report` has the facts for the host after the event `reported`."""

    work: _Workspace
    first: int
    end: int
    blocks: NDArray[np.void]
    first_tile: int
    ntiles: int
    on_device: torch.Tensor
    """The blocks."""
    found: torch.Tensor | None
    """Elements and changes by context; of every unit, where its changes begin and how many it has. Each is an array over all tiles."""
    chunks: torch.Tensor
    """The facts of all chunks, the list of chunks to encode, and where they end. Each is an array over all tiles."""
    progress: torch.Tensor
    """Entries of the list and words of bodies that are taken, the number of chunks, the number of the next one to encode; then the sizes
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
        found: NDArray[np.int64] = self.report.numpy()[4 : 4 + 2 * len(self.blocks)].reshape(2, -1)
        return found


@dataclass(frozen=True, slots=True)
class _Joined:
    """A slab whose bytes and sums are being copied to the host, until the event `copied`."""

    encoded: EncodedBlocks
    facts: NDArray[np.int64]
    bytes: torch.Tensor
    rows: slice
    """The tensors that have elements in the slab, or in earlier ones, and their sums so far."""
    sums: torch.Tensor
    copied: torch.cuda.Event

    def finish(self) -> None:
        """Wait for the copies, and add the blocks to those that are encoded."""
        self.copied.synchronize()
        self.encoded.sums[self.rows] = self.sums.numpy().view(SUMS)
        self.encoded.add(memoryview(self.bytes.numpy()), *self.facts)


class _SlabMemory:
    """Device memory that all slabs of a call use, one after the other: the list of changes, encoded bodies, and what thread blocks need."""

    def __init__(self, works: Sequence[_Workspace], gpu: Gpu) -> None:
        self.gpu = gpu
        self.copies = gpu.stream("copies")
        largest = max(works, key=lambda work: work.nbytes)
        self.scratch = gpu.empty(max(largest.encode_blocks * largest.scratch, *(work.scratch for work in works)), torch.uint8)
        for work in works:  # more memory for few wide elements would exceed the share of all weights
            work.encode_blocks = min(work.encode_blocks, self.scratch.numel() // work.scratch)
        self.list = gpu.empty(max(work.list_bytes for work in works), torch.uint8)
        self.bodies = gpu.zeros(max(work.body_words for work in works), torch.int32)
        self.used = 0
        """The words of bodies that the slab before has written."""

    def grow(self, list_bytes: int, body_words: int) -> None:
        """Make room for a list and bodies of these sizes."""
        if list_bytes > self.list.numel():
            self.list = self.gpu.empty(list_bytes, torch.uint8)
        if body_words > self.bodies.numel():
            self.bodies = self.gpu.zeros(body_words, torch.int32)


class _Workspace:
    """The facts of a job that the device has: its tensors, and how its blocks are cut into slabs."""

    def __init__(self, job: BlockJob, gpu: Gpu) -> None:
        table, self.blocks, self._encoded = job.table, job.blocks, job.encoded
        self._gpu = gpu
        self._kernels = gpu.kernels(table.width)
        self._tiles = job.tensors.tiles
        self._tensors, self._ntensors = gpu.upload(job.tensors.rows), len(table)
        self._upto = np.append(0, np.cumsum(job.blocks["elements"], dtype=np.int64))
        elements, ntiles = int(self._upto[-1]), int(job.blocks["tiles"].sum(dtype=np.int64))
        scan_shared, self._plan_shared, self.scratch, masters_shared, self._contexts = self._kernels.constants("encode_sizes", 5)
        masters = (table.is_float32 is not None and bool(table.is_float32.any())) or table.quantised is not None
        self._scan, self._scan_shared = ("find_changes_of_masters", masters_shared) if masters else ("find_changes", scan_shared)
        resident = self._kernels.resident_blocks(self._scan, _SCAN_THREADS, self._scan_shared)
        self._scan_blocks = min(resident, _MOST_SCAN_BLOCKS) * gpu.processors
        self.nbytes = elements * table.width // 8
        self._value_size: int = storage_type(table.width).itemsize
        # A unit never takes more entries than a grant has.
        share = _SHARE if table.width > 8 else _NARROW_SHARE
        wanted = max(int(share * self.nbytes / (2 + 2 * self._value_size)), _LEAST_LIST)
        self._capacity = min(wanted, (-(-elements // UNIT) + ntiles) * UNIT)
        self.kind = (gpu.device, table.width, self._capacity)
        self.size = _learnt.get(self.kind, _FIRST_SLAB)
        """The number of elements that the next slab should have."""
        affordable = int(_PLAN_SHARE * self.nbytes / self.scratch)
        least, self._most_slab = (gpu.processors, _MOST_SLAB) if table.width > 4 else (max(gpu.processors // 2, 1), _MOST_SLAB // 2)
        self.encode_blocks = min(max(affordable, least), 2 * gpu.processors, ntiles, max(1, elements // _LEAST_PER_BLOCK))
        """The number of thread blocks that encode."""
        # A body is shorter than the elements of its chunk, but is rounded up.
        self.body_words = min(max(self._capacity // 4, _LEAST_BODIES), self.nbytes // 4 + 4 * ntiles + 16)
        self.sums = gpu.upload(job.encoded.sums)

    @property
    def list_bytes(self) -> int:
        """The bytes of the list of changes: pairs of values, and then ranks."""
        return self._pair_bytes + 2 * self._capacity

    @property
    def _pair_bytes(self) -> int:
        return -(-2 * self._value_size * self._capacity // _ALIGNMENT) * _ALIGNMENT

    def start(self, first: int, memory: _SlabMemory) -> _Slab:
        """Start to find the changes of blocks from number `first` on, and to cut the blocks into chunks."""
        end = max(first + 1, int(np.searchsorted(self._upto, self._upto[first] + self.size, "right")) - 1)
        blocks = self.blocks[first:end]
        first_tile = int(blocks["tile0"][0])
        ntiles = int(blocks["tile0"][-1]) + int(blocks["tiles"][-1]) - first_tile
        on_device = self._gpu.upload(blocks)
        arrays = (0, 2 * self._contexts, 4 * self._contexts, 4 * self._contexts + 64)
        found, chunks = self._gpu.empty(ntiles * (arrays[-1] + 32), torch.uint8), self._gpu.empty(ntiles * 32, torch.uint8)
        progress = self._gpu.zeros(4 + 2 * len(blocks), torch.int64)
        elements, counts, slots, sizes = (found.data_ptr() + offset * ntiles for offset in arrays)
        pairs = memory.list.data_ptr()
        changes = Changes(slots, sizes, counts, pairs + self._pair_bytes, pairs, self._capacity, progress.data_ptr())
        slab = _Slab(self, first, end, blocks, first_tile, ntiles, on_device, found, chunks, progress, changes, self.sums.clone())
        facts, work, _ = slab.chunk_arrays()
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        tiles = Tiles(self._tensors.data_ptr(), on_device.data_ptr(), self._ntensors, len(blocks), first_tile, first_tile + ntiles)
        launch = self._kernels.launch
        launch("choose_tops", len(blocks), 256, [self._tensors, number(self._ntensors), on_device])
        launch(self._scan, self._blocks_to_scan(ntiles), _SCAN_THREADS, [tiles, pointer(elements), changes, self.sums], self._scan_shared)
        launch("cut_chunks", len(blocks), 256, [on_device, number(first_tile), pointer(counts), facts, work, slab.address(2)])
        return slab

    def plan(self, slab: _Slab, memory: _SlabMemory) -> None:
        """Start to encode all chunks, in any order, and to copy the report to the host."""
        assert slab.found is not None
        memory.bodies[: memory.used].zero_()
        bodies = Bodies(memory.bodies.data_ptr(), self.body_words, slab.address(1))
        facts, work, ends = slab.chunk_arrays()
        lists = [facts, work, slab.address(2), slab.address(3)]
        arguments = [self._tensors_of(slab), slab.on_device, *lists, slab.found, slab.changes, memory.scratch, bodies]
        self._kernels.launch("encode_chunks", min(self.encode_blocks, slab.ntiles), 512, arguments, self._plan_shared)
        totals, unchanged = slab.address(4), slab.address(4 + len(slab.blocks))
        arguments = [slab.on_device, ctypes.c_uint32(slab.first_tile), facts, ends, totals, unchanged, slab.changes]
        self._kernels.launch("measure_chunks", len(slab.blocks), 256, arguments)
        slab.found = None  # the next slab may use this memory
        slab.report = self._gpu.pinned(slab.progress.numel(), torch.int64)
        slab.report.copy_(slab.progress, non_blocking=True)
        slab.reported = self._gpu.mark()

    def read_report(self, slab: _Slab, memory: _SlabMemory) -> None:
        """Wait for the report of a slab, and decide how many elements the next slab should have."""
        assert slab.report is not None
        assert slab.reported is not None
        slab.reported.synchronize()
        slab.listed, slab.words, slab.nchunks = slab.report[:3].tolist()
        slab.fits = slab.listed <= self._capacity and slab.words <= self.body_words
        memory.used = min(slab.words, self.body_words)
        elements = int(slab.blocks["elements"].sum(dtype=np.int64))
        # Each warp leaves a part of its last grant empty: half of it on average, and all of it in the worst case.
        lost = _GRANT * 4 * self._blocks_to_scan(slab.ntiles)
        density = max(slab.listed - lost // 2, slab.listed // 4, 1) / elements
        room = max(_FULL * self._capacity - lost, self._capacity / 4)
        size = min(room / density, elements * _FULL * self.body_words / max(slab.words, 1))
        self.size = min(max(int(size), 1), self._most_slab)

    def grow(self, slab: _Slab, memory: _SlabMemory) -> None:
        """Make room for a slab that is a single block and does not fit."""
        self._capacity = max(self._capacity, slab.listed)
        self.body_words = max(self.body_words, slab.words)
        memory.grow(self.list_bytes, self.body_words)

    def join(self, slab: _Slab, memory: _SlabMemory) -> _Joined:
        """Start to put the chunks in order and to copy them to the host."""
        size = int(slab.facts[0].sum())
        out = self._gpu.empty(size, torch.uint8)
        facts, work, ends = slab.chunk_arrays()
        block_ends = slab.progress[4 : 4 + len(slab.blocks)].cumsum(0)
        arguments = [self._tensors_of(slab), facts, work, slab.address(2), ends, block_ends, memory.bodies, out]
        self._kernels.launch("join_chunks", min(slab.nchunks, 16 * self._gpu.processors), 128, arguments)
        first, last = np.searchsorted(self._tiles[1:], [slab.first_tile, slab.first_tile + slab.ntiles - 1], "right").tolist()
        sums = self.sums[first * SUMS.itemsize : (last + 1) * SUMS.itemsize]
        host, host_sums = self._gpu.pinned(size), self._gpu.pinned(sums.numel())
        memory.copies.wait_stream(self._gpu.current())
        with self._gpu.using(memory.copies):
            host.copy_(out, non_blocking=True)
            host_sums.copy_(sums, non_blocking=True)
            copied = self._gpu.mark()
        self._gpu.keep(out, memory.copies)
        return _Joined(self._encoded, slab.facts, host, slice(first, last + 1), host_sums, copied)

    def _tensors_of(self, slab: _Slab) -> SlabTensors:
        return SlabTensors(self._tensors.data_ptr(), self._ntensors, slab.first_tile)

    def _blocks_to_scan(self, ntiles: int) -> int:
        return int(min(self._scan_blocks, -(-ntiles // 4)))

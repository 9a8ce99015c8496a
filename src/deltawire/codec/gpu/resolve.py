"""Resolving on the GPU: payloads are decoded against weights into a patch, and both stay on the device.

There are two streams: while one reads the weights, the other reads the headers of the payloads. Then changes are decoded and located,
one slab of chunks at a time, so that little more memory than the patch is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from ..base import Buffer, Outcomes, Sums
from .device import Gpu, KernelSet, Purpose
from .digest import digest_ranges
from .kernel_table import CONTEXTS, MASKS, RANGE, SHIFTS, SUMS, TILE, KernelTable
from .patch import DevicePatch, Patch
from .payloads import Numbers, PayloadRanges, Payloads
from .slabs import Chunks, Slab

_SHARE = 0.0198
"""The share of the weights' bytes that all memory may take, the patch included, unless the patch alone takes more."""

_LONG_SLABS, _MOST_SLABS, _LEAST_SLAB = 12, 80, 1 << 18
"""How many changes are located at a time: a twelfth of the remaining ones, while there is room in the patch for their lists. After that, as
many as fit into the share, but at least an 80th of all, and at least the third number."""

_KEPT_SHARE, _KEPT = 0.001, 1 << 20
"""Payloads of at most this share of the weights' bytes, or of this many bytes, stay on the device. Larger ones are copied by slab."""

_LONGEST_ROW = 32
_COUNT_BLOCKS, _LOCATE_BLOCKS = 5, 6
"""Thread blocks per processor."""

_LOCATE_WARPS, _INDEX_THREADS = 4, 8
_RAW = 2

_SIDE_STREAMS: tuple[Purpose, ...] = ("decode", "copies")

_MOST_CHANGES = 2**32 - 1024
"""Kernels count changes with 32 bits, up to 256 beyond the last."""

_TOTAL, _ERROR, _TASKS = 1, 2, 3
"""Words of `Head` in heads.cuh that the host reads."""

_ERRORS = (
    "",
    "a chunk's top exponent is out of range.",
    "a symbol table repeats a symbol.",
    "a chunk lists more than 32768 changes.",
    "an inverted context has more unchanged elements than changes.",
    "a position parameter is out of range.",
    "a context uses symbols, but its chunk has no table.",
    "a context has an impossible number of larger steps.",
    "a run parameter is out of range.",
    "a value parameter is out of range.",
    "a coded chunk lists no change.",
    "a chunk's body is too short.",
    "a position falls outside its chunk.",
    "the runs of a context exceed its changes.",
    "a step is out of range.",
    "a symbol is not in the table.",
    "a listed element does not change.",
    "a chunk's body is longer than its streams.",
    "a context has another number of elements than the base.",
    "a chunk's header is cut short.",
    "a chunk's body is cut short.",
    "a chunk has an impossible number of elements.",
    "a chunk's size does not fit its mode.",
    "a chunk's body is longer than its streams.",
    "a chunk before the last is not a multiple of 16384 elements.",
)
_WRONG_TYPE, _WRONG_SHAPE = len(_ERRORS), len(_ERRORS) + 1

_SOURCE = np.dtype(
    [(name, "u8") for name in ("base", "payload", "bytes", "offset", "count", "seed")]
    + [(name, "u4") for name in ("tensor", "tile0", "shift", "mask", "code", "unused")]
)
_WALK = np.dtype([("covered", "u8"), ("chunks", "u4"), ("error", "u4")])


class _Targets(ctypes.Structure):
    """See `Targets` in decode.cuh."""

    _fields_ = [("ranks", ctypes.c_void_p), ("operands", ctypes.c_void_p), ("first", ctypes.c_uint32)]


def resolve_tensors(table: KernelTable, payloads: PayloadRanges, data: Buffer, gpu: Gpu) -> tuple[DevicePatch, Outcomes]:
    """Decode and digest tensors of one width, on the current stream. Nothing is written to them.

    Payloads are ranges of `data`. A tensor without a payload is only digested. Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`.
    """
    work = _Work(table, Payloads(payloads, data, gpu), gpu)
    main, side = gpu.current(), gpu.stream("decode")
    side.wait_stream(main)
    try:
        for part in work.data.parts():
            with gpu.using(side):
                work.find_chunks(*part)
            main.wait_stream(side)
            work.count(*part)
        with gpu.using(side):
            work.read_heads()
            work.index()
    except BaseException:
        side.synchronize()  # otherwise `read_by_kernels` could be reused while kernels still read it
        raise
    finally:  # memory that is freed from here on is reused only after the work of these streams
        for purpose in _SIDE_STREAMS:
            main.wait_stream(gpu.stream(purpose))
    work.locate()
    return work.result()


class _Work:
    """The arrays of one call on the device, and its steps in order."""

    def __init__(self, table: KernelTable, data: Payloads, gpu: Gpu) -> None:
        self.gpu, self.table, self.data = gpu, table, data
        self.kernels: KernelSet = gpu.kernels(table.width)
        self.count_shared, self.locate_shared, self.head_size, self.task_size, self.tile_size = self.kernels.constants("resolve_sizes", 5)
        owners = data.numbers
        tiles = -(-table.count[owners] // TILE)
        self.tile_ends: Numbers = np.cumsum(tiles)
        self.ntiles = int(tiles.sum())
        self.sources = np.zeros(owners.size, _SOURCE)
        for name, column in (("payload", data.addresses), ("bytes", data.lengths), ("offset", data.offsets), ("tensor", owners)):
            self.sources[name] = column
        self.sources["tile0"] = self.tile_ends - tiles
        of_tensors: list[tuple[str, NDArray[Any]]] = [("base", table.base), ("count", table.count), ("seed", table.seed)]
        for name, values in [*of_tensors, ("shift", SHIFTS[table.codes]), ("mask", MASKS[table.codes]), ("code", table.codes)]:
            self.sources[name] = values[owners]
        self.sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
        self.tiles = gpu.empty(self.ntiles * self.tile_size, torch.uint8)
        self.room: torch.Tensor | None = data.room()
        self.chunks: Numbers = np.zeros(owners.size, np.int64)
        """The number of chunks of each payload."""
        self.read_by_kernels: list[torch.Tensor] = []
        """Pinned memory that must live as long as kernels may read it."""
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The chunks of each part, and their headers."""
        quiet = np.ones(len(table), np.bool_)
        quiet[owners] = False
        if quiet.any():
            digest_ranges(table.blocks(np.flatnonzero(quiet & (table.base != 0))), table.width, self.sums, gpu)

    def find_chunks(self, first: int, end: int) -> None:
        """Find the chunks of these payloads, and meanwhile start to copy the payloads to the device."""
        copies, room, empty = self.gpu.stream("copies"), self.room, self.gpu.empty
        assert room is not None
        begin, upto = int(self.data.offsets[first]), int(self.data.offsets[end - 1] + self.data.lengths[end - 1])
        sources, n = (
            self.gpu.upload(self.sources[first:end]),
            ctypes.c_uint32(end - first),
        )
        copies.wait_stream(self.gpu.current())
        with self.gpu.using(copies):
            self.data.copy(begin, upto, room.data_ptr() + begin)
        found = empty((end - first) * _WALK.itemsize, torch.uint8)
        self.kernels.launch("find_chunks", -(-(end - first) // 32), 32, [sources, n, self.tiles, found])
        walks = found.cpu().numpy().view(_WALK)
        _check_walks(walks, self.sources["count"][first:end])
        self.chunks[first:end] = walks["chunks"]
        ends = np.cumsum(walks["chunks"], dtype=np.int64)
        numbers = self.gpu.pinned(end - first, torch.int32)  # not copied, because a copy would wait for the payloads
        numbers.numpy()[:] = ends - walks["chunks"]
        self.read_by_kernels.append(numbers)
        ranges, heads = empty(int(ends[-1]) * RANGE.itemsize, torch.uint8), self.gpu.zeros(int(ends[-1]) * self.head_size, torch.uint8)
        self.kernels.launch("list_chunks", -(-(end - first) // 32), 32, [sources, n, numbers, self.tiles, ranges, heads])
        self.found.append((ranges, heads))

    def count(self, first: int, end: int) -> None:
        """Count the elements of each context in every tile of the chunks that were found last, and digest the base."""
        ranges, _ = self.found[-1]
        self.gpu.keep(ranges, self.gpu.current())
        first_tile, end_tile = int(self.sources["tile0"][first]), int(self.tile_ends[end - 1])
        blocks = min(-(-(end_tile - first_tile) // 4), _COUNT_BLOCKS * self.gpu.processors)
        numbers = map(ctypes.c_uint32, (len(ranges) // RANGE.itemsize, first_tile, end_tile, self.tile_size // 4))
        self.kernels.launch("count_elements", blocks, 128, [ranges, *numbers, self.tiles, self.sums], self.count_shared)

    def read_heads(self) -> None:
        """Read the headers of chunks, wait for them, and sum up the numbers of changes."""
        assert self.room is not None
        self.gpu.current().wait_stream(self.gpu.stream("copies"))
        none = self.gpu.empty(0, torch.uint8)
        ranges, self.heads = map(_joined, zip((none, none), *self.found, strict=True))
        self.found.clear()
        count = len(ranges) // RANGE.itemsize
        self.nranges = ctypes.c_uint32(count)
        self.kernels.launch("read_heads", -(-count // 64), 64, [ranges, self.nranges, self.room, self.heads])
        self.ranges = ranges.cpu().numpy().view(RANGE)
        self.has_raw = bool((self.ranges["mode"] == _RAW).any())
        if self.has_raw:
            arguments = [ranges, self.nranges, ctypes.c_uint32(self.ntiles), self.room, self.heads, self.tiles]
            self.kernels.launch("count_raw", -(-self.ntiles // 4), 128, arguments)
        self.columns = self.heads.view(torch.int32).view(count, self.head_size // 4)
        words = self.columns[:, : _TASKS + 1].cpu().numpy().astype(np.int64)
        _check(words[:, _ERROR])
        self.body_ends = self.ranges["next"].astype(np.int64) + words[:, 0]
        totals = words[:, _TOTAL]
        self.ends, self.task_ends = np.cumsum(totals), np.cumsum(words[:, _TASKS])
        self.total = int(totals.sum())
        if self.total > _MOST_CHANGES:
            raise ShapeMismatch("a GPU cannot resolve a delta of about 2^32 changes or more at once.")
        self.ranges["start"] = self.ends - totals

    def index(self) -> None:
        """Find where the segments of streams begin, so that many threads can decode a chunk."""
        self.device_ranges = self.gpu.upload(self.ranges)
        ntasks = int(self.task_ends[-1]) if self.task_ends.size else 0
        self.tasks = self.gpu.empty(ntasks * self.task_size, torch.uint8)
        arguments = [self.device_ranges, self.nranges, self.room, self.heads, self.gpu.upload(self.task_ends.astype(np.uint32)), self.tasks]
        self.kernels.launch("index_streams", -(-len(self.ranges) // _INDEX_THREADS), _INDEX_THREADS, arguments)

    def locate(self) -> None:
        """Decode all changes, and find the elements that they belong to.

        A slab needs lists that are longer than its part of the patch. They use memory of the patch that later slabs will fill. That memory
        shrinks, so slabs become shorter. The last slabs use separate memory.
        """
        gpu, itemsize = self.gpu, self.table.itemsize
        for tensor in (self.device_ranges, self.heads, self.tasks):
            gpu.keep(tensor, gpu.current())
        if not self.has_raw and self.data.size > max(_KEPT_SHARE * self.table.nbytes, _KEPT):
            self.room = None  # all reads are done, so the patch can use this memory
        self.firsts = gpu.empty(self.ntiles + 1, torch.int32)
        self.firsts[self.ntiles :].fill_(self.total - (1 << 32) if self.total >= 1 << 31 else self.total)
        self.positions, self.values = gpu.empty(self.total, torch.uint8), gpu.empty(self.total, getattr(torch, f"int{self.table.width}"))
        counted = gpu.pinned(self.sums.numel())
        counted.copy_(self.sums, non_blocking=True)
        there = gpu.mark()
        most = max(self._affordable_changes(), self.total // _MOST_SLABS, _LEAST_SLAB)
        chunks = Chunks(self.ranges, self.ends, self.body_ends, self.ntiles)
        wave, windows = _LOCATE_WARPS * _LOCATE_BLOCKS * gpu.processors, self.room is None
        first = done = 0
        while self.total - done > _LONG_SLABS * most:
            share = (self.total - done) // _LONG_SLABS
            early = chunks.slabs(first, changes=share, window=2 * self.data.size * share // self.total, wave=wave)
            free = self.total - -(-chunks.lists(early, itemsize, windows=windows).size // itemsize)  # below 0 if there is no room for them
            early = [slab for slab in early if chunks.changes(slab)[1] <= free]
            if not early:
                break
            self._locate_slabs(chunks, early, self.values.view(torch.uint8)[free * itemsize :])
            first, done = early[-1][1], chunks.changes(early[-1])[1]
        late = chunks.slabs(first, changes=most, window=self.data.size, wave=wave)
        if late:
            memory = gpu.empty(chunks.lists(late, itemsize, windows=windows).size, torch.uint8)
            self._locate_slabs(chunks, late, memory)
        there.synchronize()
        self.before: Sums = counted.numpy().view(SUMS)["before"]

    def _affordable_changes(self) -> int:
        """Return the number of changes whose lists still fit into the share."""
        held = [self.sums, self.tiles, self.heads, self.device_ranges, self.tasks, self.firsts, self.positions, self.values]
        held, windowed = (held, self.data.size) if self.room is None else ([*held, self.room], 0)
        each = 4 + self.table.itemsize + (4 * CONTEXTS * self.ntiles + 2 * windowed) / max(self.total, 1)
        return int((_SHARE * self.table.nbytes - sum(array.nbytes for array in held)) / each)

    def _locate_slabs(self, chunks: Chunks, slabs: Sequence[Slab], memory: torch.Tensor) -> None:
        memory.zero_()  # kernels read the bytes after a payload, though nothing depends on them
        self.gpu.keep(memory, self.gpu.stream("copies"))
        lists = chunks.lists(slabs, self.table.itemsize, windows=self.room is None)
        ranks, operands, starts, *windows = lists.addresses(memory.data_ptr())
        if self.room is None:
            images = self.data.windows([chunks.body(slab) for slab in slabs], windows)
        else:
            images = iter([self.room.data_ptr()] * len(slabs))
        for slab, image in zip(slabs, images, strict=True):
            targets = _Targets(ranks, operands, chunks.changes(slab)[0])
            self._locate_slab(slab, chunks.tiles(slab), image, starts, targets)

    def _locate_slab(self, slab: Slab, tiles: tuple[int, int], image: int, starts: int, targets: _Targets) -> None:
        launch, number = self.kernels.launch, ctypes.c_uint32
        (first, end), (first_tile, end_tile) = slab, tiles
        here, starting = ctypes.c_void_p(image), ctypes.c_void_p(starts)
        arguments = [self.device_ranges, number(first), number(first_tile), here, self.heads, self.tiles, starting, targets]
        launch("start_tiles", end - first, 512, arguments)
        first_task = int(self.task_ends[first - 1]) if first else 0
        ntasks = int(self.task_ends[end - 1]) - first_task
        tasks = ctypes.c_void_p(self.tasks.data_ptr() + first_task * self.task_size)
        launch("decode_segments", 3 * -(-ntasks // 64), 64, [self.device_ranges, here, self.heads, tasks, number(ntasks), targets])
        # A warp must search where the changes of its first tile start, but not for the tiles that follow, so each warp gets a row of tiles.
        warps = _LOCATE_WARPS * _LOCATE_BLOCKS * self.gpu.processors
        row = min(-(-(end_tile - first_tile) // warps), _LONGEST_ROW)
        blocks = min(-(-(end_tile - first_tile) // (_LOCATE_WARPS * row)), _LOCATE_BLOCKS * self.gpu.processors)
        patch = Patch(*(array.data_ptr() for array in (self.firsts, self.tiles, self.positions, self.values)))
        arguments = [self.device_ranges, self.nranges, number(first_tile), number(end_tile), number(row)]
        arguments += [here, self.heads, starting, targets, patch, self.sums]
        launch("locate", blocks, 128, arguments, self.locate_shared)

    def result(self) -> tuple[DevicePatch, Outcomes]:
        """Wait for all work, and return the patch and the outcomes."""
        errors = self.columns[:, _ERROR].cpu().numpy()
        found = self.sums.cpu().numpy().view(SUMS).reshape(-1)
        _check(errors)
        chunks = np.zeros(len(self.table) + 1, np.int64)
        chunks[self.data.numbers + 1] = self.chunks
        starts = np.append(self.ranges["start"], self.total)[np.cumsum(chunks)].astype(np.int64)
        outcomes = Outcomes(np.diff(starts), self.before, found["before"] + found["change"])
        arrays = (self.device_ranges, len(self.ranges), self.ntiles, self.firsts, self.tiles, self.positions, self.values)
        return DevicePatch(self.gpu, self.kernels, *arrays, starts), outcomes


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[1] if len(parts) == 2 else torch.cat(list(parts))


def _check_walks(walks: NDArray[np.void], counts: NDArray[np.uint64]) -> None:
    wrong = np.flatnonzero(walks["error"])
    errors = walks["error"][wrong].tolist()
    if _WRONG_TYPE in errors:
        raise DtypeMismatch("a tensor has another element type than its delta.")
    for error in errors:
        if error != _WRONG_SHAPE:
            raise CorruptDelta(_ERRORS[error])
    for first in wrong[:1]:
        raise ShapeMismatch(f"the delta is for {walks['covered'][first]} elements, the tensor has {counts[first]}.")


def _check(errors: NDArray[np.int64]) -> None:
    if errors.any():
        raise CorruptDelta(_ERRORS[int(errors[np.flatnonzero(errors)[0]])])

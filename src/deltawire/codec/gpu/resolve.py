"""Resolving on the GPU: payloads are decoded against weights into a patch, and both stay on the device.

There are two streams. One reads the weights: it counts elements by context, with the `top` that an encoder chooses. Meanwhile the host
finds the chunks, and the other stream reads their headers. Then changes are decoded and located, one slab of chunks at a time, so that
little more memory than the patch is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta, ShapeMismatch
from ..base import Buffer, Pace, Sums
from .chunk_walk import RAW, walk_groups, walk_tensors
from .device import Gpu, KernelSet, Purpose
from .digest import digest_rows
from .kernel_table import CONTEXTS, RUN, SUMS, TILE, KernelTable, Numbers, Tiles, storage_type
from .patch import DevicePatch, Patch
from .payloads import Payloads
from .slabs import Chunks, Slab

_SHARE = 0.0198
"""The share of the weights' bytes that all memory may take, the patch included, unless the patch alone takes more."""

_LONG_SLABS, _MOST_SLABS, _LEAST_SLAB = 12, 80, 1 << 18
"""How many changes are located at a time: a twelfth of the remaining ones, while there is room in the patch for their lists. After that, as
many as fit into the share, but at least an 80th of all, and at least the third number."""

_PART = 1 << 29
"""The most elements that the device works on between two calls of a pace, unless a chunk has more. An H200 takes about a millisecond."""

_COUNT_COST, _LOCATE_COST = 0.25, 0.75
"""The parts of the whole time that counting and locating take."""

_KEPT_SHARE, _KEPT = 0.001, 1 << 20
"""Payloads of at most this share of the weights' bytes, or of this many bytes, stay on the device. Larger ones are copied by slab."""

_LONGEST_ROW = 32
_COUNT_BLOCKS, _LOCATE_BLOCKS = 5, 6
"""Thread blocks per processor."""

_LOCATE_WARPS, _INDEX_THREADS = 4, 8

_SIDE_STREAMS: tuple[Purpose, ...] = ("decode", "copies")

_MOST_CHANGES = 2**32 - 1024
"""Kernels count changes with 32 bits, up to 256 beyond the last."""

_TOTAL, _ERROR, _TASKS, _OTHER_TOP = 1, 2, 3, 4
"""Words of `Head` in heads.cuh that the host reads."""

_START = RUN.fields["start"][1] // 4 if RUN.fields else 0
"""The word of `Run` in common.cuh that the host sets after it has read the headers."""

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
    "a chunk of 4-bit elements has a symbol table.",
)


class _Targets(ctypes.Structure):
    """See `Targets` in decode.cuh."""

    _fields_ = [("ranks", ctypes.c_void_p), ("operands", ctypes.c_void_p), ("first", ctypes.c_uint32)]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The results of resolving, by tensor: the number of changed elements, and the word sums before and after."""

    changed: Numbers
    before: Sums
    after: Sums


def resolve_table(
    table: KernelTable,
    payloads: Sequence[tuple[int, int] | None],
    data: Buffer,
    gpu: Gpu,
    *,
    groups: bool,
    pace: Pace | None = None,
) -> tuple[DevicePatch, Resolved]:
    """Decode and digest tensors of one width, on the current stream. Nothing is written to them.

    Parameters
    ----------
    table
        The tensors.
    payloads
        The range of each group's payload in `data`. The tensors of a group without a payload are only digested.
    data
        What the payloads are ranges of.
    gpu
        Where the tensors are.
    groups
        Whether payloads are those of groups. Otherwise each group is a tensor with a payload of versions 1 or 2 of the format.
    pace
        Waits between parts of the work. None means that nothing waits.

    Raises
    ------
    CorruptDelta, DtypeMismatch, ShapeMismatch
        The payloads break a rule, or belong to other tensors.
    """
    work = _Work(table, payloads, data, gpu, pace)
    main, side = gpu.current(), gpu.stream("decode")
    side.wait_stream(main)
    try:
        work.count()
        with gpu.using(side):
            work.find_chunks(groups=groups)
            work.read_heads()
            work.index()
    finally:  # memory that is freed from here on is reused only after the work of these streams
        for purpose in _SIDE_STREAMS:
            main.wait_stream(gpu.stream(purpose))
    work.locate()
    return work.result()


class _Work:
    """The arrays of one call on the device, and its steps in order."""

    def __init__(self, table: KernelTable, payloads: Sequence[tuple[int, int] | None], data: Buffer, gpu: Gpu, pace: Pace | None) -> None:
        self.gpu, self.table, self.pace = gpu, table, pace
        self.kernels: KernelSet = gpu.kernels(table.width)
        self.count_shared, self.locate_shared, self.head_size, self.task_size, self.tile_size = self.kernels.constants("resolve_sizes", 5)
        self.itemsize = storage_type(table.width).itemsize
        has_payload = np.array([payload is not None for payload in payloads], np.bool_)
        self.groups: Numbers = np.flatnonzero(has_payload)
        self.data = Payloads([payload for payload in payloads if payload is not None], data, gpu)
        changing = np.repeat(has_payload, table.group_ends - table.group_starts)
        self.sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
        self.tensors = table.rows(changing)
        self.ntiles = self.tensors.ntiles
        self.part = max(self.ntiles, 1) if pace is None else _PART // TILE
        """The most tiles that the device works on at a time."""
        self.blocks, self.block_starts = table.blocks(self.tensors)
        self.device_tensors, self.device_blocks = gpu.upload(self.tensors.rows), gpu.upload(self.blocks)
        self.tiles = gpu.empty(self.ntiles * self.tile_size, torch.uint8)
        self.room: torch.Tensor | None = self.data.room()
        self.raw_changes: torch.Tensor | None = None
        """The number of changes of each tile in raw chunks, if there are any."""
        if not changing.all():
            digest_rows(table.rows(~changing & (table.base != 0)), table.width, self.sums, gpu)

    def count(self) -> None:
        """Count the elements of each context in every tile, and digest the base."""
        numbers = [self.device_tensors, ctypes.c_uint32(len(self.table)), self.device_blocks]
        self.kernels.launch("choose_tops", len(self.blocks), 256, numbers)
        self.tops_chosen = self.gpu.mark()
        for first in range(0, self.ntiles, self.part):
            end = min(first + self.part, self.ntiles)
            self._count(self._tiles(self.device_blocks, len(self.blocks), first, end), self.sums)
            self._rest(_COUNT_COST, end - first)

    def _rest(self, cost: float, tiles: int) -> None:
        """Wait after a part of the work, if there is a pace."""
        if self.pace is not None:
            self.pace(cost * int(self.tensors.elements[-1]) * tiles / self.ntiles)

    def _count(self, tiles: Tiles, sums: torch.Tensor | ctypes.c_void_p) -> None:
        blocks = min(-(-(tiles.end - tiles.first) // 4), _COUNT_BLOCKS * self.gpu.processors)
        facts = ctypes.c_void_p(self.tiles.data_ptr() + tiles.first * self.tile_size)
        self.kernels.launch("count_elements", blocks, 128, [tiles, ctypes.c_uint32(self.tile_size // 4), facts, sums], self.count_shared)

    def _tiles(self, runs: torch.Tensor, nruns: int, first: int, end: int) -> Tiles:
        return Tiles(self.device_tensors.data_ptr(), runs.data_ptr(), len(self.table), nruns, first, end)

    def find_chunks(self, *, groups: bool) -> None:
        """Find all chunks, and meanwhile copy the payloads to the device."""
        assert self.room is not None
        room, copies = self.room, self.gpu.stream("copies")
        copies.wait_stream(self.gpu.current())
        with self.gpu.using(copies):
            self.data.advance(room)
            facts = self.table, self.tensors, self.block_starts, self.groups, self.data
            self.runs = walk_groups(*facts, lambda: self.data.advance(room)) if groups else walk_tensors(*facts)
            self.data.advance(room, wait=True)

    def read_heads(self) -> None:
        """Read the headers of chunks, wait for them, and sum up the numbers of changes."""
        gpu, runs, count = self.gpu, self.runs, len(self.runs)
        self.device_runs, self.heads = gpu.upload(runs), gpu.empty(count * self.head_size, torch.uint8)
        gpu.current().wait_event(self.tops_chosen)
        gpu.current().wait_stream(gpu.stream("copies"))
        self.nruns = ctypes.c_uint32(count)
        self.kernels.launch("read_heads", -(-count // 64), 64, [self.device_runs, self.nruns, self.device_blocks, self.room, self.heads])
        if (runs["mode"] == RAW).any():
            self.raw_changes = gpu.empty(self.ntiles, torch.int16)
            tiles = self._tiles(self.device_runs, count, 0, self.ntiles)
            self.kernels.launch("count_raw", -(-self.ntiles // 4), 128, [tiles, self.room, self.heads, self.raw_changes])
        self.columns = self.heads.view(torch.int32).view(count, self.head_size // 4)
        (found,) = gpu.download(self.columns[:, : _OTHER_TOP + 1])
        words = found.view(np.int32).reshape(count, _OTHER_TOP + 1).astype(np.int64)
        _check(words[:, _ERROR])
        self.ends, self.task_ends = np.cumsum(words[:, _TOTAL]), np.cumsum(words[:, _TASKS])
        self.total = int(self.ends[-1]) if count else 0
        if self.total > _MOST_CHANGES:
            raise ShapeMismatch("a GPU cannot resolve a delta of about 2^32 changes or more at once.")
        # The kernel has set the tops of chunks, so only the starts are copied.
        starts = gpu.upload((self.ends - words[:, _TOTAL]).astype(np.uint32))[: 4 * count].view(torch.int32)
        self.device_runs[: count * RUN.itemsize].view(torch.int32).view(count, RUN.itemsize // 4)[:, _START].copy_(starts)
        self.has_other_tops = bool(words[:, _OTHER_TOP].any())

    def index(self) -> None:
        """Find where the segments of streams begin, so that many threads can decode a chunk."""
        ntasks = int(self.task_ends[-1]) if self.task_ends.size else 0
        self.tasks = self.gpu.empty(ntasks * self.task_size, torch.uint8)
        arguments = [self.device_runs, self.nruns, self.room, self.heads, self.gpu.upload(self.task_ends.astype(np.uint32)), self.tasks]
        self.kernels.launch("index_streams", -(-len(self.runs) // _INDEX_THREADS), _INDEX_THREADS, arguments)

    def locate(self) -> None:
        """Decode all changes, and find the elements that they belong to.

        A slab needs lists that are longer than its part of the patch. They use memory of the patch that later slabs will fill. That memory
        shrinks, so slabs become shorter. The last slabs use separate memory.
        """
        gpu, itemsize = self.gpu, self.itemsize
        for tensor in (self.device_runs, self.heads, self.tasks, *([] if self.raw_changes is None else [self.raw_changes])):
            gpu.keep(tensor, gpu.current())
        if self.has_other_tops:  # elements were counted with the tops that an encoder of this project chooses
            self._count(self._tiles(self.device_runs, len(self.runs), 0, self.ntiles), ctypes.c_void_p())
        if self.raw_changes is None and self.data.size > max(_KEPT_SHARE * self.table.nbytes, _KEPT):
            self.room = None  # all reads are done, so the patch can use this memory
        self.firsts = gpu.empty(self.ntiles + 1, torch.int32)
        self.firsts[self.ntiles :].fill_(self.total - (1 << 32) if self.total >= 1 << 31 else self.total)
        self.positions, self.values = gpu.empty(self.total, torch.uint8), gpu.empty(self.total, storage_type(self.table.width))
        most = max(self._affordable_changes(), self.total // _MOST_SLABS, _LEAST_SLAB)
        part = self.total * self.part // max(self.ntiles, 1)
        chunks = Chunks(self.runs, self.ends, self.ntiles)
        wave, windows = _LOCATE_WARPS * _LOCATE_BLOCKS * gpu.processors, self.room is None
        first = done = 0
        while self.total - done > _LONG_SLABS * most:
            share = (self.total - done) // _LONG_SLABS
            early = chunks.slabs(first, changes=min(share, part), window=2 * self.data.size * share // self.total, wave=wave)
            free = self.total - -(-chunks.lists(early, itemsize, windows=windows).size // itemsize)  # below 0 if there is no room for them
            early = [slab for slab in early if chunks.changes(slab)[1] <= free]
            if not early:
                break
            self._locate_slabs(chunks, early, self.values.view(torch.uint8)[free * itemsize :])
            first, done = early[-1][1], chunks.changes(early[-1])[1]
        late = chunks.slabs(first, changes=min(most, part), window=self.data.size, wave=wave)
        if late:
            memory = gpu.empty(chunks.lists(late, itemsize, windows=windows).size, torch.uint8)
            self._locate_slabs(chunks, late, memory)

    def _affordable_changes(self) -> int:
        """Return the number of changes whose lists still fit into the share."""
        held = [self.sums, self.tiles, self.heads, self.device_runs, self.tasks, self.firsts, self.positions, self.values]
        held, windowed = (held, self.data.size) if self.room is None else ([*held, self.room], 0)
        each = 4 + self.itemsize + (4 * CONTEXTS * self.ntiles + 2 * windowed) / max(self.total, 1)
        return int((_SHARE * self.table.nbytes - sum(array.nbytes for array in held)) / each)

    def _locate_slabs(self, chunks: Chunks, slabs: Sequence[Slab], memory: torch.Tensor) -> None:
        memory.zero_()  # kernels read the bytes after a payload, though nothing depends on them
        self.gpu.keep(memory, self.gpu.stream("copies"))
        lists = chunks.lists(slabs, self.itemsize, windows=self.room is None)
        ranks, operands, starts, *windows = lists.addresses(memory.data_ptr())
        if self.room is None:
            images = self.data.windows([chunks.body(slab) for slab in slabs], windows)
        else:
            images = iter([self.room.data_ptr()] * len(slabs))
        for slab, image in zip(slabs, images, strict=True):
            targets = _Targets(ranks, operands, chunks.changes(slab)[0])
            first, end = chunks.tiles(slab)
            self._locate_slab(slab, (first, end), image, starts, targets)
            self._rest(_LOCATE_COST, end - first)

    def _locate_slab(self, slab: Slab, tiles: tuple[int, int], image: int, starts: int, targets: _Targets) -> None:
        launch, number = self.kernels.launch, ctypes.c_uint32
        (first, end), (first_tile, end_tile) = slab, tiles
        here, starting = ctypes.c_void_p(image), ctypes.c_void_p(starts)
        raw = ctypes.c_void_p() if self.raw_changes is None else self.raw_changes
        arguments = [self.device_runs, number(first), number(first_tile), here, self.heads, self.tiles, raw, starting, targets]
        launch("start_tiles", end - first, 512, arguments)
        first_task = int(self.task_ends[first - 1]) if first else 0
        ntasks = int(self.task_ends[end - 1]) - first_task
        tasks = ctypes.c_void_p(self.tasks.data_ptr() + first_task * self.task_size)
        launch("decode_segments", 3 * -(-ntasks // 64), 64, [self.device_runs, here, self.heads, tasks, number(ntasks), targets])
        # A warp must search where the changes of its first tile start, but not for the tiles that follow, so each warp gets a row of tiles.
        warps = _LOCATE_WARPS * _LOCATE_BLOCKS * self.gpu.processors
        row = min(-(-(end_tile - first_tile) // warps), _LONGEST_ROW)
        blocks = min(-(-(end_tile - first_tile) // (_LOCATE_WARPS * row)), _LOCATE_BLOCKS * self.gpu.processors)
        patch = Patch(*(array.data_ptr() for array in (self.firsts, self.tiles, self.positions, self.values)))
        work = self._tiles(self.device_runs, len(self.runs), first_tile, end_tile)
        arguments = [work, number(row), here, self.heads, starting, targets, patch, self.sums]
        launch("locate", blocks, 128, arguments, self.locate_shared)

    def result(self) -> tuple[DevicePatch, Resolved]:
        """Wait for all work, and return the patch and what was found."""
        arrays = (self.device_tensors, self.tensors.tiles, self.firsts, self.tiles, self.positions, self.values)
        patch = DevicePatch(self.gpu, self.kernels, self.table.width, *arrays)
        errors, starts, sums = self.gpu.download(self.columns[:, _ERROR], patch.starts(self.firsts), self.sums)
        _check(errors.view(np.int32))
        found = sums.view(SUMS)
        ends = starts.view(np.uint32).astype(np.int64)
        return patch, Resolved(ends[1:] - ends[:-1], found["before"], found["before"] + found["change"])


def _check(errors: NDArray[np.int64]) -> None:
    if errors.any():
        raise CorruptDelta(_ERRORS[int(errors[np.flatnonzero(errors)[0]])])

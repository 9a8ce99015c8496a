"""Resolve on the GPU: payloads decoded against weights that stay where they are, into a patch that stays there too.

Two streams: while one goes over the weights, the other brings the payloads in and decodes them. Then changes are located, a slab at a time.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta, ShapeMismatch
from ..base import Buffer, Outcome
from .device import Gpu, KernelSet
from .digest import digest_spans
from .patch import DevicePatch, Patch
from .payloads import RAW, SAME, Chunks, Payloads
from .spans import CONTEXTS, SUMS, TILE, Changes, Facts, Table, addresses, lanes, place_tiles

_MOST_WIDE = 256
_SHARE = 0.004
_LEAST_SLAB, _MOST_SLABS = 1 << 20, 12
"""Changes that are located at a time: so many that their lists take this share of the weights' bytes, or a twelfth of all."""

_AHEAD = 0.15
"""Share of the weights that the device is given to count before the host has found all chunks."""

_LONGEST_ROW = 8
_COUNT_BLOCKS, _DECODE_BLOCKS, _LOCATE_BLOCKS = 5, 24, 6
"""Thread blocks per processor."""

_TOTAL, _ERROR, _LARGER = 1, 2, 4
"""Words of `Head` in resolve.cuh that the host looks at; the first word is what it fills in."""

_ERRORS = (
    "",
    "a chunk's top exponent is out of range.",
    "a symbol table repeats a symbol.",
    "a chunk lists more than 32768 changes.",
    "an inverted context has more unchanged elements than changes.",
    "a position parameter is out of range.",
    "a context refers to a symbol table that is not there.",
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
)


class _Decoded(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gaps", "operands", "wide", "larger", "larger_at")]


class _Targets(ctypes.Structure):
    _fields_ = [("ranks", ctypes.c_void_p), ("operands", ctypes.c_void_p), ("first", ctypes.c_uint32)]


def resolve_tensors(tensors: Sequence[Facts], payloads: Sequence[Buffer | None], gpu: Gpu) -> tuple[DevicePatch, list[Outcome]]:
    """Decode and digest tensors of one width, on the current stream. Nothing is written to them.

    A tensor without a payload is only digested. Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`.
    """
    table = Table.of(tensors)
    data = Payloads(payloads)
    room = data.room(gpu)
    work = _Work(table, gpu)
    main, side = gpu.current(), gpu.stream("decode")
    side.wait_stream(main)
    try:
        for first, end in _first_and_rest(table):  # the device is at the first while the host looks for the chunks of the rest
            chunks = data.chunks(table, first, end)
            changing, quiet = _spans(table, chunks, first, end, room.data_ptr() + data.starts(len(table)))
            work.count(changing)
            digest_spans(quiet, table.width, work.sums, gpu)
        with gpu.using(side):
            staged = data.arrive(room, gpu)
            work.read_heads(main)
            work.decode(main)
    finally:
        main.wait_stream(side)  # what is given back from here on, is so after both
    del staged
    if not work.has_raw:
        del room  # decoded: the lists of slabs may have its memory
    for slab in _slabs(work.ends, work.slab_size):
        work.locate(*slab)
    return work.result()


class _Work:
    """One call's arrays on the device, and its steps in order."""

    def __init__(self, table: Table, gpu: Gpu) -> None:
        self.gpu, self.table = gpu, table
        self.kernels: KernelSet = gpu.kernels(table.width)
        self.count_shared, self.locate_shared, self.head_size = self.kernels.constants("resolve_sizes", 3)
        self.sums = gpu.zeros(len(table) * SUMS.itemsize, torch.uint8)
        self.elements = gpu.empty(int((-(-table.count // TILE)).sum()) * CONTEXTS, torch.int16)  # chunks cut no tile
        self.parts: list[NDArray[np.void]] = []
        self.ntiles = 0

    def count(self, changing: NDArray[np.void]) -> None:
        """Elements of each context in every tile of some more chunks, and the digest of the base."""
        tiles = place_tiles(changing)
        blocks = min(-(-tiles // 4), _COUNT_BLOCKS * self.gpu.processors)
        here = ctypes.c_void_p(self.elements.data_ptr() + self.ntiles * CONTEXTS * self.elements.element_size())
        arguments = [self.gpu.upload(changing), ctypes.c_uint32(len(changing)), ctypes.c_uint32(tiles), here, Changes(), self.sums]
        self.kernels.launch("count_elements", blocks, 128, arguments, self.count_shared)
        self.parts.append(changing)
        self.ntiles += tiles

    def read_heads(self, user: torch.cuda.Stream) -> None:
        """Headers of chunks; waits for them, and finds out how many changes there are. `user` is the stream that goes on with them."""
        self.changing = np.concatenate(self.parts)
        place_tiles(self.changing)
        self.has_raw = bool((self.changing["mode"] == RAW).any())
        self.nspans, tiles = ctypes.c_uint32(len(self.changing)), ctypes.c_uint32(self.ntiles)
        spans = self.gpu.upload(self.changing)
        head_words = np.zeros((len(self.changing), self.head_size // 4), np.uint32)
        head_words[:, 0] = self.changing["start"]  # the length of the body; where the changes start is known later
        self.heads = self.gpu.upload(head_words)[: head_words.nbytes].view(torch.int32)
        self.gpu.keep(self.heads, user)
        self.columns = self.heads.view(head_words.shape)
        self.kernels.launch("read_heads", -(-len(self.changing) // 64), 64, [spans, self.nspans, self.heads])
        if self.has_raw:
            self.kernels.launch("count_raw", -(-self.ntiles // 4), 128, [spans, self.nspans, tiles, self.heads, self.elements])
        words = self.columns[:, : _LARGER + 1].cpu().numpy().astype(np.int64)
        _check(words[:, _ERROR])
        totals = words[:, _TOTAL]
        self.ends, self.larger_ends = np.cumsum(totals), np.cumsum(words[:, _LARGER])
        self.total = int(self.ends[-1]) if self.ends.size else 0
        if self.total >= 2**32:
            raise ShapeMismatch("a delta of 2^32 changes or more cannot be resolved on a GPU at once.")
        self.changing["start"] = self.ends - totals
        self.slab_size = max(int(_SHARE * self.table.nbytes / (4 + self.table.itemsize)), self.total // _MOST_SLABS, _LEAST_SLAB)

    def decode(self, user: torch.cuda.Stream) -> None:
        """Gaps and operands of all changes, to where the patch will be. `user` is the stream that goes on with them."""
        empty, larger = self.gpu.empty, int(self.larger_ends[-1]) if self.ends.size else 0
        self.placed = self.gpu.upload(self.changing)
        self.larger_at = self.gpu.upload(self.larger_ends.astype(np.uint32))
        self.integer = getattr(torch, f"int{self.table.width}")
        self.firsts, self.places, self.values = (
            empty(self.ntiles + 1, torch.int32),
            empty(self.total, torch.int16),
            empty(self.total, self.integer),
        )
        self.firsts[self.ntiles :].fill_(self.total - (1 << 32) if self.total >= 1 << 31 else self.total)
        self.wide, self.larger = empty(len(self.changing) * _MOST_WIDE * 2, torch.int32), empty(larger, torch.int16)
        arrays = (self.places, self.values, self.wide, self.larger, self.larger_at)
        for tensor in (self.placed, self.firsts, *arrays):
            self.gpu.keep(tensor, user)
        self.decoded = _Decoded(*(array.data_ptr() for array in arrays))
        blocks = min(-(-len(self.changing) // 2), _DECODE_BLOCKS * self.gpu.processors)
        self.kernels.launch("decode_streams", blocks, 64, [self.placed, self.nspans, self.heads, self.decoded])
        del self.larger, self.larger_at

    def locate(self, first: int, end: int, changes: int) -> None:
        """Find the elements that the changes of these chunks belong to."""
        launch = self.kernels.launch
        first_tile = int(self.changing["tile0"][first])
        end_tile = int(self.changing["tile0"][end]) if end < len(self.changing) else self.ntiles
        starts = self.gpu.empty((end_tile - first_tile) * CONTEXTS, torch.int32)
        ranks, operands = self.gpu.empty(changes, torch.int32), self.gpu.empty(changes, self.integer)
        targets = _Targets(ranks.data_ptr(), operands.data_ptr(), int(self.changing["start"][first]))
        number, first_number = ctypes.c_uint32(first), ctypes.c_uint32(first_tile)
        launch("start_tiles", end - first, 512, [self.placed, number, first_number, self.heads, self.elements, starts])
        launch("sum_gaps", end - first, 512, [self.placed, number, self.heads, self.decoded, targets])
        # To find where a tile's changes start takes a search; a warp that goes on with the next tile is spared it.
        row = min(max((end_tile - first_tile) // (8 * _LOCATE_BLOCKS * self.gpu.processors), 1), _LONGEST_ROW)
        blocks = min(-(-(end_tile - first_tile) // (4 * row)), _LOCATE_BLOCKS * self.gpu.processors)
        patch = Patch(self.firsts.data_ptr(), self.places.data_ptr(), self.values.data_ptr())
        arguments = [self.placed, self.nspans, *map(ctypes.c_uint32, (first_tile, end_tile, row))]
        arguments += [self.heads, starts, targets, patch, self.sums]
        launch("locate", blocks, 128, arguments, self.locate_shared)

    def result(self) -> tuple[DevicePatch, list[Outcome]]:
        """Waits for all of it."""
        errors = self.columns[:, _ERROR].cpu().numpy()
        found = self.sums.cpu().numpy().view(SUMS).reshape(-1)
        _check(errors)
        bounds = np.searchsorted(self.changing["tensor"], np.arange(len(self.table) + 1))
        tiles = np.append(self.changing["tile0"], self.ntiles)[bounds]
        starts = np.append(self.changing["start"], self.total)[bounds]
        before, after = lanes(found["before"]), lanes(found["before"] + found["change"])
        outcomes = list(map(Outcome, np.diff(starts.astype(np.int64)).tolist(), before, after))
        pairs = (list(itertools.pairwise(column.tolist())) for column in (tiles, starts))
        arrays = (self.placed, len(self.changing), self.ntiles, self.firsts, self.places, self.values)
        return DevicePatch(self.gpu, self.kernels, *arrays, *pairs), outcomes


def _slabs(ends: NDArray[np.int64], size: int) -> list[tuple[int, int, int]]:
    """Chunks cut into parts of about `size` changes: first, first after them, and how many changes."""
    slabs = []
    first = begin = 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, begin + size, "right")))
        slabs.append((first, end, int(ends[end - 1]) - begin))
        first, begin = end, int(ends[end - 1])
    return slabs


def _first_and_rest(table: Table) -> list[tuple[int, int]]:
    """The tensors that have the first `_AHEAD` of all bytes, and the others, as far as there are any."""
    upto = np.cumsum(table.count)
    first = int(np.searchsorted(upto, _AHEAD * upto[-1])) + 1
    return [(0, first), (first, len(table))] if first < len(table) else [(0, len(table))]


def _spans(table: Table, chunks: Chunks, first: int, end: int, payloads: NDArray[np.int64]) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Of tensors `first` … `end`: chunks that change something, with the lengths of their bodies in `start`, and the rest, only digested.

    `payloads` are the addresses of payloads on the device.
    """
    spans = table.spans(chunks.tensor, chunks.first)
    spans["base"] = addresses(table.base, chunks.tensor, chunks.first, table.itemsize)
    spans["next"] = (payloads[chunks.tensor] + chunks.start).astype(np.uint64)
    spans["count"] = chunks.elements
    spans["top"] = chunks.top
    spans["start"] = chunks.length
    spans["mode"] = chunks.mode
    same = chunks.mode == SAME
    has_payload = np.zeros(len(table), np.bool_)
    has_payload[chunks.tensor] = True
    unchanged = table.blocks(first + np.flatnonzero((~has_payload & (table.base != 0))[first:end]))
    return spans[~same], np.concatenate([unchanged, spans[same & (spans["base"] != 0)]])


def _check(errors: NDArray[np.int64]) -> None:
    if errors.any():
        raise CorruptDelta(_ERRORS[int(errors[np.flatnonzero(errors)[0]])])

"""Resolve on the GPU: payloads decoded against weights that stay where they are, into a patch that stays there too."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from ..base import Buffer, Outcome
from .compiler import Kernels, copy_to_device, is_pinned, kernels
from .spans import BLOCK, CONTEXTS, SPAN, SUMS, TILE, Changes, Facts, lanes, place_tiles, spans_of, upload

SAME, CODED, RAW = range(3)
_CHUNK_HEADER, _HEADER_AND_TOP = struct.Struct("<II"), struct.Struct("<IIH")
_LONGEST_BODY = 1 << 21
"""Bytes of a coded body: 2^15 changes of the longest codes take less."""

_SLACK = 4 << 20
"""Bytes after the payloads: see `StreamReader`."""

_MOST_WIDE = 256
_SHARE = 0.004
_LEAST_SLAB, _MOST_SLABS = 1 << 20, 12
"""Changes that are located at a time: so many that their lists take this share of the weights' bytes, or a twelfth of all."""

_MOST_COPIES = 512
_COPY_THREADS, _COPY_PART = 8, 4 << 20
"""Threads that bring payloads into pinned memory, and bytes that one of them takes at a time."""

_LONGEST_ROW = 8
_COUNT_BLOCKS, _LOCATE_BLOCKS = 7, 6
"""Thread blocks per processor."""

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


class _Patch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("firsts", "places", "values")]


@dataclass(slots=True)
class DevicePatch:
    """The changes of many tensors of one width: per tile of 2^14 elements, places (16 bits) and values, ascending."""

    kernels: Kernels
    spans: torch.Tensor
    nspans: int
    ntiles: int
    firsts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    tiles: list[tuple[int, int]]
    """Of each tensor: its first tile, and the first after them. Tiles are counted over those chunks that change."""
    starts: list[tuple[int, int]]
    """Of each tensor: its first change, and the first after them."""

    def write(self, bases: Sequence[int], *, swap: bool) -> None:
        """Write the values to tensors that start at these addresses (0: not to this one), on the current stream.

        With `swap`, the patch keeps the values that it replaces: then the same call once more takes everything back.
        """
        addresses = upload(np.array(bases, np.uint64), self.spans.device)
        blocks = min(-(-self.ntiles // 8), 32 * self.kernels.processors)
        arguments = [self.spans, ctypes.c_uint32(self.nspans), ctypes.c_uint32(self.ntiles), self._struct(), addresses]
        self.kernels.launch("swap_patch" if swap else "write_patch", blocks, 256, arguments)

    def indices(self, tensor: int) -> torch.Tensor:
        """Flat indices of a tensor's changes, ascending, 64 bits each."""
        first, end = self.starts[tensor]
        out = torch.empty(end - first, dtype=torch.int64, device=self.spans.device)
        first_tile, end_tile = self.tiles[tensor]
        arguments = [self.spans, *map(ctypes.c_uint32, (self.nspans, first_tile, end_tile)), self._struct(), out]
        self.kernels.launch("flat_indices", -(-(end_tile - first_tile) // 8), 256, arguments)
        return out

    def values_of(self, tensor: int) -> torch.Tensor:
        """The values of a tensor's changes, as integers: the new ones, or the old ones once they were swapped."""
        return self.values[slice(*self.starts[tensor])]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.spans, self.firsts, self.places, self.values))

    def _struct(self) -> _Patch:
        return _Patch(self.firsts.data_ptr(), self.places.data_ptr(), self.values.data_ptr())


def resolve_tensors(tensors: Sequence[Facts], payloads: Sequence[Buffer | None], device: torch.device) -> tuple[DevicePatch, list[Outcome]]:
    """Decode and digest tensors of one width, on the current stream. Nothing is written to them.

    A tensor without a payload is only digested. Raises `CorruptDelta`, `DtypeMismatch` or `ShapeMismatch`.
    """
    kernel = kernels(tensors[0].dtype.width, device.index)
    count_shared, locate_shared, head_size = kernel.constants("resolve_sizes", 3)
    data = _Payloads(payloads, device)
    changing, quiet = _spans(tensors, payloads, data)
    ntiles = place_tiles(changing)
    quiet_tiles = place_tiles(quiet)
    launch = kernel.launch

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    sums = torch.zeros(len(tensors) * SUMS.itemsize, dtype=torch.uint8, device=device)
    spans = upload(changing, device)
    nspans, tiles = ctypes.c_uint32(len(changing)), ctypes.c_uint32(ntiles)
    elements, starts = empty(ntiles * CONTEXTS, torch.int16), empty(ntiles * CONTEXTS, torch.int32)
    scan_blocks = min(-(-ntiles // 4), _COUNT_BLOCKS * kernel.processors)
    launch("count_elements", scan_blocks, 128, [spans, nspans, tiles, elements, Changes(), sums], count_shared)
    if quiet_tiles:
        arguments = [upload(quiet, device), ctypes.c_uint32(len(quiet)), ctypes.c_uint32(quiet_tiles), sums]
        launch("digest", min(-(-quiet_tiles // 8), 3 * kernel.processors), 256, arguments)
    head_words = np.zeros((len(changing), head_size // 4), np.uint32)
    head_words[:, 0] = changing["start"]  # the length of the body, until it is known where the changes start
    heads = upload(head_words, device)[: head_words.nbytes].view(torch.int32)
    data.arrive()
    launch("read_heads", -(-len(changing) // 64), 64, [spans, nspans, heads])
    if (changing["mode"] == RAW).any():
        launch("count_raw", -(-ntiles // 4), 128, [spans, nspans, tiles, heads, starts])
    launch("start_tiles", len(changing), 512, [spans, heads, elements, starts])
    columns = heads.view(len(changing), head_size // 4)
    totals = columns[:, [1, 2, 4]].to(torch.int64).cpu().numpy()  # waits
    _check(totals[:, 1])

    ends = np.cumsum(totals[:, 0])
    total = int(ends[-1]) if ends.size else 0
    if total >= 2**32:
        raise ShapeMismatch("a delta of 2^32 changes or more cannot be resolved on a GPU at once.")
    changing["start"] = ends - totals[:, 0]
    spans = upload(changing, device)
    integer = getattr(torch, f"int{tensors[0].dtype.width}")
    patch = _Patched(empty(ntiles + 1, torch.int32), empty(total, torch.int16), empty(total, integer))
    patch.firsts[ntiles:].fill_(total - (1 << 32) if total >= 1 << 31 else total)
    address = _Patch(patch.firsts.data_ptr(), patch.places.data_ptr(), patch.values.data_ptr())
    # All chunks are decoded at once, as each takes its time; their changes wait where the patch will be.
    larger_at = torch.cumsum(columns[:, 4], 0, dtype=torch.int32)
    wide, larger = empty(len(changing) * _MOST_WIDE * 2, torch.int32), empty(int(totals[:, 2].sum()), torch.int16)
    arrays = (patch.places, patch.values, wide, larger, larger_at)
    decoded = _Decoded(*(array.data_ptr() for array in arrays))
    launch("decode_streams", -(-len(changing) // 2), 64, [spans, nspans, heads, decoded])
    weights = sum(t.count * t.dtype.itemsize for t in tensors)
    slabs = _slabs(ends, max(int(_SHARE * weights / (4 + tensors[0].dtype.itemsize)), total // _MOST_SLABS, _LEAST_SLAB))
    most = max((changes for _, _, changes in slabs), default=0)
    ranks, operands = empty(most, torch.int32), empty(most, integer)
    for first, end, _ in slabs:
        targets = _Targets(ranks.data_ptr(), operands.data_ptr(), int(changing["start"][first]))
        launch("sum_gaps", end - first, 512, [spans, ctypes.c_uint32(first), heads, decoded, targets])
        first_tile = int(changing["tile0"][first])
        end_tile = int(changing["tile0"][end]) if end < len(changing) else ntiles
        # To find where a tile's changes start takes a search; a warp that goes on with the next tile is spared it.
        row = min(max((end_tile - first_tile) // (8 * _LOCATE_BLOCKS * kernel.processors), 1), _LONGEST_ROW)
        blocks = min(-(-(end_tile - first_tile) // (4 * row)), _LOCATE_BLOCKS * kernel.processors)
        arguments = [spans, nspans, *map(ctypes.c_uint32, (first_tile, end_tile, row)), heads, starts, targets, address, sums]
        launch("locate", blocks, 128, arguments, locate_shared)
    errors = columns[:, 2].cpu().numpy()
    found = sums.cpu().numpy().view(SUMS).reshape(-1)  # both wait
    _check(errors)

    owner = changing["tensor"]
    bounds = np.searchsorted(owner, np.arange(len(tensors) + 1))
    tile_bounds = np.append(changing["tile0"], ntiles)[bounds].tolist()
    start_bounds = np.append(changing["start"], total)[bounds].tolist()
    before, after = lanes(found["before"]), lanes(found["before"] + found["change"])
    outcomes = [Outcome(*facts) for facts in zip(np.diff(start_bounds).tolist(), before, after, strict=True)]
    result = DevicePatch(
        kernel,
        spans,
        len(changing),
        ntiles,
        patch.firsts,
        patch.places,
        patch.values,
        list(itertools.pairwise(tile_bounds)),
        list(itertools.pairwise(start_bounds)),
    )
    return result, outcomes


@dataclass(slots=True)
class _Patched:
    firsts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


def _slabs(ends: NDArray[np.int64], size: int) -> list[tuple[int, int, int]]:
    """Chunks cut into parts of about `size` changes: first, first after them, and how many changes."""
    slabs = []
    first = begin = 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, begin + size, "right")))
        slabs.append((first, end, int(ends[end - 1]) - begin))
        first, begin = end, int(ends[end - 1])
    return slabs


class _Payloads:
    """All payloads one after the other on the device, with room after them for readers that are led astray."""

    def __init__(self, payloads: Sequence[Buffer | None], device: torch.device) -> None:
        self._views = [None if payload is None else memoryview(payload).cast("B") for payload in payloads]
        self.starts = np.cumsum([0, *(0 if view is None else len(view) for view in self._views)])
        self.bytes = torch.empty(int(self.starts[-1]) + _SLACK, dtype=torch.uint8, device=device)
        self.bytes[int(self.starts[-1]) :].zero_()

    def arrive(self) -> None:
        """Copy them, by way of pinned memory if they are not in such; meanwhile the device goes on with what it was given to do."""
        views = [(start, view) for start, view in zip(self.starts.tolist(), self._views, strict=False) if view]
        current, copies = torch.cuda.current_stream(self.bytes.device), torch.cuda.Stream(self.bytes.device)
        if len(views) < _MOST_COPIES and all(is_pinned(_host_address(view)) for _, view in views):
            for start, view in views:
                copy_to_device(self.bytes.data_ptr() + start, _host_address(view), len(view), copies)
            copies.synchronize()  # the caller may do with its memory what it likes
        elif views:
            staged = _staged(views, int(self.starts[-1]))
            with torch.cuda.stream(copies):
                self.bytes[: staged.numel()].copy_(staged, non_blocking=True)
        current.wait_stream(copies)
        self.bytes.record_stream(copies)


def _staged(views: Sequence[tuple[int, memoryview]], size: int) -> torch.Tensor:
    """A copy in pinned memory, made by several threads if it is large."""
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = staged.numpy()

    def stage(parts: Sequence[tuple[int, memoryview]]) -> None:
        for start, part in parts:
            host[start : start + len(part)] = np.frombuffer(part, np.uint8)

    if size < 4 * _COPY_PART:
        stage(views)
        return staged
    tasks: list[list[tuple[int, memoryview]]] = []
    room = 0
    for start, view in views:
        for at in range(0, len(view), _COPY_PART):
            part = view[at : at + _COPY_PART]
            if len(part) > room:
                tasks.append([])
                room = _COPY_PART
            tasks[-1].append((start + at, part))
            room -= len(part)
    with ThreadPoolExecutor(_COPY_THREADS) as pool:
        for done in [pool.submit(stage, task) for task in tasks]:
            done.result()
    return staged


def _host_address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _spans(tensors: Sequence[Facts], payloads: Sequence[Buffer | None], data: _Payloads) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Chunks that change something, with the lengths of their bodies in `start`, and the rest, which is only digested."""
    chunks = read_chunks(tensors, payloads)
    owner = chunks.tensor

    def per_tensor(values: list[int], dtype: type[np.generic]) -> NDArray[Any]:
        return np.array(values, dtype)[owner]

    spans = np.zeros(owner.size, SPAN)
    spans["first"] = chunks.first
    width = np.uint64(tensors[0].dtype.itemsize)
    address = per_tensor([t.base for t in tensors], np.uint64)
    spans["base"] = np.where(address != 0, address + chunks.first.astype(np.uint64) * width, 0)
    spans["next"] = np.uint64(data.bytes.data_ptr()) + (data.starts[:-1][owner] + chunks.start).astype(np.uint64)
    spans["seed"] = per_tensor([t.seed for t in tensors], np.uint64)
    spans["count"] = chunks.elements
    spans["tensor"] = owner
    spans["top"] = chunks.top
    spans["shift"] = per_tensor([t.dtype.exponent_shift for t in tensors], np.uint32)
    spans["mask"] = per_tensor([(1 << t.dtype.exponent_bits) - 1 for t in tensors], np.uint32)
    spans["start"] = chunks.length
    spans["mode"] = chunks.mode
    same = chunks.mode == SAME
    still = [index for index, payload in enumerate(payloads) if payload is None and tensors[index].base]
    unchanged = spans_of([tensors[index] for index in still]) if still else np.zeros(0, SPAN)
    if still:
        unchanged["tensor"] = np.array(still, np.uint32)[unchanged["tensor"]]
    return spans[~same], np.concatenate([unchanged, spans[same & (address != 0)]])


@dataclass(slots=True)
class _Chunks:
    """The chunks of many payloads."""

    tensor: NDArray[np.int64]
    first: NDArray[np.int64]
    elements: NDArray[np.int64]
    mode: NDArray[np.int64]
    start: NDArray[np.int64]
    """Of the body, in its payload."""
    length: NDArray[np.int64]
    top: NDArray[np.int64]
    """The first 11 bits of a coded body."""


def read_chunks(tensors: Sequence[Facts], payloads: Sequence[Buffer | None]) -> _Chunks:
    """Find all chunks (docs/format.md §3); checked as far as that goes without decoding."""
    unpack = _HEADER_AND_TOP.unpack_from
    words: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    tops: list[int] = []
    counts: list[int] = []
    for tensor, payload in zip(tensors, payloads, strict=True):
        before = len(words)
        if payload is not None:
            view = memoryview(payload).cast("B")
            end = len(view)
            if not end:
                raise CorruptDelta("a payload is empty.")
            if view[0] != tensor.dtype.code:
                raise DtypeMismatch("a tensor has another element type than its delta.")
            at = 1
            whole = end - 10  # from here on, the first bits of a body can be read with the header before it
            while at < end:
                if at <= whole:
                    word, length, ahead = unpack(view, at)
                elif end - at < 8:
                    raise CorruptDelta("a chunk's header is cut short.")
                else:
                    word, length = _CHUNK_HEADER.unpack_from(view, at)
                    ahead = 0  # too short a body for a top; it will be refused, or it is none
                at += 8
                words.append(word)
                starts.append(at)
                lengths.append(length)
                tops.append(ahead)
                at += length
            if at > end:
                raise CorruptDelta("a chunk's body is cut short.")
        counts.append(len(words) - before)
    owner = np.repeat(np.arange(len(tensors)), counts)
    both, start, size = np.array(words, np.int64), np.array(starts, np.int64), np.array(lengths, np.int64)
    elements, mode = both & ((1 << 30) - 1), both >> 30
    if ((elements < 1) | (elements > BLOCK)).any():
        raise CorruptDelta("a chunk has an impossible number of elements.")
    raw = elements * tensors[0].dtype.itemsize
    if not np.select([mode == SAME, mode == CODED, mode == RAW], [size == 0, size > 0, size == raw], False).all():
        raise CorruptDelta("a chunk's size does not fit its mode.")
    if (size[mode == CODED] > _LONGEST_BODY).any():
        raise CorruptDelta("a chunk's body is longer than its streams.")
    last = np.append(owner[1:] != owner[:-1], True) if owner.size else np.zeros(0, np.bool_)
    if (elements[~last] % TILE).any():
        raise CorruptDelta("a chunk before the last is not a multiple of 16384 elements.")
    running = np.cumsum(elements) - elements
    first_chunk = np.cumsum(counts) - counts
    covered = np.zeros(len(tensors), np.int64)
    np.add.at(covered, owner, elements)
    for index, (tensor, payload) in enumerate(zip(tensors, payloads, strict=True)):
        if payload is not None and covered[index] != tensor.count:
            raise ShapeMismatch(f"the delta is for {covered[index]} elements, the tensor has {tensor.count}.")
    first = running - running[first_chunk[owner]] if owner.size else running
    return _Chunks(owner, first, elements, mode, start, size, np.where(mode == CODED, np.array(tops, np.int64) & 0x7FF, 0))


def _check(errors: NDArray[np.int64]) -> None:
    if errors.any():
        raise CorruptDelta(_ERRORS[int(errors[np.flatnonzero(errors)[0]])])

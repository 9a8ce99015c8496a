"""Payloads in the host's memory: where their chunks are, and their way to the device."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta, DtypeMismatch, ShapeMismatch
from ..base import Buffer
from .device import Gpu
from .spans import BLOCK, TILE, Table

SAME, CODED, RAW = range(3)
_HEADER_AND_TOP, _HEADER = struct.Struct("<IIH"), struct.Struct("<II")
_LONGEST_BODY = 1 << 21
"""Bytes of a coded body: 2^15 changes of the longest codes take less."""

_SLACK = 4 << 20
"""Bytes after the payloads on the device: see `StreamReader`."""

_MOST_COPIES = 512
_COPY_THREADS, _COPY_PART = 8, 1 << 20
"""Threads that bring payloads into pinned memory, and bytes that one of them takes at a time."""

_FEW = 16
"""Chunks are found for all tensors at once while there are more than so many that have chunks left."""

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Chunks:
    """The chunks of many payloads, in the order of tensors."""

    tensor: Numbers
    first: Numbers
    elements: Numbers
    mode: Numbers
    start: Numbers
    """Of the body, in its payload."""
    length: Numbers
    top: Numbers
    """The first 11 bits of a coded body."""


class Payloads:
    """Payloads of tensors, None for those that have none. Those that touch in memory, as in a file, travel as one."""

    def __init__(self, payloads: Sequence[Buffer | None]) -> None:
        self.numbers: Numbers = np.array([i for i, payload in enumerate(payloads) if payload is not None], np.int64)
        """Of the tensors that have one."""
        self._payloads = [payload for payload in payloads if payload is not None]
        self._addresses, self._lengths = _places_in_memory(self._payloads)
        if (self._lengths == 0).any():
            raise CorruptDelta("a payload is empty.")
        order = np.argsort(self._addresses, kind="stable")
        begins, ends = self._addresses[order], np.maximum.accumulate((self._addresses + self._lengths)[order])
        breaks = np.append(True, begins[1:] > ends[:-1])[: begins.size]
        self._runs = begins[breaks]
        self._sizes = ends[np.append(breaks[1:], True)[: ends.size]] - self._runs
        self._places = np.cumsum(self._sizes) - self._sizes
        run = np.empty(order.size, np.int64)
        run[order] = np.cumsum(breaks) - 1
        self._starts: Numbers = self._places[run] + self._addresses - self._runs[run]
        self.size = int(self._sizes.sum())
        """Bytes of all of them."""

    def room(self, gpu: Gpu) -> torch.Tensor:
        """Memory on the device for all of them, and for readers that are led astray."""
        room = gpu.empty(self.size + _SLACK, torch.uint8)
        room[self.size :].zero_()
        return room

    def starts(self, count: int) -> Numbers:
        """Where the payload of each of `count` tensors will begin in that room."""
        starts = np.zeros(count, np.int64)
        starts[self.numbers] = self._starts
        return starts

    def arrive(self, room: torch.Tensor, gpu: Gpu) -> torch.Tensor | None:
        """Start to copy them on the current stream, by way of pinned memory (which is returned) where they are not in such."""
        stream, to = gpu.current(), room.data_ptr()
        runs = list(zip(self._runs.tolist(), self._sizes.tolist(), self._places.tolist(), strict=True))
        if len(runs) <= _MOST_COPIES and all(gpu.is_pinned(a) and gpu.is_pinned(a + size - 1) for a, size, _ in runs):
            for address, size, place in runs:
                gpu.copy_in(to + place, address, size, stream)
            return None
        staged = gpu.pinned(self.size)
        begin, host = staged.data_ptr(), staged.numpy()
        tasks = _tasks(runs)
        low = int(self._runs.min(initial=0))
        memory = _window(low, int((self._runs + self._sizes).max(initial=low)) - low) if low else host

        def stage(task: list[tuple[int, int, int]]) -> None:
            if len(task) == 1:
                (address, size, place) = task[0]
                ctypes.memmove(begin + place, address, size)
            else:
                end = task[-1][2] + task[-1][1]
                np.concatenate([memory[address - low : address - low + size] for address, size, _ in task], out=host[task[0][2] : end])

        # Threads help with large runs; with small ones they would only get into each other's way.
        moves = _pool().map(stage, tasks) if len(tasks) >= 4 and len(runs) <= _MOST_COPIES else map(stage, tasks)
        for task, _ in zip(tasks, moves, strict=True):
            first, (_, size, last) = task[0][2], task[-1]
            gpu.copy_in(to + first, begin + first, last + size - first, stream)
        return staged

    def chunks(self, table: Table, first: int, end: int) -> Chunks:
        """Find all chunks of tensors `first` … `end` (docs/format.md §3); checked as far as that goes without decoding."""
        mine = slice(*np.searchsorted(self.numbers, (first, end)).tolist())
        part = _Part(self._payloads[mine], self.numbers[mine], self._addresses[mine], self._lengths[mine])
        return part.chunks(table)


@dataclass(slots=True)
class _Part:
    """Payloads of a run of tensors."""

    payloads: Sequence[Buffer]
    numbers: Numbers
    addresses: Numbers
    lengths: Numbers

    def chunks(self, table: Table) -> Chunks:
        if not self.payloads:
            return Chunks(*(np.zeros(0, np.int64) for _ in range(7)))
        low = int(self.addresses.min())
        memory = _window(low, int((self.addresses + self.lengths).max()) - low)
        at = self.addresses - low
        ends = at + self.lengths
        if (memory[at] != table.codes[self.numbers]).any():
            raise DtypeMismatch("a tensor has another element type than its delta.")
        begins, at = at, at + 1
        which = np.flatnonzero(at < ends)
        found: list[tuple[Numbers, Numbers, Numbers, Numbers, Numbers]] = []
        offsets = np.arange(8)
        while which.size > _FEW:
            here, end = at[which], ends[which]
            if (end - here < 8).any():
                raise CorruptDelta("a chunk's header is cut short.")
            words = memory[here[:, None] + offsets].view("<u4").astype(np.int64)
            top_at = np.minimum(here + 8, end - 2)  # a body too short for a top will be refused, or it is none
            top = np.where(here + 10 <= end, memory[top_at].astype(np.int64) | memory[top_at + 1].astype(np.int64) << 8, 0)
            found.append((which, words[:, 0], here + 8, words[:, 1], top))
            at[which] = here = here + 8 + words[:, 1]
            if (here > end).any():
                raise CorruptDelta("a chunk's body is cut short.")
            which = which[here < end]
        for index in which.tolist():
            found.append(_walk(index, self.payloads[index], int(at[index] - begins[index]), int(begins[index])))
        return self._checked(found, begins, table)

    def _checked(self, found: list[tuple[Numbers, Numbers, Numbers, Numbers, Numbers]], begins: Numbers, table: Table) -> Chunks:
        columns = zip(*found, strict=True) if found else [()] * 5
        index, word, start, length, top = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
        order = np.argsort(index, kind="stable")
        index, word, start, length, top = (column[order] for column in (index, word, start, length, top))
        elements, mode = word & ((1 << 30) - 1), word >> 30
        if ((elements < 1) | (elements > BLOCK)).any():
            raise CorruptDelta("a chunk has an impossible number of elements.")
        raw = elements * table.itemsize
        if not np.select([mode == SAME, mode == CODED, mode == RAW], [length == 0, length > 0, length == raw], False).all():
            raise CorruptDelta("a chunk's size does not fit its mode.")
        if (length[mode == CODED] > _LONGEST_BODY).any():
            raise CorruptDelta("a chunk's body is longer than its streams.")
        last = np.append(index[1:] != index[:-1], True)[: index.size]
        if (elements[~last] % TILE).any():
            raise CorruptDelta("a chunk before the last is not a multiple of 16384 elements.")
        covered = np.bincount(index, elements, self.numbers.size).astype(np.int64)  # exact: sums of a tensor stay below 2^53
        wrong = np.flatnonzero(covered != table.count[self.numbers])
        if wrong.size:
            there = table.count[self.numbers[wrong[0]]]
            raise ShapeMismatch(f"the delta is for {covered[wrong[0]]} elements, the tensor has {there}.")
        running = np.cumsum(elements) - elements
        heads = np.append(True, last[:-1])[: index.size]
        first = running - running[heads][np.cumsum(heads) - 1]
        return Chunks(self.numbers[index], first, elements, mode, start - begins[index], length, np.where(mode == CODED, top & 0x7FF, 0))


def _walk(index: int, payload: Buffer, at: int, begin: int) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """The chunks of one payload from `at` on, with places counted from where it begins at `begin`."""
    rows: list[tuple[int, int, int, int]] = []
    end = memoryview(payload).nbytes
    whole = end - 10  # from here on, the first bits of a body cannot be read with the header before it
    unpack = _HEADER_AND_TOP.unpack_from
    while at < end:
        if at <= whole:
            word, length, top = unpack(payload, at)
        elif end - at < 8:
            raise CorruptDelta("a chunk's header is cut short.")
        else:
            word, length = _HEADER.unpack_from(payload, at)
            top = 0
        at += 8
        rows.append((word, begin + at, length, top))
        at += length
    if at > end:
        raise CorruptDelta("a chunk's body is cut short.")
    word, start, length, top = np.array(rows, np.int64).T
    return np.full(len(rows), index, np.int64), word, start, length, top


def _tasks(runs: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Runs cut up, or put together, to about a part each; what a task brings over is in one piece at its place."""
    tasks: list[list[tuple[int, int, int]]] = []
    room = 0
    for address, size, place in runs:
        for at in range(0, size, _COPY_PART):
            part = min(_COPY_PART, size - at)
            if part > room:
                tasks.append([])
                room = _COPY_PART
            tasks[-1].append((address + at, part, place + at))
            room -= part
    return tasks


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the C API."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


def _places_in_memory(buffers: Sequence[Buffer]) -> tuple[Numbers, Numbers]:
    """Addresses and lengths in bytes. By the C API: an array of each would take three times as long, for thousands of them."""
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    view = _PyBuffer()
    here = ctypes.byref(view)
    addresses, lengths = [], []
    for buffer in buffers:
        if get(ctypes.py_object(buffer), here, 0):
            raise BufferError("a payload is not one piece of memory")
        addresses.append(view.buf or 0)
        lengths.append(view.len)
        release(here)
    return np.array(addresses, np.int64), np.array(lengths, np.int64)


def _window(address: int, size: int) -> NDArray[np.uint8]:
    """Memory from here on as an array. There may be holes in it that belong to no one: the caller knows where it may look."""
    window: Any = (ctypes.c_uint8 * size).from_address(address)
    array: NDArray[np.uint8] = np.frombuffer(window, np.uint8)
    return array


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="deltawire-copy")

"""Payloads in host memory, and their copies to the device. There they form one image: all payloads, one after the other."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..base import Buffer
from .device import Gpu
from .kernel_table import Numbers

SLACK = 16 << 10
"""Bytes after an image on the device; see `CodeReader` in decode.cuh."""

_MOST_COPIES = 512
"""The most pieces of pinned memory that are copied one by one. More pieces are first collected in new pinned memory."""

_COPY_THREADS, _COPY_LEAST = 8, 1 << 18
"""The most threads that copy payloads into pinned memory, and the bytes from which on another thread is worth its start."""

_PARTS = 2 * _COPY_THREADS
"""The most parts that an image is copied in. The first half goes to the device while threads copy the second into pinned memory."""

_Run = tuple[int, int, int]
"""A piece of host memory: its address, its size, and its offset in the image."""


class Payloads:
    """Payloads, which are ranges of `data`. If `data` is not pinned memory, threads copy them to pinned memory."""

    def __init__(self, ranges: Sequence[tuple[int, int]], data: Buffer, gpu: Gpu) -> None:
        limits = np.array(ranges, np.int64).reshape(-1, 2)
        self.data = np.frombuffer(data, np.uint8)  # it keeps the payloads alive
        self.begins: Numbers
        """Where each payload begins in `data`, and where it ends."""
        self.begins, self.ends = limits.T
        self._gpu = gpu
        ends = np.cumsum(self.ends - self.begins)
        self.offsets: Numbers = ends - (self.ends - self.begins)
        """The offset of each payload in the image."""
        self.size = int(ends[-1]) if ends.size else 0
        breaks = np.flatnonzero(np.append(True, self.begins[1:] != self.ends[:-1])[: ends.size])
        starts = self.offsets[breaks]
        sizes = np.diff(np.append(starts, self.size))
        addresses = self.data.ctypes.data + self.begins[breaks]
        runs = [run for run in zip(addresses.tolist(), sizes.tolist(), starts.tolist(), strict=True) if run[1]]
        bounds = np.linspace(0, self.size, min(_PARTS, -(-self.size // _COPY_LEAST)) + 1).astype(np.int64).tolist()
        self._parts: list[tuple[int, int, Future[None] | None]] = []
        """The bounds of the parts that are not copied to the device yet, and what must be done before they can be."""
        pinned = gpu.is_pinned
        if len(runs) > _MOST_COPIES or not all(pinned(a) and pinned(a + size - 1) for a, size, _ in runs):
            self._staged = gpu.pinned(self.size)
            to, held = self._staged.data_ptr(), (self.data, self._staged)
            for begin, end in itertools.pairwise(bounds):
                self._parts.append((begin, end, _pool().submit(_move, _cut(runs, begin, end), to, held)))
            runs = [(to, self.size, 0)] if self.size else []
        elif self.size:
            self._parts = [(0, self.size, None)]
        self._runs: list[_Run] = runs

    def room(self) -> torch.Tensor:
        """Return memory for the whole image on the device, and slack for kernels that read beyond a corrupt payload."""
        room = self._gpu.empty(self.size + SLACK, torch.uint8)
        room[self.size :].zero_()
        return room

    def advance(self, room: torch.Tensor, *, wait: bool = False) -> None:
        """Start to copy all parts that are ready to `room`, on the current stream. With `wait`, wait until all are ready."""
        if self._parts and not wait:
            time.sleep(0)  # lets threads that are done with a part start the next one: they need Python's lock for that
        while self._parts:
            begin, end, move = self._parts[0]
            if move is not None:
                if not wait and not move.done():
                    return
                move.result()
            self.copy(begin, end, room.data_ptr() + begin)
            del self._parts[0]

    def copy(self, begin: int, end: int, to: int) -> None:
        """Start to copy bytes `begin` … `end` of the image to an address on the device, on the current stream."""
        stream = self._gpu.current()
        for address, size, offset in _cut(self._runs, begin, end):
            self._gpu.copy_in(to + offset - begin, address, size, stream)

    def windows(self, parts: Sequence[tuple[int, int]], buffers: Sequence[int]) -> Iterator[int]:
        """Copy parts of the image to the device, one after the other. Yield, for each, the address that corresponds to offset 0.

        `buffers` are the addresses of two buffers that can hold any part and `SLACK`. All work that uses a part must be on the current
        stream before the next part is requested.
        """
        gpu, main, copies = self._gpu, self._gpu.current(), self._gpu.stream("copies")
        copies.wait_stream(main)
        used: list[torch.cuda.Event] = []
        there: list[torch.cuda.Event] = []
        for turn, (begin, _) in enumerate(parts):
            for number in range(len(there), min(turn + 2, len(parts))):  # the next part is copied while this one is decoded
                if number >= 2:
                    copies.wait_event(used[number - 2])
                with gpu.using(copies):
                    self.copy(*parts[number], buffers[number % 2])
                    there.append(gpu.mark())
            main.wait_event(there[turn])
            yield buffers[turn % 2] - begin
            used.append(gpu.mark())


def _cut(runs: Sequence[_Run], begin: int, end: int) -> list[_Run]:
    """Return what these runs have between `begin` and `end` of the image."""
    found = []
    for address, size, offset in runs:
        low, high = max(begin, offset), min(end, offset + size)
        if low < high:
            found.append((address + low - offset, high - low, low))
    return found


def _move(runs: Sequence[_Run], to: int, held: object) -> None:
    """Copy runs to an image that begins at `to`. `held` owns the memory, and is alive until the copy is done."""
    for address, size, offset in runs:
        ctypes.memmove(to + offset, address, size)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="deltawire-copy")

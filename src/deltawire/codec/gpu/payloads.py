"""Payloads in host memory, and their copies to the device. There they form one image: all payloads in the order of the tensors."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import CorruptDelta
from ..base import Buffer
from .device import Gpu

SLACK = 16 << 10
"""Bytes after an image on the device; see `CodeReader` in decode.cuh."""

_MOST_COPIES = 512
"""The most pieces of pinned memory that are copied one by one. More pieces are first collected in new pinned memory."""

_COPY_THREADS, _COPY_LEAST = 8, 1 << 18
"""The most threads that copy payloads into pinned memory, and the bytes from which on another thread is worth its start."""

_FIRST_PART = 0.25
"""The share of the payloads that is copied there first."""

Numbers = NDArray[np.int64]
PayloadRanges = Sequence[tuple[int, int] | None]
"""The range of each tensor's payload; None if it has none."""

_NO_PAYLOAD = (-1, -1)
_Run = tuple[int, int, int]
"""A piece of host memory: its address, its size, and its offset in the image."""


class Payloads:
    """The payloads of tensors, which are ranges of `data`. If `data` is not pinned memory, threads copy them to pinned memory."""

    def __init__(self, ranges: PayloadRanges, data: Buffer, gpu: Gpu) -> None:
        numbers = itertools.chain.from_iterable([payload or _NO_PAYLOAD for payload in ranges])
        bounds = np.fromiter(numbers, np.int64, 2 * len(ranges)).reshape(-1, 2)
        self.numbers: Numbers = np.flatnonzero(bounds[:, 0] >= 0)
        """The numbers of the tensors that have a payload."""
        begins, ends = bounds[self.numbers].T
        self._data = np.frombuffer(data, np.uint8)  # it keeps the payloads alive
        self._gpu = gpu
        self.lengths: Numbers = ends - begins
        """The length of each payload in bytes."""
        self.addresses: Numbers = self._data.ctypes.data + begins
        """The addresses at which the device can read the payloads."""
        if (self.lengths == 0).any():
            raise CorruptDelta("a payload is empty.")
        ends = np.cumsum(self.lengths)
        self.offsets: Numbers = ends - self.lengths
        """The offset of each payload in the image."""
        self.size = int(self.lengths.sum())
        breaks = np.flatnonzero(np.append(True, self.addresses[1:] != (self.addresses + self.lengths)[:-1])[: ends.size])
        begins = self.offsets[breaks]
        sizes = np.diff(np.append(begins, self.size))
        self._runs: list[_Run] = list(zip(self.addresses[breaks].tolist(), sizes.tolist(), begins.tolist(), strict=True))
        self._moves: list[list[Future[None]]] = []
        """The copies of both parts, if threads copy them to pinned memory."""
        pinned = gpu.is_pinned
        if len(self._runs) > _MOST_COPIES or not all(pinned(a) and pinned(a + size - 1) for a, size, _ in self._runs):
            self._staged = gpu.pinned(self.size)
            begin = self._staged.data_ptr()
            first = self._end_of_first_part()
            held = (self._data, self._staged)
            self._moves = [_start_moves(_cut(self._runs, *part), begin, held) for part in ((0, first), (first, self.size))]
            self._runs = [(begin, self.size, 0)]
            self.addresses = begin + self.offsets
            wait(self._moves[0])

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield parts of `numbers` (first and end) as soon as the device can read them."""
        count = self.numbers.size
        first = int(np.searchsorted(self.offsets, self._end_of_first_part())) if self._moves else count
        for part, moves in itertools.zip_longest(((0, first), (first, count)), self._moves):
            for move in moves or ():
                move.result()
            if part[0] < part[1]:
                yield part

    def _end_of_first_part(self) -> int:
        """Return where the first part ends in the image. The device works on it while threads copy the rest."""
        last = int(np.searchsorted(self.offsets, _FIRST_PART * self.size))
        return int(self.offsets[last]) if last < self.offsets.size else self.size

    def copy(self, begin: int, end: int, to: int) -> None:
        """Start to copy bytes `begin` … `end` of the image to an address on the device, on the current stream."""
        stream = self._gpu.current()
        for address, size, offset in _cut(self._runs, begin, end):
            self._gpu.copy_in(to + offset - begin, address, size, stream)

    def room(self) -> torch.Tensor:
        """Return memory for the whole image on the device, and slack for kernels that read beyond a corrupt payload."""
        room = self._gpu.empty(self.size + SLACK, torch.uint8)
        room[self.size :].zero_()
        return room

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


def _start_moves(runs: Sequence[_Run], to: int, held: object) -> list[Future[None]]:
    """Start threads that copy runs to an image that begins at `to`, with about as many bytes for each thread.

    `held` owns the memory. The threads keep it alive until they are done, even if the caller does not wait for them.
    """
    if not runs:
        return []
    begin, end = runs[0][2], runs[-1][2] + runs[-1][1]
    bounds = np.linspace(begin, end, min(_COPY_THREADS, -(-(end - begin) // _COPY_LEAST)) + 1).astype(np.int64).tolist()
    return [_pool().submit(_move, _cut(runs, *part), to, held) for part in itertools.pairwise(bounds)]


def _move(runs: Sequence[_Run], to: int, held: object) -> None:
    for address, size, offset in runs:
        ctypes.memmove(to + offset, address, size)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="deltawire-copy")

"""Payloads in the host's memory, and their way to the device: as one image, all payloads in a row, in the order of tensors."""

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
"""Bytes after an image on the device: see `CodeReader`."""

_MOST_COPIES = 512
"""Pieces of pinned memory that are read where they are; if there are more, they are brought together."""

_COPY_THREADS, _COPY_LEAST = 8, 1 << 18
"""Threads that bring payloads into pinned memory, and bytes below which it is not worth another one."""

_FIRST_PART = 0.25
"""Share of the payloads that is brought there first."""

Numbers = NDArray[np.int64]
Spans = Sequence[tuple[int, int] | None]
"""Of each tensor's payload, if it has one: where it begins and ends."""

_NO_PAYLOAD = (-1, -1)
_Run = tuple[int, int, int]
"""A piece of the host's memory: address, size, and its place in the image."""


class Payloads:
    """Payloads of tensors, parts of `data`. Where that is not pinned memory, they are brought there, by threads."""

    def __init__(self, spans: Spans, data: Buffer, gpu: Gpu) -> None:
        numbers = itertools.chain.from_iterable([span or _NO_PAYLOAD for span in spans])
        bounds = np.fromiter(numbers, np.int64, 2 * len(spans)).reshape(-1, 2)
        self.numbers: Numbers = np.flatnonzero(bounds[:, 0] >= 0)
        """Of the tensors that have one."""
        begins, ends = bounds[self.numbers].T
        self._data = np.frombuffer(data, np.uint8)  # it keeps them where they are
        self._gpu = gpu
        self.lengths: Numbers = ends - begins
        """In bytes."""
        self.addresses: Numbers = self._data.ctypes.data + begins
        """Where the device can read them."""
        if (self.lengths == 0).any():
            raise CorruptDelta("a payload is empty.")
        ends = np.cumsum(self.lengths)
        self.places: Numbers = ends - self.lengths
        """In the image."""
        self.size = int(self.lengths.sum())
        breaks = np.flatnonzero(np.append(True, self.addresses[1:] != (self.addresses + self.lengths)[:-1])[: ends.size])
        begins = self.places[breaks]
        sizes = np.diff(np.append(begins, self.size))
        self._runs: list[_Run] = list(zip(self.addresses[breaks].tolist(), sizes.tolist(), begins.tolist(), strict=True))
        self._moves: list[list[Future[None]]] = []
        """Of both parts, if they are on their way to pinned memory."""
        pinned = gpu.is_pinned
        if len(self._runs) > _MOST_COPIES or not all(pinned(a) and pinned(a + size - 1) for a, size, _ in self._runs):
            self._staged = gpu.pinned(self.size)
            begin = self._staged.data_ptr()
            first = self._end_of_first_part()
            held = (self._data, self._staged)
            self._moves = [_moved(_cut(self._runs, *part), begin, held) for part in ((0, first), (first, self.size))]
            self._runs = [(begin, self.size, 0)]
            self.addresses = begin + self.places
            wait(self._moves[0])

    def parts(self) -> Iterator[tuple[int, int]]:
        """Parts of `numbers`, first and end, when the device can read them."""
        count = self.numbers.size
        first = int(np.searchsorted(self.places, self._end_of_first_part())) if self._moves else count
        for part, moves in itertools.zip_longest(((0, first), (first, count)), self._moves):
            for move in moves or ():
                move.result()
            if part[0] < part[1]:
                yield part

    def _end_of_first_part(self) -> int:
        """In the image: the device has something to do while threads are still at the rest."""
        last = int(np.searchsorted(self.places, _FIRST_PART * self.size))
        return int(self.places[last]) if last < self.places.size else self.size

    def copy(self, begin: int, end: int, to: int) -> None:
        """Start to copy bytes `begin` … `end` of the image to an address on the device, on the current stream."""
        stream = self._gpu.current()
        for address, size, place in _cut(self._runs, begin, end):
            self._gpu.copy_in(to + place - begin, address, size, stream)

    def room(self) -> torch.Tensor:
        """Memory for the whole image on the device, and for readers that are led astray."""
        room = self._gpu.empty(self.size + SLACK, torch.uint8)
        room[self.size :].zero_()
        return room

    def windows(self, parts: Sequence[tuple[int, int]], buffers: Sequence[int]) -> Iterator[int]:
        """Parts of the image on the device, one after the other, for the current stream: addresses that places are counted from.

        `buffers` are two places on the device with room for any of them, and `SLACK`. When the next one is asked for, all that uses this
        one must have been given to the stream.
        """
        gpu, main, copies = self._gpu, self._gpu.current(), self._gpu.stream("copies")
        copies.wait_stream(main)
        used: list[torch.cuda.Event] = []
        there: list[torch.cuda.Event] = []
        for turn, (begin, _) in enumerate(parts):
            for number in range(len(there), min(turn + 2, len(parts))):  # the next is on its way while this one is decoded
                if number >= 2:
                    copies.wait_event(used[number - 2])
                with gpu.using(copies):
                    self.copy(*parts[number], buffers[number % 2])
                    there.append(gpu.mark())
            main.wait_event(there[turn])
            yield buffers[turn % 2] - begin
            used.append(gpu.mark())


def _cut(runs: Sequence[_Run], begin: int, end: int) -> list[_Run]:
    """What of them is from `begin` to `end` in the image."""
    found = []
    for address, size, place in runs:
        low, high = max(begin, place), min(end, place + size)
        if low < high:
            found.append((address + low - place, high - low, low))
    return found


def _moved(runs: Sequence[_Run], to: int, held: object) -> list[Future[None]]:
    """Have runs brought to where an image begins at `to`, by threads that get about as many bytes each.

    `held` is what this memory belongs to: it lives until they are done, whatever becomes of who waits for them.
    """
    if not runs:
        return []
    begin, end = runs[0][2], runs[-1][2] + runs[-1][1]
    bounds = np.linspace(begin, end, min(_COPY_THREADS, -(-(end - begin) // _COPY_LEAST)) + 1).astype(np.int64).tolist()
    return [_pool().submit(_move, _cut(runs, *part), to, held) for part in itertools.pairwise(bounds)]


def _move(runs: Sequence[_Run], to: int, held: object) -> None:
    for address, size, place in runs:
        ctypes.memmove(to + place, address, size)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="deltawire-copy")

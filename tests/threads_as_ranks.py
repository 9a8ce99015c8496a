"""Threads act as the processes that publish together. They use the same protocol without torch, fast enough for many cases."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from deltawire.tensors.bits import TensorPart

LONGEST = 120.0
"""The seconds that a rank waits for the others."""


class Channels:
    """The tables and barriers of all channels."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._known: dict[Any, tuple[list[Any], threading.Barrier]] = {}
        self._aborted = False

    def get(self, key: Any) -> tuple[list[Any], threading.Barrier]:
        with self._lock:
            if key not in self._known:
                self._known[key] = [None] * self._size, threading.Barrier(self._size)
                if self._aborted:
                    self._known[key][1].abort()
            return self._known[key]

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for _, barrier in self._known.values():
                barrier.abort()


class ThreadRank:
    """One of `size` ranks that share a table. A rank that ends early breaks the barrier, so all others end too."""

    def __init__(self, rank: int, size: int, channels: Channels, number: int = 0) -> None:
        self.rank, self.size = rank, size
        self.moved = 0
        self._channels, self._opened = channels, 0
        self._number = number
        self._table, self._barrier = channels.get(number)

    def another_channel(self) -> ThreadRank:
        self._opened += 1
        return ThreadRank(self.rank, self.size, self._channels, self._number * 1000 + self._opened)

    def exchange(self, message: bytes) -> list[bytes]:
        return self._all(message)

    def broadcast(self, message: bytes) -> bytes:
        return self._all(message)[0]

    def maximum(self, values: Any) -> Any:
        return np.max(self._all(values.copy()), axis=0)

    def deliver(self, pieces: Sequence[Any]) -> list[memoryview]:
        assert len(pieces) == self.size
        self.moved += sum(memoryview(piece).nbytes for rank, piece in enumerate(pieces) if rank != self.rank)
        return [memoryview(bytes(theirs[self.rank])) for theirs in self._all(pieces)]

    def _all(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(LONGEST)
        everything = list(self._table)
        # all ranks have come this far, and the next barrier notices a rank that failed after this one
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(LONGEST)
        return everything


def run_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Run `work` at every rank. Return what each returned, or the exception with which it ended."""
    channels = Channels(size)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, size, channels))
        except BaseException as error:
            channels.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def shards_of(state: dict[str, Any], rank: int, size: int) -> dict[str, TensorPart]:
    """Return the rows that FSDP2 gives a rank, cut as by `torch.chunk`. The last ranks may have fewer rows, or none."""
    held = {}
    for name, array in state.items():
        rows, row = (array.shape[0], array[0].size if len(array) else 1) if array.ndim else (1, 1)
        each = -(-rows // size)
        start, stop = min(rank * each, rows) * row, min((rank + 1) * each, rows) * row
        held[name] = TensorPart(np.ascontiguousarray(array).reshape(-1)[start:stop], array.shape, start)
    return held

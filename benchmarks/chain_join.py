"""Measure what a late reader reads to reach the newest version, compared with replaying the whole chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
from chain_speed import directory
from chain_updates import training_run
from report import Table

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import ObjectMissing
from deltawire.store import open_store
from deltawire.store.base import ObjectInfo, Progress, Store
from deltawire.store.wrapped import WrappedStore


class CountingStore(WrappedStore):
    """Counts the requests and bytes of reading."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reset()

    def reset(self) -> None:
        self.records = self.files = self.bytes = self.lists = self.misses = 0

    def get(self, key: str, *, limit: int) -> bytes:
        try:
            data = super().get(key, limit=limit)
        except ObjectMissing:
            self.misses += 1
            raise
        self.records += 1
        self.bytes += len(data)
        return data

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        super().read_into(key, buffer, offset=offset, progress=progress)
        self.files += offset == 0
        self.bytes += buffer.nbytes

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        self.lists += 1
        return super().list(prefix, after=after)


def measure(
    elements: int, versions: int, location: Callable[[], AbstractContextManager[str]] = directory, where: str = "a local directory"
) -> Table:
    """Publish steps of 1% changes, then let readers catch up.

    Parameters
    ----------
    elements
        The number of weights.
    versions
        The number of steps.
    location
        Returns a context manager that yields the URL of an empty location in a store.
    where
        The name of the store in the table.
    """
    table = Table(
        "chain-join" if location is directory else "chain-join-s3",
        f"Catching up over {versions} versions in {where}: {2 * elements / 2**20:.0f} MiB of bf16 weights, 1% changed per version",
        ["reader", "data files", "records", "lists", "MB read", "seconds"],
    )
    with location() as url:
        store = CountingStore(open_store(url))
        publisher = deltawire.Publisher(store, run="benchmark")
        run = training_run(elements, 0.01, tensors=8)
        publisher.publish(next(run), step=0)
        laggard = deltawire.Subscriber(store, options=ReaderOptions(pin=False))
        replaying = deltawire.Subscriber(store, options=ReaderOptions(pin=False))
        laggard.sync()
        replaying.sync()
        data: dict[str, tuple[int, float]] = {}

        def catch_up(name: str, subscriber: deltawire.Subscriber) -> None:
            store.reset()
            start = time.perf_counter()
            subscriber.sync()
            seconds = time.perf_counter() - start
            for tensor, array in subscriber.state.items():
                assert np.array_equal(array.view(np.uint16), state[tensor].view(np.uint16)), tensor
            report(name, seconds)

        def report(name: str, seconds: float) -> None:
            data[name] = store.files, seconds
            row = [name, f"{store.files}", f"{store.records}", f"{store.lists}", f"{store.bytes / 1e6:.1f}", f"{seconds:.2f}"]
            table.rows.append(row)

        replay_seconds = 0.0
        replay = [0, 0, 0, 0]
        for step in range(1, versions + 1):
            state = next(run)
            publisher.publish(state, step=step)
            store.reset()
            start = time.perf_counter()
            replaying.sync()
            replay_seconds += time.perf_counter() - start
            replay = [a + b for a, b in zip(replay, [store.files, store.records, store.lists, store.bytes], strict=True)]
        catch_up(f"{versions} versions behind", laggard)
        catch_up("with nothing", deltawire.Subscriber(store, options=ReaderOptions(pin=False)))
        store.files, store.records, store.lists, store.bytes = replay
        report("replaying every version", replay_seconds)
        publisher.close()
    fewer = data["replaying every version"][0] / data[f"{versions} versions behind"][0]
    table.notes.append(
        f"The late reader reads {fewer:.0f} × fewer data files than by replaying. Records are commits and shortcuts of a few kB."
    )
    return table

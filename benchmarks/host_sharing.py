"""Count the bytes that the readers of one host fetch from a store, with and without a host cache.

Each reader is a process. Run as a script, this file is one of them.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from chain_speed import directory
from chain_updates import training_run
from report import Table
from workloads import State

import deltawire
from deltawire.chain.reader_options import ReaderOptions
from deltawire.store import open_store
from deltawire.store.base import Progress, Store
from deltawire.store.wrapped import WrappedStore


class CountingStore(WrappedStore):
    """Counts the bytes of data objects that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.bytes = 0

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        super().read_into(key, buffer, offset=offset, progress=progress)
        self.bytes += buffer.nbytes


def measure(
    elements: int,
    versions: int,
    counts: tuple[int, ...] = (1, 4, 8),
    location: Callable[[], AbstractContextManager[str]] = directory,
    where: str = "a local directory",
) -> Table:
    """Let processes start from nothing and follow a run together.

    Parameters
    ----------
    elements
        The number of weights.
    versions
        The number of versions after the first.
    counts
        How many processes there are in each round.
    location
        Returns a context manager that yields the URL of an empty location in a store.
    where
        The name of the store in the table.
    """
    table = Table(
        "host-sharing",
        f"Bytes that the readers of one host fetch from {where}: {2 * elements / 1e6:.0f} MB of bf16 weights, then {versions} versions "
        "in each of which 1% changes",
        ["readers", "host cache", "first version", f"{versions} deltas", "copies"],
    )
    once = 0
    shared: list[float] = []
    with location() as url:
        for count, is_shared in itertools.product(counts, (False, True)):
            with tempfile.TemporaryDirectory() as folder:
                cache = f"{folder}/cache" if is_shared else ""
                fetched = _round(f"{url}-{count}-{is_shared}", cache, count, training_run(elements, 0.01), versions)
            once = once or sum(fetched)
            copies = sum(fetched) / once
            shared += [copies] if is_shared else []
            table.rows.append([str(count), "yes" if is_shared else "no", *(f"{size / 1e6:,.1f} MB" for size in fetched), f"{copies:.2f}"])
    table.check("with a host cache, one copy of all data is fetched, however many readers there are", all(each == 1 for each in shared))
    return table


def _round(url: str, cache: str, count: int, run: Iterator[State], versions: int) -> tuple[int, int]:
    """Return the bytes that all readers fetched together: of the first version, and of the others."""
    with deltawire.Publisher(url, attachments={}) as publisher, ExitStack() as stack:
        publisher.publish(next(run))
        readers = [stack.enter_context(_reader(url, cache)) for _ in range(count)]
        first = _sync(readers)
        total = first
        for _ in range(versions):
            publisher.publish(next(run))
            total += _sync(readers)
        return first, total - first


def _sync(readers: list[subprocess.Popen[str]]) -> int:
    """Let all readers reach the newest version at the same time. Return the bytes that they fetched."""
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("sync\n")
        reader.stdin.flush()
    return sum(int(reader.stdout.readline()) for reader in readers if reader.stdout is not None)


@contextmanager
def _reader(url: str, cache: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), url, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _follow() -> None:
    url, cache = sys.argv[1:]
    options = ReaderOptions(pin=False, host_cache=cache or None)
    with CountingStore(open_store(url)) as store, deltawire.Subscriber(store, options=options, threads=1) as subscriber:
        for _ in sys.stdin:
            before = store.bytes
            subscriber.sync()
            print(store.bytes - before, flush=True)


if __name__ == "__main__":
    _follow()

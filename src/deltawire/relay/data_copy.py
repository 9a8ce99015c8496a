"""Copy data objects from one store to another. Each is checked against its record before it is written."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..chain.fetch import Fetcher, WasCollected
from ..errors import ObjectMissing
from ..events import OnEvent
from ..format.records.record_parts import FileEntry, Limits
from ..store.base import Progress, Store

IN_MEMORY = 32 << 20
"""Larger objects are copied through a file, so that memory does not grow with them, and a cut transfer continues where it ended."""

_PIECE = 8 << 20
_AT_ONCE = 16
"""Most objects that are copied at the same time. Each is read in several streams where that is faster."""


@dataclass
class Traffic:
    """Counts what crossed the link and what the region's store had already."""

    objects: int = 0
    bytes: int = 0
    present: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, size: int | None) -> None:
        """Count an object of `size` bytes that was copied. None counts one that did not have to be."""
        with self._lock:
            if size is None:
                self.present += 1
            else:
                self.objects += 1
                self.bytes += size


def has_object(store: Store, entry: FileEntry) -> bool:
    """Tell whether a store has an object with the size that its record says. Objects appear only when they are complete."""
    try:
        return store.head(entry.key).size == entry.size
    except ObjectMissing:
        return False


class DataCopy:
    """Copies data objects, several at the same time. May be used from several threads.

    Parameters
    ----------
    source, target
        The stores to read from and to write to.
    spool
        The directory for large objects in transit. None makes a temporary one when it is needed.
    patience
        Seconds to wait for an object that the source does not have yet.
    progress
        Called with the number of bytes read.
    is_stopped
        Returns whether waiting should end.
    on_event
        Called with each event.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        spool: Path | None = None,
        patience: float = 30.0,
        progress: Progress | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        on_event: OnEvent | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._source = source
        self._target = target
        self._spool = spool
        self._patience = patience
        self._progress = progress
        self._is_stopped = is_stopped
        self._on_event = on_event
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-relay")

    def fetcher(self, limits: Limits, *, waits: bool = True) -> Fetcher:
        """Return a fetcher that reads from the source. It waits for missing objects if `waits` is set."""
        patience = self._patience if waits else 0.0
        return Fetcher(self._source, limits=limits, patience=patience, is_stopped=self._is_stopped, on_event=self._on_event)

    def begin(
        self, entries: Sequence[FileEntry], limits: Limits, *, collected: WasCollected | None = None, waits: bool = True
    ) -> list[Future[None]]:
        """Begin to copy objects. Each future ends when its object is in the target store, or has the errors of `Fetcher.fetch`."""
        fetcher = self.fetcher(limits, waits=waits)
        return [self._pool.submit(self._copy, fetcher, entry, collected) for entry in dict.fromkeys(entries)]

    def copy(self, entries: Sequence[FileEntry], limits: Limits, *, collected: WasCollected | None = None, waits: bool = True) -> None:
        """Copy objects that the target store does not have. Raises the errors of `Fetcher.fetch` and of the stores."""
        finish(self.begin(entries, limits, collected=collected, waits=waits))

    def close(self) -> None:
        """Wait for transfers, and remove temporary files."""
        self._pool.shutdown(cancel_futures=True)
        self._stack.close()

    def _copy(self, fetcher: Fetcher, entry: FileEntry, collected: WasCollected | None) -> None:
        if has_object(self._target, entry):
            self.traffic.add(size=None)
            return
        if entry.size <= IN_MEMORY:
            data = fetcher.fetch(entry, collected=collected, progress=self._progress)
            self._target.put(entry.key, data, size=entry.size)
        else:
            path = self._folder() / entry.blake3
            fetcher.fetch_to_file(entry, path, resume=True, collected=collected, progress=self._progress)
            self._target.put(entry.key, _pieces(path), size=entry.size)
            path.unlink()
        self.traffic.add(size=entry.size)

    def _folder(self) -> Path:
        with self._lock:
            if self._spool is None:
                self._spool = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-relay-")))
            self._spool.mkdir(parents=True, exist_ok=True)
            return self._spool


def finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all futures. Raises the error of the first that failed, after the others have ended."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece

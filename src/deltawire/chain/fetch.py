"""Fetch data objects and check them against their records. No bytes are returned before they are checked."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from ..errors import DataDamaged, DataMissing, LimitExceeded, ObjectMissing, StoreUnavailable, VersionGone
from ..events import OnEvent, Stopwatch, emit
from ..format.content_hash import content_hash, new_hash
from ..format.records.record_parts import FileEntry, Limits
from ..format.safetensors_header import LENGTH_BYTES, Header, MalformedHeader, header_length, parse_header
from ..store.base import Progress, Store
from ..store.keys import check_data_key

WasCollected = Callable[[], bool]
"""Called when an object is missing. Returns whether garbage collection deleted it."""

Read = Callable[[memoryview, int], None]
"""Fills a buffer with the bytes of an object, from a position on."""

Ahead = Callable[[FileEntry], memoryview | None]
"""Returns the checked bytes of an object that was fetched before its commit was read, or None."""

_WINDOW = 64 << 20
_MOST_FLYING = 64
"""The most objects that are fetched at the same time."""
_SLICE = 0.1
_Result = TypeVar("_Result")


class SharedFile(Protocol):
    """An open file that holds an object, as far as its name and size tell. The reader compares the content with the hash."""

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer. Raises `DataDamaged` if the file cannot be read."""

    def drop(self) -> None:
        """Delete the file, because its content is wrong."""


class SharedFiles(Protocol):
    """Files that the processes of a host share, so that one of them fetches an object for all (`subscribe.cache.host_cache`)."""

    def opened(
        self, entry: FileEntry, fetch: Callable[[int, Progress], None], progress: Progress | None, is_over: Callable[[], bool]
    ) -> AbstractContextManager[SharedFile | None]:
        """Return the file of an object for the time of a context, or None if the caller should read the store itself.

        If no process has fetched the object, this one calls `fetch` with a descriptor, which may hold the beginning of the object, and a
        function that is to be called with the number of bytes that were fetched. Errors of `fetch` are raised.
        """


class Fetcher:
    """Reads data objects from a store. May be used from several threads.

    A damaged object is read once more. A missing object is waited for, because replication may deliver a commit before its data.

    Parameters
    ----------
    store
        The store to read from.
    limits
        The largest object to accept.
    patience
        Seconds to wait for a missing object.
    streams
        `prefetch` fetches twice as many objects at the same time, but at most 64. None follows the store, which measures its link.
    budget
        About how many bytes `prefetch` keeps in memory.
    watch
        Counts the time of each phase.
    ahead
        Asked first for each object that `fetch` and `prefetch` return.
    on_event
        Called with each event.
    is_stopped
        Returns whether the result is no longer wanted. Waiting then ends.
    shared
        Files that the processes of this host share. None if this process fetches everything itself.
    sleep, clock
        For tests.
    """

    def __init__(
        self,
        store: Store,
        *,
        streams: int | None = None,
        limits: Limits | None = None,
        budget: int = 1 << 30,
        patience: float = 30.0,
        watch: Stopwatch | None = None,
        ahead: Ahead | None = None,
        on_event: OnEvent | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        shared: SharedFiles | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.watch = watch or Stopwatch()
        self._streams = streams
        self._limits = limits or Limits()
        self._budget = budget
        self._patience = patience
        self._ahead = ahead
        self._on_event = on_event
        self._is_stopped = is_stopped
        self._shared = shared
        self._is_abandoned = False
        self._sleep = sleep
        self._clock = clock

    def fetch(self, entry: FileEntry, *, collected: WasCollected | None = None, progress: Progress | None = None) -> memoryview:
        """Return the bytes of an object, in new memory.

        Raises `DataDamaged` if they are not what the record says, `DataMissing` if the object does not appear in time, and `VersionGone` if
        it was collected.
        """
        self._check(entry)
        if self._ahead is not None and (data := self._ahead(entry)) is not None:
            return data
        return self._twice(entry, collected, progress, lambda read: self._read(entry, read))

    def prefetch(
        self, entries: Sequence[FileEntry], *, collected: WasCollected | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[FileEntry, memoryview]]:
        """Yield each object as `fetch` returns it, in order. The next objects are fetched while the caller works on one."""
        for entry in entries:
            self._check(entry)
        if len(entries) < 2:
            for entry in entries:
                with self.watch.phase("wait"):
                    data = self.fetch(entry, collected=collected, progress=progress)
                yield entry, data
            return
        waiting = deque(entries)
        flying: deque[tuple[FileEntry, Future[memoryview]]] = deque()
        in_memory = 0
        with self._pool(min(_MOST_FLYING, len(entries))) as pool:  # starts threads only as they are needed
            try:
                while waiting or flying:
                    while waiting and (not flying or (in_memory + waiting[0].size <= self._budget and len(flying) < self._most_flying())):
                        entry = waiting.popleft()
                        in_memory += entry.size
                        flying.append((entry, pool.submit(self.fetch, entry, collected=collected, progress=progress)))
                    entry, future = flying.popleft()
                    with self.watch.phase("wait"):  # time that does not overlap with the caller's work
                        data = future.result()
                    del future
                    yield entry, data
                    del data
                    in_memory -= entry.size
            finally:
                for _, future in flying:
                    future.cancel()

    def fetch_to_file(
        self,
        entry: FileEntry,
        path: Path,
        *,
        resume: bool = False,
        collected: WasCollected | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write an object to a new file, through buffers of limited size. Afterwards the file is complete and on disk.

        Raises the errors of `fetch`, `FileExistsError`, or `OSError` if the file cannot be written. After an error there is no file. With
        `resume` there may be a file: one from an earlier call that failed or was killed is continued, and what came before the store
        failed stays there. All of it is checked against the hash, so a file with other content is only overwritten.

        Parameters
        ----------
        entry
            The object.
        path
            The file, which no other process writes at the same time.
        resume
            Whether to continue the file.
        collected
            Called when the object is missing.
        progress
            Called with the number of bytes that were fetched now.
        """
        self._check(entry)
        if resume:
            _remove_unless_own_file(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if resume else os.O_EXCL), 0o666)
        try:
            try:
                self._twice(entry, collected, progress, lambda read: self._copy(entry, read, descriptor))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException as error:
            if not (resume and isinstance(error, StoreUnavailable)):
                path.unlink(missing_ok=True)
            raise

    def patiently(self, entry: FileEntry, collected: WasCollected | None, read: Callable[[], _Result]) -> _Result:
        """Call `read`, and repeat it for a time if the object is missing. Raises `DataMissing` and `VersionGone` as `fetch` does."""
        deadline = self._clock() + self._patience
        pause = 0.1
        while True:
            try:
                return read()
            except ObjectMissing:
                if collected is not None and collected():
                    raise VersionGone(f"{entry.key} is no longer in {self.store.url}.") from None
                if self._clock() + pause > deadline or self._is_over():
                    raise DataMissing(f"{entry.key} is not in {self.store.url}.") from None
            emit(self._on_event, "retrying", key=entry.key, reason="missing")
            self._wait(pause)
            pause = min(2 * pause, 5.0)

    def _most_flying(self) -> int:
        """Return how many objects to fetch at the same time. Two for each stream, so that one begins as soon as another ends."""
        return min(2 * (self.store.streams if self._streams is None else self._streams), _MOST_FLYING)

    @contextmanager
    def _pool(self, threads: int) -> Iterator[ThreadPoolExecutor]:
        """Return threads that are waited for in the end. After Ctrl-C, or when the caller stops early, none of them may keep sleeping."""
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="deltawire-fetch") as pool:
                try:
                    yield pool
                except BaseException:
                    self._is_abandoned = True
                    raise
        finally:
            self._is_abandoned = False

    def _check(self, entry: FileEntry) -> None:
        check_data_key(entry.key)
        if entry.size > self._limits.file_bytes:
            raise LimitExceeded(f"{entry.key} claims {entry.size:,} bytes; {self._limits.file_bytes:,} are allowed.")

    def _take(self, entry: FileEntry, progress: Progress | None, take: Callable[[Read], _Result]) -> _Result:
        """Call `take` with a function that reads the file which this host shares, or the store."""
        if self._shared is not None and entry.size:

            def fetch(descriptor: int, told: Progress) -> None:
                self._copy(entry, self._from_store(entry, told), descriptor)

            for _ in range(2):  # a file with wrong content is fetched once more
                with self._shared.opened(entry, fetch, progress, self._is_over) as file:
                    if file is None:
                        break
                    try:
                        return take(file.read)
                    except DataDamaged as error:
                        emit(self._on_event, "retrying", key=entry.key, reason=str(error))
                        file.drop()
        return take(self._from_store(entry, progress))

    def _from_store(self, entry: FileEntry, progress: Progress | None) -> Read:
        def read(buffer: memoryview, offset: int) -> None:
            if len(buffer):
                self.store.read_into(entry.key, buffer, offset=offset, progress=progress)

        return read

    def _read(self, entry: FileEntry, read: Read) -> memoryview:
        try:
            buffer = np.empty(entry.size, np.uint8).data
        except (MemoryError, ValueError):  # ValueError for sizes that no machine has
            raise LimitExceeded(f"{entry.key} claims {entry.size:,} bytes, for which there is no memory.") from None
        with self.watch.phase("fetch"):
            read(buffer, 0)
        with self.watch.phase("verify"):
            found = content_hash(buffer)
        self._compare(entry, found)
        return buffer

    def _copy(self, entry: FileEntry, read: Read, descriptor: int) -> None:
        """Copy an object to a file, which may already hold its beginning. Empties the file before it raises `DataDamaged`."""
        begin = os.fstat(descriptor).st_size
        if begin > entry.size:
            begin = 0
        found = self._copy_from(begin, entry, read, descriptor)
        if begin and found != entry.blake3:  # the file held something else
            found = self._copy_from(0, entry, read, descriptor)
        if found != entry.blake3:
            os.ftruncate(descriptor, 0)
        self._compare(entry, found)

    def _copy_from(self, begin: int, entry: FileEntry, read: Read, descriptor: int) -> str:
        """Copy the rest of an object with two buffers: `read` fills one while the other is hashed and written. Returns the hash of the
        whole file.
        """
        os.ftruncate(descriptor, begin)
        os.lseek(descriptor, 0, os.SEEK_SET)
        hasher = new_hash()
        windows = [np.empty(min(_WINDOW, entry.size), np.uint8).data for _ in range(2)]
        with self.watch.phase("verify"):
            while (left := begin - os.lseek(descriptor, 0, os.SEEK_CUR)) > 0:
                count = os.readv(descriptor, [windows[0][: min(left, _WINDOW)]])
                if not count:
                    raise OSError(f"the file for {entry.key} became shorter while it was read.")
                hasher.update(windows[0][:count])
        starts = range(begin, entry.size, _WINDOW)

        def fill(number: int) -> memoryview:
            window = windows[number % 2][: min(_WINDOW, entry.size - starts[number])]
            with self.watch.phase("fetch"):
                read(window, starts[number])
            return window

        with ThreadPoolExecutor(1, thread_name_prefix="deltawire-fetch") as ahead:
            filling = ahead.submit(fill, 0) if starts else None
            for number in range(len(starts)):
                assert filling is not None
                window = filling.result()
                if number + 1 < len(starts):
                    filling = ahead.submit(fill, number + 1)
                with self.watch.phase("verify"):
                    hasher.update(window)
                with self.watch.phase("write"):
                    _write_all(descriptor, window)
        return hasher.hexdigest()

    def _compare(self, entry: FileEntry, found: str) -> None:
        if found != entry.blake3:
            raise DataDamaged(f"{entry.key} in {self.store.url} is damaged: its content has the hash {found}, not that of its record.")

    def _twice(
        self, entry: FileEntry, collected: WasCollected | None, progress: Progress | None, take: Callable[[Read], _Result]
    ) -> _Result:
        def attempt() -> _Result:
            return self._take(entry, progress, take)

        try:
            return self.patiently(entry, collected, attempt)
        except DataDamaged as error:
            emit(self._on_event, "retrying", key=entry.key, reason=str(error))
            self.store.doubt(entry.key)
            return self.patiently(entry, collected, attempt)

    def _wait(self, seconds: float) -> None:
        """Sleep, but wake up regularly to check whether the result is still wanted."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0 and not self._is_over():
            self._sleep(min(left, _SLICE))

    def _is_over(self) -> bool:
        return self._is_abandoned or self._is_stopped()


def read_header(store: Store, entry: FileEntry, *, most_tensors: int) -> Header:
    """Read only the header of a safetensors file. Unlike the data, it is not checked against a hash.

    Raises `DataDamaged` if it is malformed, and `ObjectMissing`.
    """
    try:
        prefix = bytearray(min(LENGTH_BYTES, entry.size))
        store.read_into(entry.key, memoryview(prefix))
        text = bytearray(header_length(bytes(prefix), entry.size))
        store.read_into(entry.key, memoryview(text), offset=LENGTH_BYTES)
        return parse_header(bytes(text), entry.size, most_tensors=most_tensors)
    except MalformedHeader as error:
        raise DataDamaged(f"{entry.key} in {store.url}: {error}") from error


def _remove_unless_own_file(path: Path) -> None:
    """Remove a link, a pipe or a file with several names, because writing to it could change something else."""
    with contextlib.suppress(FileNotFoundError):
        facts = os.lstat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
            path.unlink()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]

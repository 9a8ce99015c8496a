"""Fetch files of the next version before its commit exists, because an announcement names them (docs/protocol.md §5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ..chain.fetch import Fetcher, SharedFiles
from ..chain.log import ChainLog
from ..chain.records.announcements import AnnouncementReader
from ..format.records.record_parts import CommitRef, FileEntry
from ..format.records.version_records import Commit

_SHARE, _LEAST, _MOST = 4, 16 << 20, 1 << 30
"""By default, files ahead have at most this share of the state's bytes, but 16 MiB are always allowed, and 1 GiB is the most."""

_MOST_FLYING = 64
"""The most files that are fetched at the same time."""


class FilesAhead:
    """Files of the next version, in memory. Each was compared with its hash, and is used only if a commit names exactly this file.

    Announcements are only hints, and anyone may forge them on a chain that is not signed. So for each version no more than a budget of
    bytes is fetched, whatever is announced. May be used from several threads.

    Parameters
    ----------
    log
        The chain.
    budget
        The most bytes to fetch for one version. None follows the size of the state. 0 fetches nothing, and does not look either.
    shared
        Files that the processes of this host share.
    """

    def __init__(self, log: ChainLog, budget: int | None = None, *, shared: SharedFiles | None = None) -> None:
        self._log = log
        self._shared = shared
        self._budget = budget
        self._reader = AnnouncementReader(log)
        self._lock = threading.Lock()
        self._base: CommitRef | None = None
        """The commit that the files below apply to."""
        self._version: Commit | None = None
        """The version whose weights that commit leaves in force."""
        self._spent = 0
        self._waiting: dict[FileEntry, Fetcher] = {}
        """Files that will be fetched, in order."""
        self._flying = 0
        self._files: dict[FileEntry, Future[memoryview]] = {}
        """Files that are being fetched, or have arrived."""
        self._handed: set[FileEntry] = set()
        """Files that `arrived` has returned."""
        self._looking: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def look(self, head: Commit, version: Commit) -> None:
        """Look for an announcement on another thread, and fetch what it names. This takes one small request, and nobody waits for it.

        Parameters
        ----------
        head
            The newest commit in force.
        version
            The version that it leaves in force, which the reader has.
        """
        if self._budget == 0:
            return
        base = self._log.ref(head)
        self.keep_only(base)
        with self._lock:
            self._version = version
            if not self._is_closed and (self._looking is None or self._looking.done()):
                self._looking = self._threads().submit(self._follow, head, base)

    def _follow(self, head: Commit, base: CommitRef) -> None:
        """Read the announcement, and begin to fetch what it names."""
        announcement = self._reader.read(head)
        if announcement is None:
            return
        budget = min(max(head.state_bytes // _SHARE, _LEAST), _MOST) if self._budget is None else self._budget
        limits = self._log.limits
        fetcher = Fetcher(self._log.store, limits=limits, patience=0.0, is_stopped=lambda: self._is_closed, shared=self._shared)
        with self._lock:
            if self._base != base or self._is_closed:  # a commit came first
                return
            for other in {*self._files, *self._waiting}.difference(announcement.files):  # the writer has begun again, with other weights
                self._files.pop(other, None)
                self._waiting.pop(other, None)
            for entry in announcement.files:
                fits = self._spent + entry.size <= budget and max(entry.size, entry.raw) <= limits.file_bytes
                if entry not in self._files and entry not in self._waiting and fits:
                    self._spent += entry.size
                    self._waiting[entry] = fetcher
            self._start()

    def _start(self) -> None:
        """Start as many fetches as are useful. The caller holds the lock."""
        most = min(2 * self._log.store.streams, _MOST_FLYING)  # two for each stream, so that one begins as soon as another ends
        while self._waiting and self._flying < most and not self._is_closed:
            entry = next(iter(self._waiting))
            fetcher = self._waiting.pop(entry)
            self._flying += 1
            self._files[entry] = self._threads().submit(self._fetch, fetcher, entry)

    def _fetch(self, fetcher: Fetcher, entry: FileEntry) -> memoryview:
        try:
            return fetcher.fetch(entry)
        finally:
            with self._lock:
                self._flying -= 1
                self._start()

    def arrived(self, version: Commit | None) -> Iterator[tuple[FileEntry, memoryview]]:
        """Yield each file that has arrived, once.

        Parameters
        ----------
        version
            The version that the reader has now. If the files apply to another version, this yields nothing.
        """
        while True:
            with self._lock:
                new = [entry for entry in self._files if entry not in self._handed and self._has(entry)]
                if not new or version is None or version != self._version:
                    return
                self._handed.add(new[0])
                data = self._files[new[0]].result()
            yield new[0], data

    @property
    def is_arriving(self) -> bool:
        """Whether files are on their way."""
        with self._lock:
            return bool(self._waiting) or not all(future.done() for future in self._files.values())

    def holds(self, entry: FileEntry) -> bool:
        """Return whether a file has arrived.

        Parameters
        ----------
        entry
            The file, exactly as a commit names it.
        """
        with self._lock:
            return self._has(entry)

    def take(self, entry: FileEntry) -> memoryview | None:
        """Return a file that has arrived, or is arriving, which is waited for. None if it must be fetched as usual.

        Parameters
        ----------
        entry
            The file, exactly as a commit names it.
        """
        with self._lock:
            future = self._files.get(entry)
        return None if future is None or future.exception() is not None else future.result()

    def stop(self) -> None:
        """Start no more fetches until the next look, because a commit is there and says what is needed."""
        with self._lock:
            self._waiting.clear()

    def keep_only(self, base: CommitRef | None) -> None:
        """Drop all files, unless they apply to the commit `base`.

        Parameters
        ----------
        base
            The newest commit in force. None drops all files.
        """
        with self._lock:
            if self._base == base:
                return
            self._base, self._version, self._spent, self._handed = base, None, 0, set()
            self._waiting, self._files = {}, {}

    def close(self) -> None:
        """Drop all files. Returns when the last fetch has ended."""
        self._is_closed = True
        self.keep_only(None)
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _has(self, entry: FileEntry) -> bool:
        future = self._files.get(entry)
        return future is not None and future.done() and future.exception() is None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MOST_FLYING + 1, thread_name_prefix="deltawire-ahead")
        return self._pool

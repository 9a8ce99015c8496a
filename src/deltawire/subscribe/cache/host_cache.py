"""Fetch each data object once per host: the processes of a host share the files that one of them has fetched.

The first process that needs an object locks its unfinished file, fetches the object into it, compares it with its hash, and renames it.
The others wait, and then read the finished file. If the first one is killed, the kernel releases the lock, and another process continues
the file. If it is stopped or stuck, it gets a successor, which fetches into a file of its own.

Nothing depends on the cache. Every process compares what it has read with the hash in the chain's record before it uses it, and fetches
from the store itself whatever it cannot share. Decision 21 (docs/decisions) has the reasons.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...chain.reader_options import ReaderOptions
from ...errors import DataDamaged, DataMissing, SpoolError
from ...events import OnEvent, emit
from ...format.records.record_parts import FileEntry
from ...store.base import Progress
from ..mirror.locks import ChangeWatch, FileLock
from .cache_folder import CacheFolder, Lead, OpenFolder
from .private_folder import hold_folder, make_private, remove_abandoned, spool_errors

AUTO = "auto"
"""The value of `ReaderOptions.host_cache` that means the usual directories."""
MEMORY = "/dev/shm"
PATIENCE = 10.0
"""Seconds without a byte after which the process that fetches an object gets a successor."""
_LEADERS = 3
"""The most processes that fetch one object into the cache at the same time."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between two looks at a file that another process fetches. They grow while this process waits."""
STALLED = "the process of this host that fetches it makes no progress."
_SIGN = 0.25
"""The least seconds between two signs of life of the process that fetches."""
_MOST_IN_MEMORY, _SHARE_OF_MEMORY, _LARGEST_IN_MEMORY = 4 << 30, 8, 8
"""Files in /dev/shm have at most this many bytes, and this part of it. Each has at most this part of that."""
_MOST_ON_DISK, _SHARE_OF_DISK = 64 << 30, 4
"""The same for other directories."""


class SharedCopy:
    """A finished file of the cache that is open."""

    def __init__(self, descriptor: int, folder: OpenFolder, entry: FileEntry, progress: Progress | None) -> None:
        self.is_dropped = False
        self._descriptor = descriptor
        self._folder = folder
        self._entry = entry
        self._progress = progress

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer. Raises `DataDamaged` if the file ends too early or cannot be read."""
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise DataDamaged(f"the copy of {self._entry.key} in the host cache cannot be read: {error}.") from error
            if not count:
                raise DataDamaged(f"the copy of {self._entry.key} in the host cache ends too early.")
            if self._progress is not None:
                self._progress(count)
            buffer, offset = buffer[count:], offset + count

    def drop(self) -> None:
        """Delete the file, because its content is wrong."""
        self.is_dropped = True
        with contextlib.suppress(OSError):
            self._folder.drop(self._entry, self._descriptor)


class HostCache:
    """Files that the processes of a host share (`chain.fetch.SharedFiles`). May be used from several threads.

    Parameters
    ----------
    folders
        The directories, the preferred one first. A file goes into the first one that takes files of its size and has room.
    unusable
        The reason why a directory is not among them. None if they are all there.
    patience
        Seconds without a byte after which the process that fetches an object gets a successor. None means `PATIENCE`.
    on_event
        Called with an event "not-shared" when this process fetches an object although another one may have it. A reason is told once.
    sleep, clock
        For tests.
    """

    def __init__(
        self,
        folders: Sequence[CacheFolder],
        *,
        unusable: str | None = None,
        patience: float | None = None,
        on_event: OnEvent | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = folders
        self._unusable = unusable
        self._patience = PATIENCE if patience is None else patience
        self._on_event = on_event
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._told: str | None = None
        self._shared_bytes = 0

    def take_count(self) -> int:
        """Return how many bytes came from files that another process had fetched, since the last call. Files that were fetched ahead of
        their commit count, too.
        """
        with self._lock:
            count, self._shared_bytes = self._shared_bytes, 0
            return count

    @contextlib.contextmanager
    def opened(
        self, entry: FileEntry, fetch: Callable[[int, Progress], None], progress: Progress | None, is_over: Callable[[], bool]
    ) -> Iterator[SharedCopy | None]:
        """Yield the file of an object, or None if it cannot be shared.

        If no process has fetched the object, this one does. While another one does, this one waits. Raises the errors of `fetch`, and
        `DataMissing` if the object is no longer wanted.

        Parameters
        ----------
        entry
            The object.
        fetch
            Fetches the object into a descriptor, and calls the function that it is given with the number of bytes.
        progress
            Called with the number of bytes that were fetched or read, and with 0 while this process waits.
        is_over
            Returns whether the object is no longer wanted.
        """
        with contextlib.ExitStack() as stack:
            found = None
            reason = self._unusable or "it is too large for the host cache."
            for folder in self._folders:
                if found is None and entry.size <= folder.largest:
                    try:
                        opened = stack.enter_context(folder.opened())
                        found = self._find(opened, entry, fetch, progress, is_over)
                        reason = STALLED
                    except SpoolError as error:
                        reason = error.message
                    except OSError as error:
                        reason = f"{error.filename or folder.path}: {error.strerror or error}."
            if found is None:
                self._tell(entry, reason)
                yield None
                return
            descriptor, is_new = found
            stack.callback(os.close, descriptor)
            copy = SharedCopy(descriptor, opened, entry, None if is_new else progress)
            yield copy
            if not is_new and not copy.is_dropped:
                with self._lock:
                    self._shared_bytes += entry.size

    def _find(
        self,
        folder: OpenFolder,
        entry: FileEntry,
        fetch: Callable[[int, Progress], None],
        progress: Progress | None,
        is_over: Callable[[], bool],
    ) -> tuple[int, bool] | None:
        """Return a descriptor of the finished file, and whether this process has just fetched it."""
        begun = self._clock()
        for number in range(_LEADERS):
            watch = ChangeWatch(clock=self._clock)
            with contextlib.ExitStack() as stack:
                part: int | None = None
                while watch.seconds(folder.sign(entry, number)) <= self._patience:
                    found = folder.find(entry)
                    if found is not None:
                        return found, False
                    if part is None:
                        part = folder.open_part(entry, number)
                        stack.callback(os.close, part)
                    lead = folder.try_lead(entry, number, part)
                    if lead is Lead.FINISHED:
                        return os.dup(part), False
                    if lead is Lead.OURS:
                        return self._lead(folder, entry, number, part, fetch, progress)
                    if lead is Lead.GONE:
                        stack.close()
                        part = None
                    if is_over():
                        raise DataMissing(f"{entry.key} is no longer wanted. Another process of this host was fetching it.")
                    if progress is not None:
                        progress(0)  # keeps a pin alive
                    self._sleep(min(max(_SHORTEST_PAUSE, (self._clock() - begun) / 8), _LONGEST_PAUSE))
            self._tell(entry, STALLED)
        return None

    def _lead(
        self,
        folder: OpenFolder,
        entry: FileEntry,
        number: int,
        part: int,
        fetch: Callable[[int, Progress], None],
        progress: Progress | None,
    ) -> tuple[int, bool]:
        """Fetch an object into its unfinished file, which this process has locked, give the file its name, and unlock it.

        Returns a descriptor of the file, and whether it was fetched now. Bytes that came before an error stay, except for an error of the
        directory.
        """
        signed = self._clock()

        def arrived(count: int) -> None:
            nonlocal signed
            now = self._clock()
            if now - signed >= _SIGN:
                signed = now
                with contextlib.suppress(OSError):
                    os.utime(part)
            if progress is not None:
                progress(count)

        is_kept = False
        try:
            found = folder.find(entry)
            if found is not None:  # it was finished after the first look
                return found, False
            os.utime(part)
            folder.make_room(entry, number)
            fetch(part, arrived)
            folder.finish(entry, number)
            is_kept = True
            return os.dup(part), True
        except BaseException as error:
            is_kept = not isinstance(error, OSError) and os.fstat(part).st_size > 0
            raise
        finally:
            if not is_kept:
                with contextlib.suppress(OSError):
                    folder.drop_part(entry, number)
            fcntl.flock(part, fcntl.LOCK_UN)  # a forked child may have the descriptor, too

    def _tell(self, entry: FileEntry, reason: str) -> None:
        with self._lock:
            if reason == self._told:
                return
            self._told = reason
        emit(self._on_event, "not-shared", key=entry.key, reason=reason)


def open_host_cache(options: ReaderOptions, on_event: OnEvent | None = None) -> HostCache | None:
    """Return the host cache that a reader's options name, or None.

    Parameters
    ----------
    options
        The options of the reader.
    on_event
        Called with each event.
    """
    if options.host_cache is None:
        return None
    if options.host_cache != AUTO:
        return HostCache([_on_disk(Path(options.host_cache))], on_event=on_event)
    folders, unusable = _usual_folders()
    return HostCache(folders, unusable=unusable, on_event=on_event)


def _usual_folders() -> tuple[list[CacheFolder], str | None]:
    """Return the usual directories, without those that this user cannot use, and why not. They exist until the last process that uses
    them ends.
    """
    memory, disk = (Path(parent) / f"deltawire-{os.getuid()}" / "host-cache" for parent in (MEMORY, tempfile.gettempdir()))
    found: list[CacheFolder] = []
    unusable = None
    for path, limited in ((memory, _in_memory), (disk, _on_disk)):
        try:
            with spool_errors(path):
                _hold(path)
                found.append(limited(path))
        except SpoolError as error:
            unusable = error.message
    return found, unusable


def _in_memory(path: Path) -> CacheFolder:
    most = min(_MOST_IN_MEMORY, _size_of_disk(path) // _SHARE_OF_MEMORY)
    return CacheFolder(path, most, most // _LARGEST_IN_MEMORY)


def _on_disk(path: Path) -> CacheFolder:
    most = min(_MOST_ON_DISK, _size_of_disk(path) // _SHARE_OF_DISK)
    return CacheFolder(path, most, most)


def _size_of_disk(path: Path) -> int:
    """Return the size of the file system of a directory, or of the nearest one above it that exists. All processes see the same size."""
    for each in (path, *path.absolute().parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = os.statvfs(each)
            return facts.f_blocks * facts.f_frsize
    return 0


_held: dict[Path, tuple[int, FileLock]] = {}
"""The usual directories that this process uses, each with the process that took the lock."""
_holding = threading.Lock()


def _hold(path: Path) -> None:
    """Keep a directory until this process ends. Deletes what killed processes have left."""
    with _holding:
        if _held.get(path, (0, None))[0] == os.getpid():
            return
        make_private(path.parent)
        remove_abandoned(path.parent)
        if not _held:
            atexit.register(leave_usual_folders)
        _held[path] = os.getpid(), hold_folder(path)


def leave_usual_folders() -> None:
    """Give up the usual directories, and delete those that no other process uses. Runs when the process ends."""
    with _holding:
        for path, (owner, lock) in list(_held.items()):
            del _held[path]
            if owner == os.getpid():
                lock.release()
                with contextlib.suppress(OSError, SpoolError):
                    remove_abandoned(path.parent)

"""A directory as a store, safe against crashes of the writer and of the machine.

An object is written to a temporary file in a hidden folder and flushed to disk. Then it is linked to its name (create if absent: linking
fails if the name exists) or renamed over it. Then its directory is flushed, and those above it that this process has not flushed since they
were made. So a name appears with all its bytes or not at all, and acknowledged writes survive a power failure. A writer that dies leaves at
most an empty folder, which is harmless, and a temporary file, which the next writer removes (see `staging`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ..errors import (
    BadUrl,
    DataDamaged,
    DeltawireError,
    LimitExceeded,
    ObjectExists,
    ObjectMissing,
    OutcomeUnknown,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from .base import MAX_KEY, Buffer, ObjectInfo, Progress, Store, as_pieces, check_create, check_key, check_prefix, failure, is_key
from .staging import Staging, sync_file, sync_folder

_CHUNK = 32 * 1024 * 1024  # bytes per system call: large enough for full speed, small enough for `progress` to mean something
_ATTEMPTS = 16  # each failed attempt to name an object is a lost race against a deleter that removed its empty folder

_REMEMBERED = 4096  # most folders remembered as flushed; each version has its own folder

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.02  # seconds between two looks at a file that is waited for
_COARSEST_CLOCK = 2.0  # seconds within which a file system may give two files the same time

_KINDS: dict[type[StoreError], set[int]] = {
    StoreFull: {errno.ENOSPC, errno.EDQUOT},
    StoreDenied: {errno.EACCES, errno.EPERM, errno.EROFS},
    StoreUnavailable: {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOMEM},
}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NEVER_WAIT = os.O_NONBLOCK | os.O_NOCTTY  # opening a pipe without a writer, or a device, must not block
_LATEST = 32_503_680_000.0  # the year 3000
_MOST_LINKS = 4  # most links to folders that are followed on one path
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore(Store):
    """Stores objects in a directory, which the first write creates. Several processes may share it, on one machine or over a network mount.

    The file system must support hard links (`probe` checks this) and an fsync that really flushes.

    Parameters
    ----------
    root
        The directory.
    """

    def __init__(self, root: Path | str) -> None:
        if "\0" in str(root):
            raise BadUrl(f"{str(root)!r} is not a path: it contains a null character.")
        self.root = Path(os.path.abspath(root))
        self.url = self.root.as_uri()
        self._staging = Staging(self.root / ".deltawire-tmp")
        self._durable: dict[Path, int] = {}
        """Folders, by inode, whose names this store has flushed."""
        self._unflushed: set[str] = set()
        """Keys that were created or found to exist, but could not be flushed."""

    def get(self, key: str, *, limit: int) -> bytes:
        if key in self._unflushed:  # a caller that reads its creation back takes it for durable
            with self._reporting("get", key):
                self._sync_upwards(self._path(key).parent)
            self._unflushed.discard(key)
        with self._reading("get", key) as (file, size):
            if size > limit:
                raise LimitExceeded(failure("get", key, self.url, f"it has {size} bytes, more than the {limit} allowed."))
            data = bytearray(size)
            if _fill(file, memoryview(data), 0, None) < size:
                raise DataDamaged(failure("get", key, self.url, f"it ended before its {size} bytes were read."))
            return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._reporting("head", key):
            return _info(key, self._regular("head", key, os.stat(path)))

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        target = buffer.cast("B")
        with self._reading("read", key) as (file, size):
            # The size is checked first, so that a truncated file is reported before gigabytes are read.
            if size < offset + len(target) or _fill(file, target, offset, progress) < len(target):
                raise DataDamaged(failure("read", key, self.url, f"it ends at byte {size}, before {offset + len(target)}."))

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_create(key, data)
        path = self._path(key)
        exists: ObjectExists | None = None
        with self._staged("create", key, [memoryview(data)], None, None) as temporary, self._reporting("create", key):
            try:
                self._give_name("create", key, path, lambda: os.link(temporary, path))
            except ObjectExists as error:  # flush it nevertheless: its writer may have died before flushing
                exists = error
        try:
            self._sync_upwards(path.parent)
        except OSError as error:
            self._unflushed.add(key)
            raise OutcomeUnknown(failure("create", key, self.url, f"it is there, but may not survive a crash: {error}.")) from error
        if exists is not None:
            raise exists

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        path = self._path(key)
        with self._staged("put", key, as_pieces(data)[1], size, progress, durable) as temporary, self._reporting("put", key):
            self._give_name("put", key, path, lambda: os.replace(temporary, path))
            if durable:
                self._sync_upwards(path.parent)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._reporting("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            self._prune(path.parent)

    @property
    def can_wait(self) -> bool:
        return True

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        path = self._path(key)
        deadline = time.monotonic() + timeout
        pause, read_again = _SHORTEST_PAUSE, -math.inf
        seen: tuple[int, ...] | None = None
        while True:
            now = time.monotonic()
            is_last = now >= deadline
            facts = _facts(path)
            # Clocks of file systems are coarse, and inodes are used again. So a new file may have the facts of the one before it.
            if is_last or facts != seen or now >= read_again:
                seen, read_again = facts, now + _COARSEST_CLOCK
                try:
                    found = self.get_if_changed(key, limit=limit, tag=tag)
                    if found is not None or is_last:
                        return found
                except ObjectMissing:
                    if is_last:
                        raise
            time.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Do nothing: the store holds no resources."""

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextlib.contextmanager
    def _reading(self, operation: str, key: str) -> Iterator[tuple[int, int]]:
        """Open an object. Yields its descriptor and size. A file that is renamed over it meanwhile does not matter: the open file stays the
        old one.
        """
        path = self._path(key)
        with self._reporting(operation, key):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _NEVER_WAIT)
            try:
                yield file, self._regular(operation, key, os.fstat(file)).st_size
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _staged(
        self, operation: str, key: str, pieces: Iterable[memoryview], size: int | None, progress: Progress | None, durable: bool = True
    ) -> Iterator[Path]:
        """Write the data to a temporary file and yield its path. The file is on disk if `durable`. Errors of the data's iterator pass
        through.
        """
        with contextlib.ExitStack() as stack:
            with self._reporting(operation, key):
                file, path = stack.enter_context(self._staging.file())
            written = 0
            for piece in pieces:
                for start in range(0, len(piece), _CHUNK):
                    chunk = piece[start : start + _CHUNK]
                    with self._reporting(operation, key):
                        _write(file, chunk)
                    written += len(chunk)
                    if progress is not None:
                        progress(len(chunk))
            if size is not None and written != size:
                raise StoreError(failure(operation, key, self.url, f"{size} bytes were announced, {written} came."))
            if durable:
                with self._reporting(operation, key):
                    sync_file(file)
            yield path

    def _give_name(self, operation: str, key: str, path: Path, rename: Callable[[], None]) -> None:
        """Give the temporary file its name, making the folder on the way if there is none, or if a deleter has just removed it as empty."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                try:
                    rename()
                    return
                except FileExistsError as error:
                    raise ObjectExists(failure(operation, key, self.url, "an object of this name exists.")) from error
                except OSError as error:
                    if operation == "create" and error.errno in _NO_LINKS:
                        raise StoreUnsuitable(failure(operation, key, self.url, f"no hard links there ({error.strerror}).")) from error
                    raise
            for folder in path.parents:
                if folder == self.root or folder.exists():
                    break
                self._durable.pop(folder, None)
            path.parent.mkdir(parents=True, exist_ok=True)
        raise OSError(errno.ESTALE, "its folder, or the temporary file, keeps vanishing")

    def _sync_upwards(self, folder: Path) -> None:
        """Flush a folder, and those above it up to the first whose name this store has flushed.

        A folder that another process made may not be flushed yet. A folder that was deleted and made again is another folder.
        """
        made: list[tuple[Path, int | None]] = []
        while True:
            inode: int | None = None
            with contextlib.suppress(FileNotFoundError):  # the object and its folder were deleted meanwhile
                sync_folder(folder)
                inode = os.stat(folder).st_ino
            if folder == self.root or (inode is not None and self._durable.get(folder) == inode):
                break
            made.append((folder, inode))
            folder = folder.parent
        if len(self._durable) > _REMEMBERED:
            self._durable.clear()
        self._durable.update((path, inode) for path, inode in made if inode is not None)

    def _prune(self, folder: Path) -> None:
        """Remove folders that a deletion left empty."""
        with contextlib.suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                self._durable.pop(folder, None)
                folder = folder.parent

    def _walk(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """Yield the files below a folder in the order of their keys. Skips pipes, sockets, devices, and files whose path is too long for a
        key.
        """
        open_folders = [self._entries(_Folder(prefix, frozenset()), after)]
        while open_folders:
            found = next(open_folders[-1], None)
            if found is None:
                open_folders.pop()
            elif isinstance(found, _Folder):
                open_folders.append(self._entries(found, after))
            else:
                try:
                    facts = os.stat(self.root / found)
                except OSError as error:
                    if error.errno in _MISSING:  # deleted meanwhile, or a broken link
                        continue
                    raise self._translated(error, "list", found) from error
                if stat.S_ISREG(facts.st_mode):
                    yield _info(found, facts)

    def _entries(self, folder: _Folder, after: str | None) -> Iterator[_Folder | str]:
        """Return the content of a folder in order: folders, and the keys of files."""
        found: list[tuple[str, _Folder | str]] = []
        try:
            with os.scandir(self.root / folder.key) as entries:
                for entry in entries:
                    key = folder.key + entry.name
                    if not is_key(entry.name) or len(key) > MAX_KEY:
                        continue
                    if not _is_folder(entry):
                        if after is None or key > after:
                            found.append((entry.name, key))
                        continue
                    key += "/"  # a folder sorts as its name with the slash, or "a-b" would come after "a/b"
                    within = folder.links | ({_inode(entry)} if entry.is_symlink() else set())
                    if entry.is_symlink() and (_inode(entry) in folder.links or len(within) > _MOST_LINKS):
                        continue  # a cycle of links
                    if after is None or key > after or after.startswith(key):
                        found.append((f"{entry.name}/", _Folder(key, within)))
        except OSError as error:
            if error.errno in _MISSING:
                return iter(())
            raise self._translated(error, "list", folder.key) from error
        return iter([each for _, each in sorted(found, key=lambda pair: pair[0])])

    @contextlib.contextmanager
    def _reporting(self, operation: str, key: str) -> Iterator[None]:
        """Turn errors of the operating system into errors of a store."""
        try:
            yield
        except OSError as error:
            raise self._translated(error, operation, key) from error

    def _regular(self, operation: str, key: str, found: os.stat_result) -> os.stat_result:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise self._no_file(operation, key)
        return found

    def _no_file(self, operation: str, key: str) -> DataDamaged:
        return DataDamaged(failure(operation, key, self.url, "it is a pipe, a socket or a device, not a file."))

    def _translated(self, error: OSError, operation: str, key: str) -> DeltawireError:
        if error.errno == errno.ENXIO and operation in {"get", "read"}:  # opening a socket raises this
            return self._no_file(operation, key)
        if error.errno in _MISSING and operation in {"get", "head", "read"}:
            return ObjectMissing(failure(operation, key, self.url, "there is no such object."))
        if error.errno == errno.ENOTDIR and self.root.exists() and not self.root.is_dir():
            return StoreError(failure(operation, key, self.url, "it is a file. Name a directory."))
        kind = next((kind for kind, errnos in _KINDS.items() if error.errno in errnos), StoreError)
        return kind(failure(operation, key, self.url, f"{error.strerror or error}."))


def _fill(file: int, target: memoryview, offset: int, progress: Progress | None) -> int:
    """Read into the target as far as the file goes. Returns the number of bytes read."""
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done : done + _CHUNK]], offset + done)
        if count == 0:
            break
        done += count
        if progress is not None:
            progress(count)
    return done


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    """Return the facts about a file. Times outside the calendar are moved to its nearest end, so that periods can be added to them."""
    seconds = min(max(found.st_mtime, 0.0), _LATEST)
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(seconds, timezone.utc))


def _facts(path: Path) -> tuple[int, ...] | None:
    """Return what differs if a file was replaced or written. Returns None if it cannot be looked up; reading it then says why."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself
        return False


def _inode(entry: os.DirEntry[str]) -> tuple[int, int]:
    found = entry.stat()
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder by its key, which ends in a slash, and the folders that links on the path to it lead to."""

    key: str
    links: frozenset[tuple[int, int]]

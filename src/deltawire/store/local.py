"""A directory as a store, safe against crashes of the writer and of the machine.

An object is written to a temporary file under a hidden folder, flushed to disk, then linked to its name (create if absent: linking fails
if the name exists) or renamed over it, and its directory is flushed, and those above it that this process has not flushed since they were
made. So a name appears with all its bytes or not at all, and what was acknowledged survives a power failure. A writer that dies leaves at
most an empty folder, which harms nobody, and a temporary file, which the next writer removes: whoever writes one holds a lock on it, and
the lock dies with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
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
_ATTEMPTS = 16  # to find the folder there still when the object is placed; each failure is a lost race against a deleter

_REMEMBERED = 4096  # folders that need not be flushed again; each version has one of its own

_KINDS: dict[type[StoreError], set[int]] = {
    StoreFull: {errno.ENOSPC, errno.EDQUOT},
    StoreDenied: {errno.EACCES, errno.EPERM, errno.EROFS},
    StoreUnavailable: {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOMEM},
}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NEVER_WAIT = os.O_NONBLOCK | os.O_NOCTTY  # for a pipe without a writer, or a device
_LATEST = 32_503_680_000.0  # the year 3000
_MOST_LINKS = 4  # to folders, one inside the other
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore(Store):
    """The objects under a directory, which is created by the first write. Several processes may share it, on one machine or by a network
    mount.

    The file system must have hard links and honest fsync; `probe` finds out about the first.
    """

    def __init__(self, root: Path | str) -> None:
        if "\0" in str(root):
            raise BadUrl(f"{str(root)!r} is no path: it contains a null character.")
        self.root = Path(os.path.abspath(root))
        self.url = self.root.as_uri()
        self._staging = Staging(self.root / ".deltawire-tmp")
        self._durable: dict[Path, int] = {}
        """Folders, by inode, whose own names were flushed from here."""
        self._unflushed: set[str] = set()
        """Keys that were created, or found to exist, but could not be flushed."""

    def get(self, key: str, *, limit: int) -> bytes:
        if key in self._unflushed:  # whoever reads back what a creation came to takes what is read for durable
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
            # Asked first: a reader of a truncated file should not wait for gigabytes before it hears of it.
            if size < offset + len(target) or _fill(file, target, offset, progress) < len(target):
                raise DataDamaged(failure("read", key, self.url, f"it ends at byte {size}, before {offset + len(target)}."))

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_create(key, data)
        path = self._path(key)
        exists: ObjectExists | None = None
        with self._staged("create", key, [memoryview(data)], None, None) as temporary, self._reporting("create", key):
            try:
                self._place("create", key, path, lambda: os.link(temporary, path))
            except ObjectExists as error:  # flushed all the same: it may be our own, or that of a writer who died before he could
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
            self._place("put", key, path, lambda: os.replace(temporary, path))
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

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextlib.contextmanager
    def _reading(self, operation: str, key: str) -> Iterator[tuple[int, int]]:
        """The opened object and its size. What is renamed over it meanwhile does not disturb: the open file stays the old one."""
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
        """A temporary file with the data, on disk if `durable`. An error of the data's own iterator passes through, and nothing is left."""
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

    def _place(self, operation: str, key: str, path: Path, place: Callable[[], None]) -> None:
        """Give the temporary file its name, making the folder on the way if there is none, or if a deleter has just removed it as empty."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                try:
                    place()
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
        """Flush the folder, and those above it up to the first whose own name was flushed from here: that another process made one does not
        mean that it has flushed it yet, and one that was deleted and made anew is another."""
        made: list[tuple[Path, int | None]] = []
        while True:
            inode: int | None = None
            with contextlib.suppress(FileNotFoundError):  # deleted again already, and its folder with it
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
        """The files below a folder, in the order of their keys. Pipes, sockets, devices, and what lies too deep for a key are left out."""
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
                    if error.errno in _MISSING:  # deleted meanwhile, or a link to nowhere
                        continue
                    raise self._translated(error, "list", found) from error
                if stat.S_ISREG(facts.st_mode):
                    yield _info(found, facts)

    def _entries(self, folder: _Folder, after: str | None) -> Iterator[_Folder | str]:
        """What a folder holds, in order: folders, and the keys of files."""
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
                        continue  # a link that leads in a circle
                    if after is None or key > after or after.startswith(key):
                        found.append((f"{entry.name}/", _Folder(key, within)))
        except OSError as error:
            if error.errno in _MISSING:
                return iter(())
            raise self._translated(error, "list", folder.key) from error
        return iter([each for _, each in sorted(found, key=lambda pair: pair[0])])

    @contextlib.contextmanager
    def _reporting(self, operation: str, key: str) -> Iterator[None]:
        """Errors of the operating system, as errors of a store."""
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
        if error.errno == errno.ENXIO and operation in {"get", "read"}:  # what opening a socket gives
            return self._no_file(operation, key)
        if error.errno in _MISSING and operation in {"get", "head", "read"}:
            return ObjectMissing(failure(operation, key, self.url, "there is no such object."))
        kind = next((kind for kind, errnos in _KINDS.items() if error.errno in errnos), StoreError)
        return kind(failure(operation, key, self.url, f"{error.strerror or error}."))


def _fill(file: int, target: memoryview, offset: int, progress: Progress | None) -> int:
    """Read into the whole target, as far as the file goes; how many bytes came."""
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
    """Times that no calendar has are brought to its nearest end; grace periods and lives of pins can be added to what comes out."""
    seconds = min(max(found.st_mtime, 0.0), _LATEST)
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(seconds, timezone.utc))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, for one
        return False


def _inode(entry: os.DirEntry[str]) -> tuple[int, int]:
    found = entry.stat()
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder by its key, which ends with a slash, and the folders to which links led on the way there."""

    key: str
    links: frozenset[tuple[int, int]]

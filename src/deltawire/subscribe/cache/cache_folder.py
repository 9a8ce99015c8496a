"""One directory of a host cache: finished files, files that are being fetched, and the room for both.

    DIR/HASH-SIZE           a data object that was fetched and checked
    DIR/HASH-SIZE.part0     its beginning. The process that fetches it holds a `flock` on this file. If that process is killed, the kernel
                            releases the lock, and the next process continues the file.
    DIR/HASH-SIZE.part1     the same object, fetched by a second process because the first one has ended
    DIR/alive               `flock` file of all processes that use the directory (private_folder.py)

The directory belongs to one user. Each call opens it and looks at its owner and mode, and everything else goes through that descriptor, so
a directory that is exchanged meanwhile changes nothing. Links, pipes and files with several names are deleted and never used.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...format.records.record_parts import FileEntry
from .private_folder import check_private, make_private

IDLE_SECONDS = 900.0
"""Files that no process used for this long are deleted when the next file comes."""
_NAME = re.compile(r"[0-9a-f]{64}-(0|[1-9][0-9]{0,18})(\.part[0-9])?")
_RESERVE = 10
"""One part in this many of the file system stays free."""
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A directory of a host cache and its limits. It is made when it is opened.

    Parameters
    ----------
    path
        The directory.
    most_bytes
        The most bytes that its files have together.
    largest
        The size of the largest file that is kept there.
    """

    path: Path
    most_bytes: int
    largest: int

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenFolder]:
        """Open the directory for the time of a context. Raises `OSError`, or `SpoolError` if other users can write to it."""
        make_private(self.path)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        try:
            check_private(self.path, os.fstat(descriptor))
            yield OpenFolder(descriptor, self)
        finally:
            os.close(descriptor)


class Lead(enum.Enum):
    """The outcome of `OpenFolder.try_lead`."""

    OURS = enum.auto()
    """The file is locked, and this process fetches the object."""
    TAKEN = enum.auto()
    """Another process holds the lock."""
    FINISHED = enum.auto()
    """Another process has finished the file that the descriptor leads to."""
    GONE = enum.auto()
    """The file was deleted before it was finished. Open it again."""


class OpenFolder:
    """A directory that is open. Every method raises `OSError` if the directory cannot be used."""

    def __init__(self, descriptor: int, folder: CacheFolder, now: Callable[[], float] = time.time) -> None:
        self._descriptor = descriptor
        self._folder = folder
        self._now = now

    def find(self, entry: FileEntry) -> int | None:
        """Return a descriptor of a finished file, and note that it was used. Deletes what has its name but cannot be it."""
        name = _name(entry)
        try:
            found = os.open(name, os.O_RDONLY | _SAFELY, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
                raise
            self._unlink(name)
            return None
        try:
            facts = os.fstat(found)
            if _is_own_file(facts) and facts.st_size == entry.size:
                os.utime(found)
                return found
            self._unlink(name)
        except BaseException:
            os.close(found)
            raise
        os.close(found)
        return None

    def open_part(self, entry: FileEntry, number: int) -> int:
        """Return a descriptor of the unfinished file, which is created if it does not exist. `try_lead` locks it."""
        return self._open_part(_part(entry, number))

    def try_lead(self, entry: FileEntry, number: int, part: int) -> Lead:
        """Try to lock a file that `open_part` has opened.

        Parameters
        ----------
        entry
            The object.
        number
            The number of the unfinished file.
        part
            The descriptor. A process that waits keeps it open: after the other one has finished the file, it is the finished file, even
            if that was deleted at once to make room for the next one.
        """
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Lead.TAKEN
        facts = os.fstat(part)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(facts, os.stat(_part(entry, number), dir_fd=self._descriptor, follow_symlinks=False)):
                return Lead.OURS
        fcntl.flock(part, fcntl.LOCK_UN)
        return Lead.FINISHED if facts.st_size == entry.size else Lead.GONE

    def finish(self, entry: FileEntry, number: int) -> None:
        """Give the unfinished file of this process its name. Replaces a file that another process has finished meanwhile."""
        os.rename(_part(entry, number), _name(entry), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def drop(self, entry: FileEntry, found: int) -> None:
        """Delete a finished file, unless another process has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(found), os.stat(_name(entry), dir_fd=self._descriptor, follow_symlinks=False)):
                self._unlink(_name(entry))

    def drop_part(self, entry: FileEntry, number: int) -> None:
        """Delete the unfinished file of this process, which holds its lock."""
        self._unlink(_part(entry, number))

    def sign(self, entry: FileEntry, number: int) -> tuple[int, int] | None:
        """Return what changes while a process fetches an object: the size of the unfinished file, and when it was changed."""
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(_part(entry, number), dir_fd=self._descriptor, follow_symlinks=False)
            return facts.st_size, facts.st_mtime_ns
        return None

    def make_room(self, entry: FileEntry, number: int) -> None:
        """Delete files that were not used for longest until there is room for this one, and all that nobody used for `IDLE_SECONDS`.

        Files that are being fetched count with their full size and stay. Call it with the lock of the unfinished file, which exists: of
        two processes that make room at the same time, at least one sees the file of the other. Raises `OSError` with ENOSPC if there is
        too little room. Processes that have a deleted file open can still read it.
        """
        own = _part(entry, number)
        present = os.stat(own, dir_fd=self._descriptor, follow_symlinks=False).st_size
        total = entry.size
        files: list[tuple[float, str, int]] = []
        for name in os.listdir(self._descriptor):
            matched = _NAME.fullmatch(name)
            if matched is None or name == own:
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                size = int(matched[1]) if matched[2] else facts.st_size
                total += size
                files.append((facts.st_mtime, name, size))
        for used, name, size in sorted(files):
            is_needed = total > self._folder.most_bytes or not self._has_space(entry.size - present)
            if not is_needed and used > self._now() - IDLE_SECONDS:
                break
            if self._discard(name):
                total -= size
        if total > self._folder.most_bytes or not self._has_space(entry.size - present):
            raise OSError(errno.ENOSPC, "there is too little room for a file of the host cache", str(self._folder.path))

    def _has_space(self, size: int) -> bool:
        facts = os.fstatvfs(self._descriptor)
        return facts.f_bavail * facts.f_frsize >= size + facts.f_blocks * facts.f_frsize // _RESERVE

    def _discard(self, name: str) -> bool:
        """Delete a file. Returns False for an unfinished file that a process still fetches."""
        if ".part" not in name:
            self._unlink(name)
            return True
        part = self._open_part(name)
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(part), os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)):
                    self._unlink(name)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(part)

    def _open_part(self, name: str) -> int:
        """Open or create an unfinished file. Deletes what is not a file of this user alone, because writing could change something else."""
        for _ in range(3):
            try:
                part = os.open(name, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600, dir_fd=self._descriptor)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENXIO):
                    raise
                self._unlink(name)
                continue
            if _is_own_file(os.fstat(part)):
                return part
            os.close(part)
            self._unlink(name)
        raise OSError(errno.EEXIST, "something else keeps the name of a file of the host cache", str(self._folder.path / name))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def _name(entry: FileEntry) -> str:
    return f"{entry.blake3}-{entry.size}"


def _part(entry: FileEntry, number: int) -> str:
    return f"{_name(entry)}.part{number}"


def _is_own_file(facts: os.stat_result) -> bool:
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink <= 1 and facts.st_uid == os.getuid()

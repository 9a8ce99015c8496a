"""Temporary files of the local store. An object is written to one before it gets its name.

The writer of a temporary file holds a lock on it, and the lock ends with the process. A temporary file that can be locked has no writer and
is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

_ATTEMPTS = 16  # each failed attempt to make a file is a lost race against a cleaner, so a few attempts suffice


class Staging:
    """Manages the hidden folder `folder`, which is made when it is first needed. Safe for threads and for several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prepared = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[int, Path]]:
        """Open a new, empty file for writing. Yields its descriptor and its path. Link or rename it: the path is removed afterwards."""
        self._prepare()
        file, path = self._new()
        try:
            yield file, path
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(file)  # after the unlink, because closing releases the lock

    def _new(self) -> tuple[int, Path]:
        for _ in range(_ATTEMPTS):
            path = self._folder / secrets.token_hex(16)
            try:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                self._folder.mkdir(parents=True, exist_ok=True)
                continue
            if _held(file) and os.fstat(file).st_nlink > 0:
                return file, path
            os.close(file)  # a cleaner removed it between creation and lock
        raise OSError(errno.ESTALE, "temporary files vanish as soon as they are made")

    def _prepare(self) -> None:
        """Make the folder once, make its path durable, and remove the files of dead writers."""
        with self._lock:
            if self._prepared:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            for folder in self._folder.parents:
                with contextlib.suppress(OSError):  # folders above the store may belong to another user
                    sync_folder(folder)
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        _remove_if_abandoned(entry.path)
            self._prepared = True


def sync_file(file: int) -> None:
    """Flush an open file or directory to the disk itself."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, where fsync stops at the drive's cache
    if full is None:
        os.fsync(file)
    else:
        fcntl.fcntl(file, full)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(file)
    finally:
        os.close(file)


def _held(file: int) -> bool:
    """Lock a new file. Returns False if a cleaner holds it. A file system without locks has no cleaners either, so the file counts as
    locked.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_if_abandoned(path: str) -> None:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)  # for writing, because NFS needs that for an exclusive lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(file)

"""Directories that belong to one user and that processes of one host share: who may write to them, and when they were left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import SpoolError
from ..mirror.locks import FileLock

ALIVE = "alive"
"""The `flock` file of a folder that running processes use. A folder with such a file that no process holds was left by killed ones."""

_PAUSE = 0.02
_PATIENCE = 10.0
"""Seconds for which a folder is waited for that another process deletes."""
_HEALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""Conditions that may end without help, for example when another program frees space."""


def hold_folder(folder: Path, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic) -> FileLock:
    """Make a folder, and take its lock `ALIVE`, so that `remove_abandoned` leaves it alone until the lock is released.

    Raises `SpoolError`, which is retryable, if another process deletes the folder and does not finish, for example because it is stopped.

    Parameters
    ----------
    folder
        The folder. Several processes may hold it.
    sleep, clock
        For tests.
    """
    deadline = clock() + _PATIENCE
    while clock() <= deadline:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (folder / ALIVE).touch()
        lock = FileLock.try_shared(folder / ALIVE)
        if lock is not None and lock.is_on(folder / ALIVE):
            return lock
        if lock is not None:  # another process has taken the folder for an abandoned one
            lock.release()
        sleep(_PAUSE)
    raise retryable_error(f"{folder} is being deleted by another process, which does not finish.")


def remove_abandoned(parent: Path) -> None:
    """Delete the folders that no process uses now. Each process holds the lock `ALIVE` in its folder (`hold_folder`).

    Parameters
    ----------
    parent
        The directory with these folders.
    """
    for folder in list(parent.iterdir()) if parent.is_dir() else ():
        if not (folder / ALIVE).exists():
            continue
        with spool_errors(folder), contextlib.suppress(FileNotFoundError):  # another process may delete it at the same time
            lock = FileLock.try_exclusive(folder / ALIVE)
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def spool_errors(path: Path) -> Iterator[None]:
    """Raise `SpoolError` for any `OSError`. It is retryable if a later attempt may succeed."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename or path}: {error.strerror or error}."
        raise (retryable_error(message) if error.errno in _HEALS else SpoolError(message)) from error


def retryable_error(message: str) -> SpoolError:
    """Return a `SpoolError` that is retryable."""
    error = SpoolError(message)
    error.retryable = True
    return error


def make_private(folder: Path) -> None:
    """Make a directory that only this user can enter. Raises `SpoolError` if others can write to the one that exists, because they could
    replace its files.

    Parameters
    ----------
    folder
        The directory.
    """
    with contextlib.suppress(FileExistsError):  # a file, which the check refuses
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path, facts: os.stat_result | None = None) -> None:
    """Raise `SpoolError` unless only this user can write to a directory.

    Parameters
    ----------
    folder
        The directory.
    facts
        Its owner and mode, if it is open. None looks at the path.
    """
    found = folder.lstat() if facts is None else facts
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SpoolError(
            f"{folder} is not a directory that only this user can write to.",
            hint="Name a directory that does not exist yet. It is then made so.",
        )

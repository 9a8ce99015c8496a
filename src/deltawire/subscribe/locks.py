"""Locks between processes: `flock` on small files. The kernel frees them when a process ends, however it ends.

They belong to the open file, not to the process: two holders in one process exclude each other like any two, and a forked child shares what
its parent held. So what was held alone is unlocked in so many words by the process that took it: merely closed, it would stay locked for as
long as a child lives that was forked meanwhile, and nobody could ever update the mirror. What is shared is only closed, for the child may
read there.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class FileLock:
    """A lock that is held. Made by `try_shared` and `try_exclusive`; given up by `release`, at the latest when the process ends."""

    def __init__(self, descriptor: int, *, exclusive: bool) -> None:
        self._descriptor: int | None = descriptor
        self._owner = os.getpid() if exclusive else None

    @classmethod
    def try_shared(cls, path: Path) -> FileLock | None:
        """Share the lock, if nobody has it exclusively and its file exists. Needs no permission to write."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        return cls._try(descriptor, fcntl.LOCK_SH)

    @classmethod
    def try_exclusive(cls, path: Path) -> FileLock | None:
        """Have the lock alone, if nobody else has it. Makes its file."""
        return cls._try(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), fcntl.LOCK_EX)

    @classmethod
    def wait_exclusive(cls, path: Path) -> FileLock:
        """Have the lock alone, as soon as nobody else has it: for what takes others an instant only."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, exclusive=True)

    @classmethod
    def _try(cls, descriptor: int, kind: int) -> FileLock | None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, exclusive=kind == fcntl.LOCK_EX)

    def share(self) -> None:
        """Let others share what was exclusive. `flock` gives it up for an instant: whoever could take it exclusively must be kept out."""
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._owner = None

    def release(self) -> None:
        """Give it up. Doing so twice is fine."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._owner == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

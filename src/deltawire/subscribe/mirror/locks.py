"""Locks between processes: `flock` on small files. The kernel releases them when a process ends.

A lock belongs to the open file, not to the process. Two holders in one process exclude each other, and a forked child shares the locks of
its parent. So the process that took an exclusive lock unlocks it explicitly. If it only closed the file, the lock would stay for as long as
a forked child lives, and the mirror could not be updated. A shared lock is only closed, because the child may still read there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from ...errors import MirrorBusy

PATIENCE = 30.0
"""Seconds without a sign of life after which the holder of a lock counts as stopped."""
_BEAT = 1.0
"""Seconds between two signs of life."""
_PAUSE = 0.02


class FileLock:
    """A lock that is held. `try_shared` and `try_exclusive` make it. `release`, or the end of the process, gives it up."""

    def __init__(self, descriptor: int, *, exclusive: bool) -> None:
        self._descriptor: int | None = descriptor
        self._owner = os.getpid() if exclusive else None

    @classmethod
    def try_shared(cls, path: Path) -> FileLock | None:
        """Take the lock with others, if no process holds it exclusively and its file exists. Needs no permission to write."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        return cls._try(descriptor, fcntl.LOCK_SH)

    @classmethod
    def try_exclusive(cls, path: Path) -> FileLock | None:
        """Take the lock exclusively, if no other process holds it. Creates its file."""
        return cls._try(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), fcntl.LOCK_EX)

    @classmethod
    def wait_exclusive(cls, path: Path) -> FileLock:
        """Wait for the lock and take it exclusively. Use it only for locks that are held for very short times.

        Raises `MirrorBusy` if one holder keeps it for longer than `PATIENCE` seconds.
        """
        watch = LifeWatch(path)
        while (lock := cls.try_exclusive(path)) is None:
            watch.check()
            time.sleep(_PAUSE)
        lock._sign()
        return lock

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
        """Turn an exclusive lock into a shared one. `flock` releases it for an instant, so the caller must keep other writers out."""
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._owner = None

    def is_on(self, path: Path) -> bool:
        """Return whether this is still the lock of the file at a path. Another process may have deleted or replaced the file."""
        assert self._descriptor is not None
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        return False

    @contextlib.contextmanager
    def showing_life(self) -> Iterator[None]:
        """Touch the lock's file regularly while the context lasts, so that others can see that this process runs."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT):
                self._sign()

        self._sign()
        beating = threading.Thread(target=beat, name="deltawire-lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join()

    def _sign(self) -> None:
        """Write this process's number into the lock's file, which also sets the file's time. A full disk is ignored."""
        assert self._descriptor is not None
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)
            os.pwrite(self._descriptor, b"%-20d" % os.getpid(), 0)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._owner == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class ChangeWatch:
    """Tells how long a sign of life has not changed. Only the watcher's own clock counts. Dates are never compared."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: object = None
        self._since = clock()

    def seconds(self, sign: object) -> float:
        """Return for how many seconds the sign has been the same, each time that it was looked at.

        Parameters
        ----------
        sign
            What the watched process changes while it runs.
        """
        now = self._clock()
        if sign != self._seen:
            self._seen, self._since = sign, now
        return now - self._since


class LifeWatch:
    """Tells whether the process that holds a lock still runs, by changes of the lock's file."""

    def __init__(self, path: Path, patience: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._patience = PATIENCE if patience is None else patience
        self._watch = ChangeWatch(clock=clock)

    def check(self) -> None:
        """Raise `MirrorBusy` if the holder has shown no sign of life for too long."""
        sign = self._sign()
        seconds = self._watch.seconds(sign)
        if seconds > self._patience:
            holder = sign[1].decode(errors="replace").strip() or "unknown"
            raise MirrorBusy(f"{self._path}: process {holder} holds this lock, but has not run for {seconds:.0f} s.")

    def _sign(self) -> tuple[int, bytes]:
        try:
            return os.stat(self._path).st_mtime_ns, self._path.read_bytes()[:20]
        except FileNotFoundError:
            return 0, b""

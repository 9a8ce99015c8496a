"""Announce files that several processes upload, while they still encode others.

The processes send the names of their files to the first one, which announces them all (`upload.announcer`). They do this on a thread and a
channel of their own, so neither encoding nor the commit waits for it. If a process dies, announcing ends, and nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time

from ...format.records.record_parts import CommitRef, FileEntry
from ..shortcuts.job_thread import JobThread
from ..upload import announcer
from ..upload.announcer import Announcer
from .ranks import Ranks, collect_at_first

Aim = tuple[CommitRef, int]
"""The commit that a delta builds on, and the number that its own commit will probably have."""


class _Version:
    """The files of one version that this process has uploaded and not sent to the first one."""

    def __init__(self, aim: Aim | None) -> None:
        self.aim = aim
        self._changed = threading.Condition()
        self._files: list[FileEntry] = []
        self._is_complete = False
        self._due = time.monotonic() + announcer.INTERVAL

    def add(self, entry: FileEntry) -> None:
        with self._changed:
            self._files.append(entry)

    def complete(self) -> None:
        """Note that this process uploads no more files."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def next(self) -> tuple[list[FileEntry], bool]:
        """Wait until it is time to send files. Return them, and whether no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_complete, max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + announcer.INTERVAL
            files, self._files = self._files, []
            return files, self._is_complete


class SharedAnnouncer:
    """Announces the files of all processes. Every process has one, and begins and ends the same versions.

    `add` is called on threads that upload, the other methods on the thread that writes versions. Nothing here raises.

    Parameters
    ----------
    ranks
        The processes, on a channel that nothing else uses.
    jobs
        The thread on which files are sent to the first process. It does nothing else.
    announcer
        Announces the files, in the first process.
    """

    def __init__(self, ranks: Ranks, jobs: JobThread, announcer: Announcer | None) -> None:
        self._ranks = ranks
        self._jobs = jobs
        self._announcer = announcer
        self._lock = threading.Lock()
        self._version: _Version | None = None
        self._is_broken = False

    def begin(self, aim: Aim | None) -> None:
        """Begin a version.

        Parameters
        ----------
        aim
            What the version builds on, in the first process. It does not matter in the others.
        """
        self.end()
        self._version = version = _Version(aim)
        self._jobs.do(lambda: self._send(version))

    def add(self, entry: FileEntry) -> None:
        """Note that this process has uploaded a file."""
        if (version := self._version) is not None:
            version.add(entry)

    def uploaded(self) -> None:
        """Note that this process has uploaded all of its files, or gave up. Every process must call it after `begin`."""
        if self._version is not None:
            self._version.complete()

    def end(self) -> None:
        """End the version, because its commit is in the chain or will not come."""
        self.uploaded()
        with self._lock:
            self._version = None
            if self._announcer is not None:
                self._announcer.end()

    def close(self, seconds: float) -> None:
        """End, and wait at most this many seconds until the other processes have ended, too.

        Parameters
        ----------
        seconds
            The seconds. 0 if the other processes may have died.
        """
        self.end()
        self._jobs.wait_until_idle(seconds)
        self._jobs.abandon()

    def _send(self, version: _Version) -> None:
        """Send files to the first process, again and again, until all processes have sent all. All processes do this together."""
        is_begun = is_over = False
        while not (is_over or self._is_broken):
            files, is_complete = version.next()
            try:
                sent = collect_at_first(self._ranks, [entry.plain() for entry in files])
                is_over = all(_flags(self._ranks, is_complete))
            except Exception:  # a process has died. The publisher notices that by itself
                self._is_broken = True
                return
            with self._lock:
                if self._announcer is None or self._version is not version or version.aim is None:
                    continue
                if not is_begun:
                    self._announcer.begin(*version.aim)
                    is_begun = True
                for entry in itertools.chain.from_iterable(sent):
                    self._announcer.add(FileEntry(**entry))


def _flags(ranks: Ranks, own: bool) -> list[bool]:
    return [flag == b"1" for flag in ranks.exchange(b"1" if own else b"0")]

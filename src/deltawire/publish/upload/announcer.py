"""Announce files of a version while others are still encoded, so that readers fetch them early (docs/protocol.md §4).

An announcement is only a hint: the commit does not wait for it, and its failure is ignored.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor

from ...errors import DeltawireError
from ...format.records.announcement_records import Announcement
from ...format.records.file_list import MOST_IN_RECORD
from ...format.records.record_parts import CommitRef, FileEntry
from ...format.records.signing import SigningKey
from ...store import keys
from ...store.base import Store

INTERVAL = 0.25
"""Seconds between two announcements, and from the beginning of a version to its first one. Quick versions are never announced."""


class Announcer:
    """Announces the files of a writer's next version, one version at a time. At most one announcement is in flight.

    `add` is called on the threads that upload, all other methods on the thread that writes versions.

    Parameters
    ----------
    store
        The store of the chain.
    pool
        Puts the announcements.
    run_id, epoch
        The run, and the epoch of the writer.
    signing_key
        Signs the announcements. None on a chain that is not signed.
    """

    def __init__(self, store: Store, pool: Executor, run_id: str, epoch: int, signing_key: SigningKey | None = None) -> None:
        self._store = store
        self._pool = pool
        self._run_id = run_id
        self._epoch = epoch
        self._key = signing_key
        self._changed = threading.Condition()
        self._aim: tuple[CommitRef, int] | None = None
        self._files: list[FileEntry] = []
        self._announced = 0
        """The number of files in the last announcement."""
        self._is_running = False
        self._due = 0.0
        self._number = 0

    def begin(self, base: CommitRef, seq: int) -> None:
        """Begin a version: a delta from `base` that will probably be commit `seq`."""
        self._set((base, seq))

    def add(self, entry: FileEntry) -> None:
        """Note that a file is uploaded, so that it is announced soon. Never waits for the store, and raises nothing."""
        with self._changed:
            if self._aim is None:
                return
            self._files.append(entry)
            if self._is_running:
                return
            self._is_running = True
        try:
            self._pool.submit(self._run)
        except RuntimeError:  # the pool was shut down
            self._is_running = False

    def end(self) -> None:
        """End the version, because its commit is in the chain or will not come. An announcement that is in flight may still arrive."""
        self._set(None)

    def _set(self, aim: tuple[CommitRef, int] | None) -> None:
        with self._changed:
            self._aim, self._files, self._announced = aim, [], 0
            self._due = time.monotonic() + INTERVAL
            self._changed.notify_all()

    def _run(self) -> None:
        """Announce until nothing is left to announce."""
        try:
            while (record := self._next()) is not None:
                signed = record if self._key is None else self._key.sign(record)
                self._store.put(keys.COMING, signed.to_bytes(), durable=False)
        except BaseException as error:
            self._is_running = False
            if not isinstance(error, DeltawireError):
                raise

    def _next(self) -> Announcement | None:
        """Return the next announcement when it is time for it. None if there is nothing new: then this run has ended."""
        with self._changed:
            while self._aim is not None and len(self._files) > self._announced:
                left = self._due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                base, seq = self._aim
                files = sorted(self._files, key=lambda entry: entry.first or 0)[:MOST_IN_RECORD]
                number, self._number = self._number, self._number + 1
                self._announced = len(self._files)
                self._due = time.monotonic() + INTERVAL
                return Announcement(self._run_id, self._epoch, number, seq, base, tuple(files))
            self._is_running = False
            return None

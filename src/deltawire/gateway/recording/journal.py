"""Keeps on disk what the store does not have yet, so that a gateway that is killed loses nothing.

    {journal}/{session}/lock                               held while a process uses the session; has the id of the run
    {journal}/{session}/intents.log                        answers that were given; "done" when their row is synced, or never will be
    {journal}/{session}/rows-{log}.log                     a row log: what is recorded of some answers
    {journal}/{session}/{number}-{blake3}.{log}.bin        the last file of interactions that was made of a row log
    {journal}/{session}/{number}-{blake3}.{log}.part       an earlier file of the same row log; it counts only if the last one exists

A row log ends before it has more than one file holds. It becomes one file with a fixed number. A larger row log, which an older release
wrote, becomes several files. When the last one has its name, the row log is deleted; then its files are put into the store in the order of
their numbers, and each is deleted. Every step can be repeated after a kill, and gives the same files, so nothing is stored under two names.

A write is in the system's memory when it returns, so it survives the end of the process. After a loss of power there is at least what was
written before the last `sync`. Besides, a row is on the disk before its row log becomes a file, the file is there as a whole before it has
its name, and both its name and the marks of its answers are there before the row log is deleted. A compacted log of intents is on the disk
before it replaces the old one. So a loss of power leads to no wrong file, and to no answer that is recorded twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...format.interactions import MAX_INTERACTIONS
from ...format.live_parts import is_session
from ...format.records.record_parts import NONCE
from .journal_log import DONE, INTENT, RECORD, JournalDisk, RowLog, read_rows, write_all

MOST_ROWS, MOST_ROW_BYTES = 512, 8 << 20
"""A row log has at most this many rows and bytes, and at least one row."""
_COMPACT_BYTES = 4 << 20
_ROW_LOG = re.compile(r"rows-([0-9]{10})\.log")
_FILE = re.compile(r"([0-9]{20})-([0-9a-f]{64})\.([0-9]{10})\.(bin|part)")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of interactions that waits for the store."""

    path: Path
    number: int
    blake3: str
    row_log: int

    def read(self) -> bytes | None:
        """Return its bytes, or None if it is damaged."""
        data = self.path.read_bytes()
        return data if blake3(data).hexdigest() == self.blake3 else None


class _Room:
    """Counts what a row log holds, or a part of it."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self.rows = self.bytes = self.interactions = 0

    def fits(self, size: int, row: Mapping[str, Any]) -> bool:
        """Return whether a row of this many bytes may be added."""
        return not self.rows or (
            self.rows < self._most_rows
            and self.bytes + size <= MOST_ROW_BYTES
            and self.interactions + _interactions(row) <= MAX_INTERACTIONS
        )

    def add(self, size: int, row: Mapping[str, Any]) -> None:
        """Count a row."""
        self.rows += 1
        self.bytes += size
        self.interactions += _interactions(row)

    @property
    def is_used(self) -> bool:
        """Whether a further row will hardly fit."""
        return self.rows >= self._most_rows or self.bytes >= MOST_ROW_BYTES or self.interactions >= MAX_INTERACTIONS


class Journal:
    """The journal of one session of a gateway. May be used from several threads.

    Parameters
    ----------
    folder
        The directory of all sessions.
    session
        The session.
    run
        The id of the run whose answers are recorded. It is noted in a new journal.
    disk
        The operations on the disk.
    most_rows
        The most rows of a row log.
    """

    def __init__(
        self, folder: Path, session: str, *, run: str | None = None, disk: JournalDisk | None = None, most_rows: int | None = None
    ) -> None:
        self.session = session
        self._most_rows = most_rows or MOST_ROWS
        self.is_closed = False
        self._disk = disk or JournalDisk()
        self._folder = folder / session
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.RLock()
        self._syncing = threading.RLock()
        """Held while files are synced, replaced or closed. It is taken before the other lock, which no thread holds for long."""
        self._held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._held)
            raise
        self._unmarked: list[str] = []
        self._unsynced: dict[str, bytes] = {}
        """The intents whose row is written, but perhaps not on the disk."""
        self._ended: list[RowLog] = []
        self._since: list[tuple[bytes, bytes]] | None = None
        self.open_intents: dict[str, bytes] = {}
        """The intents that have no row yet, by id."""
        self._room = self._new_room()
        self._has_new_names = True
        try:
            if run is not None and os.fstat(self._held).st_size == 0:
                os.write(self._held, run.encode())
                os.fsync(self._held)
            self._disk.sync_folder(folder)
            row_logs = [number for number, _ in self._row_logs()]
            self._drop_damaged(row_logs)
            self._row_log = max([*row_logs, *(file.row_log for file in self.files())], default=-1) + 1
            self._recover(row_logs)
            self._sync_old(row_logs)
            self._intents = RowLog(self._disk, self._folder / "intents.log")
            self._compact()  # an intent whose row was found is done for good, even when the row has left the journal
            self._rows, self._has_new_names = self._open_rows(self._row_log), True
        except BaseException:
            os.close(self._held)
            raise

    @property
    def rows(self) -> int:
        """The number of rows in the row log that grows."""
        return self._room.rows

    @property
    def size(self) -> int:
        """The bytes of all files of the session."""
        with self._lock:
            return 0 if self.is_closed else sum(_size(path) for path in self._folder.iterdir())

    def add_intent(self, name: str, intent: Mapping[str, Any]) -> None:
        """Note that an answer is given. Raises `OSError`, and `ValueError` if the intent is too long."""
        data = json.dumps(intent, separators=(",", ":")).encode()
        with self._lock:
            self._check_open()
            self._note(INTENT, data)
            self.open_intents[name] = data

    def add_row(self, name: str, row: Mapping[str, Any]) -> bool:
        """Record an answer. Its intent is then done. Return whether its row log has as much as one file should hold.

        Raises `OSError`, and `ValueError` if the row is too long.
        """
        data = json.dumps(row, separators=(",", ":")).encode()
        with self._lock:
            self._check_open()
            if not self._room.fits(len(data), row):
                self.rotate()
            self._rows.append(RECORD, data)
            self._room.add(len(data), row)
            if (intent := self.open_intents.pop(name, None)) is not None:
                self._unsynced[name] = intent
            return self._room.is_used

    def drop_intent(self, name: str) -> None:
        """Note that an intent gets no row. Raises `OSError`."""
        with self._lock:
            self._check_open()
            if self.open_intents.pop(name, None) is not None:
                self._unmarked.append(name)
                self._mark()

    def rotate(self) -> None:
        """End the row log that grows, if it has rows, and begin another. Raises `OSError`."""
        with self._lock:
            self._check_open()
            if self._room.rows:
                opened = self._open_rows(self._row_log + 1)
                self._ended.append(self._rows)
                self._row_log += 1
                self._rows, self._room, self._has_new_names = opened, self._new_room(), True

    def sync(self) -> None:
        """Bring everything onto the disk that was written before, and shorten the log of intents if it is long. Raises `OSError`.

        Other threads may write meanwhile.
        """
        with self._syncing:
            self._check_open()
            self._sync_rows()
            self._sync_intents()
            with self._lock:
                is_long = self._intents.size > _COMPACT_BYTES + 4 * sum(map(len, self.open_intents.values()))
            if is_long:
                self._compact()

    def ended_row_logs(self) -> list[int]:
        """Return the row logs that wait to become files, oldest first."""
        with self._lock:
            sealed = {file.row_log for file in self.files()}
            return sorted(number for number, _ in self._row_logs() if number != self._row_log and number not in sealed)

    def sealed_row_logs(self) -> list[int]:
        """Return the row logs whose files are complete, so that nobody needs their rows."""
        with self._lock:
            sealed = {file.row_log for file in self.files()}
            return sorted(number for number, _ in self._row_logs() if number in sealed)

    def parts(self, row_log: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a row log in parts, each of which should fit into one file. Most row logs are one part."""
        part: list[dict[str, Any]] = []
        room = self._new_room()
        for kind, data in read_rows(self._row_log_path(row_log)):
            if kind == RECORD:
                row = json.loads(data)
                if not room.fits(len(data), row):
                    yield part
                    part, room = [], self._new_room()
                part.append(row)
                room.add(len(data), row)
        if part:
            yield part

    def seal(self, row_log: int, files: Iterable[tuple[int, bytes]]) -> list[SealedFile]:
        """Keep the files of interactions that are made of a row log. They count when all of them are on the disk. Raises `OSError`.

        Parameters
        ----------
        row_log
            The row log.
        files
            The numbers, in ascending order, and the bytes of the files.
        """
        with self._syncing:
            self._check_open()
            self._sync_rows()
        for old in self._found("part", row_log):  # of a time when this was not finished
            self._disk.unlink(old.path)
        made = [self._write_part(row_log, number, data) for number, data in files]
        if made:
            self._disk.sync_folder(self._folder)
            last = made[-1]
            named = SealedFile(last.path.with_suffix(".bin"), last.number, last.blake3, row_log)
            self._disk.rename(last.path, named.path)
            self._disk.sync_folder(self._folder)
            made[-1] = named
        return made

    def files(self) -> list[SealedFile]:
        """Return the files that wait for the store, by number."""
        found = self._found("bin")
        whole = {file.row_log for file in found}
        found += [file for file in self._found("part") if file.row_log in whole]
        return sorted(found, key=lambda file: file.number)

    def forget_row_log(self, row_log: int) -> None:
        """Delete a row log of which nothing is needed, or whose files are sealed. Raises `OSError`."""
        with self._syncing:
            self._check_open()
            self._sync_rows()
            self._sync_intents()  # otherwise the next session would record an answer of the row log again
            self._disk.unlink(self._row_log_path(row_log))
            self._disk.sync_folder(self._folder)  # a file of it may be deleted from now on

    def forget_file(self, file: SealedFile) -> None:
        """Delete a file that the store has. Raises `OSError`."""
        self._disk.unlink(file.path)

    def is_empty(self) -> bool:
        """Return whether nothing waits for anything."""
        with self._lock:
            return not self.rows and not self.open_intents and not self.files() and not self.ended_row_logs()

    def close(self, *, remove: bool = False) -> None:
        """Release the session, and delete its directory if asked."""
        with self._syncing, self._lock:
            self.is_closed = True
            if remove:
                for path in sorted(self._folder.iterdir()):  # the intents before the rows: without them, rows give no answer twice
                    self._disk.unlink(path)
                with contextlib.suppress(OSError):  # a gateway that starts just now may have opened it
                    self._folder.rmdir()
            for log in (self._intents, self._rows, *self._ended):
                log.close()
            with contextlib.suppress(OSError):
                os.close(self._held)

    def _check_open(self) -> None:
        if self.is_closed:  # the number of a file that was closed may belong to another one
            raise OSError(errno.EBADF, "the journal is closed")

    def _row_log_path(self, row_log: int) -> Path:
        return self._folder / f"rows-{row_log:010}.log"

    def _new_room(self) -> _Room:
        return _Room(self._most_rows)

    def _open_rows(self, row_log: int) -> RowLog:
        return RowLog(self._disk, self._row_log_path(row_log))

    def _row_logs(self) -> list[tuple[int, Path]]:
        found = ((_ROW_LOG.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _found(self, kind: str, row_log: int | None = None) -> list[SealedFile]:
        found = [(path, _FILE.fullmatch(path.name)) for path in self._folder.iterdir()]
        files = [SealedFile(path, int(m[1]), m[2], int(m[3])) for path, m in found if m and m[4] == kind]
        return [file for file in files if row_log in (None, file.row_log)]

    def _write_part(self, row_log: int, number: int, data: bytes) -> SealedFile:
        digest = blake3(data).hexdigest()
        temporary = self._folder / "sealing.tmp"
        descriptor = self._disk.open(temporary, fresh=True)
        try:
            write_all(self._disk, descriptor, data)
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        file = SealedFile(self._folder / f"{number:020}-{digest}.{row_log:010}.part", number, digest, row_log)
        self._disk.rename(temporary, file.path)
        return file

    def _drop_damaged(self, row_logs: list[int]) -> None:
        """Delete files that do not count, and those that can be made again and are not what their name says."""
        for file in self.files():
            if file.row_log in row_logs and file.read() is None:
                for each in self._found("bin", file.row_log):
                    self._disk.unlink(each.path)
        whole = {file.row_log for file in self._found("bin")}
        for file in self._found("part"):
            if file.row_log not in whole:
                self._disk.unlink(file.path)

    def _recover(self, row_logs: list[int]) -> None:
        """Read the intents of a session that ended, and forget those that have a row."""
        for kind, data in read_rows(self._folder / "intents.log"):
            if kind == INTENT:
                self.open_intents[str(json.loads(data)["id"])] = data
            else:
                self.open_intents.pop(data.decode(), None)
        if self.open_intents:  # only the newest rows can lack their marks, but reading all of them is simpler
            for row_log in row_logs:
                for part in self.parts(row_log):
                    for row in part:
                        self.open_intents.pop(str(row["interactions"][0]["id"]), None)

    def _sync_old(self, row_logs: list[int]) -> None:
        """Sync the rows that an ended session wrote, because their intents are about to be forgotten."""
        for row_log in row_logs:
            log = self._open_rows(row_log)
            try:
                log.sync()
            finally:
                log.close()

    def _sync_rows(self) -> None:
        """Sync the rows, and then mark their intents: a mark must not be on the disk without the row."""
        with self._lock:
            ended, growing, names = list(self._ended), self._rows, list(self._unsynced)
        for log in ended:
            log.sync()
            log.close()
            self._ended.remove(log)
        growing.sync()
        self._sync_names()
        with self._lock:
            for name in names:
                del self._unsynced[name]
                self._unmarked.append(name)
            self._mark()

    def _sync_intents(self) -> None:
        self._intents.sync()
        self._sync_names()

    def _sync_names(self) -> None:
        if self._has_new_names:
            self._has_new_names = False
            try:
                self._disk.sync_folder(self._folder)
            except OSError:
                self._has_new_names = True
                raise

    def _note(self, kind: bytes, data: bytes) -> None:
        """Write into the log of intents, and into the one that is about to replace it."""
        self._intents.append(kind, data)
        if self._since is not None:
            self._since.append((kind, data))

    def _mark(self) -> None:
        """Write down which intents are done. Raises `OSError`, and then the next call writes the rest."""
        while self._unmarked:
            self._note(DONE, self._unmarked[0].encode())
            del self._unmarked[0]

    def _compact(self) -> None:
        """Replace the log of intents by one with the open ones only. Intents may be added and dropped meanwhile."""
        with self._lock:
            kept = [*self._unsynced.values(), *self.open_intents.values()]
            self._since = []
        temporary = self._folder / "intents.tmp"
        try:
            log = RowLog(self._disk, temporary, fresh=True)
            try:
                for data in kept:
                    log.append(INTENT, data)
                log.sync()
                with self._lock:
                    for kind, data in self._since:
                        log.append(kind, data)
                    self._disk.rename(temporary, self._folder / "intents.log")
                    log, self._intents, self._has_new_names = self._intents, log, True
            finally:
                log.close()
        finally:
            with self._lock:
                self._since = None
        self._sync_names()


def ended_sessions(
    folder: Path, *, run: str | None = None, disk: JournalDisk | None = None, most_rows: int | None = None
) -> Iterator[Journal]:
    """Yield the journals of sessions that no process uses now. The parameters are those of `Journal`.

    Sessions of other runs than `run` are left out. A journal of an older release does not name its run, and counts as one of every run.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and is_session(path.name) and _may_be_of(run, path):
            try:
                yield Journal(folder, path.name, disk=disk, most_rows=most_rows)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.ENOENT):  # in use, or removed just now
                    raise


def sessions_in_use(folder: Path, name: str, ended: Iterable[Journal], *, run: str | None = None) -> list[str]:
    """Return the sessions of gateways of a run with a name that other processes hold at present.

    Parameters
    ----------
    folder
        The directory of all sessions.
    name
        The name of the gateways.
    ended
        What `ended_sessions` gave: the sessions that no other process holds.
    run
        The id of the run. None means all runs.
    """
    free = {journal.session for journal in ended}
    found = sorted(path.name for path in folder.iterdir() if is_session(path.name) and _may_be_of(run, path))
    return [session for session in found if session not in free and session.rpartition(".")[0] == name]


def _may_be_of(run: str | None, session: Path) -> bool:
    """Return whether a session is of a run, or does not say of which one."""
    try:
        noted = (session / "lock").read_text(errors="replace")
    except OSError:  # it is removed just now, or never had a lock
        return True
    return run is None or NONCE.fullmatch(noted) is None or noted == run


def _interactions(row: Mapping[str, Any]) -> int:
    """Return how much of the room for interactions a row takes. A file has room for as many prompts."""
    return max(len(row["interactions"]), len(row.get("prompts", ())))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

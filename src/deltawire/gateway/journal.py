"""Keeps on disk what the store does not have yet, so that a gateway that is killed loses nothing.

    {journal}/{session}/lock                              held while a process uses the session
    {journal}/{session}/intents.log                       answers that were given; "done" when their row is written, or never will be
    {journal}/{session}/rows-{segment}.log                what is recorded of answers
    {journal}/{session}/{number}-{blake3}.{segment}.bin   the file of interactions that was made of a segment

Every step can be repeated after a kill, and gives the same files: a segment becomes one file with a fixed number, the file is put into the
store, then the segment is deleted, and then the file. So nothing is stored under two names. A write is in the system's memory when it
returns, so it survives the end of the process. It may not survive a loss of power; files of interactions do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..format.live_parts import is_session

_ROW = struct.Struct("<cI16s")
_INTENT, _DONE, _RECORD = b"i", b"d", b"r"
_MOST_ROW = 64 << 20
_COMPACT_BYTES = 4 << 20
_SEGMENT = re.compile(r"rows-([0-9]{10})\.log")
_FILE = re.compile(r"([0-9]{20})-([0-9a-f]{64})\.([0-9]{10})\.bin")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of interactions that waits for the store."""

    path: Path
    number: int
    blake3: str
    segment: int


class Journal:
    """The journal of one session of a gateway. May be used from several threads.

    Parameters
    ----------
    folder
        The directory of all sessions.
    session
        The session.
    """

    def __init__(self, folder: Path, session: str) -> None:
        self.session = session
        self.is_closed = False
        self._folder = folder / session
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.RLock()
        self._held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._held)
            raise
        self._unmarked: list[str] = []
        self.open_intents: dict[str, bytes] = {}
        """The intents that have no row yet, by id."""
        segments = [number for number, _ in self._segments()]
        self._segment = max(segments, default=-1) + 1
        self._recover(segments)
        self._intents = self._open("intents.log")
        self._compact()  # an intent whose row was found is done for good, also when the row has left the journal
        self._rows = self._open(f"rows-{self._segment:010}.log")
        self.rows = self.row_bytes = 0
        """The number of rows, and of their bytes, in the segment that grows."""

    @property
    def size(self) -> int:
        """The bytes of all files of the session."""
        with self._lock:
            return 0 if self.is_closed else sum(_size(path) for path in self._folder.iterdir())

    def add_intent(self, name: str, intent: Mapping[str, Any]) -> None:
        """Note that an answer is given. Raises `OSError`, and `ValueError` if the intent is too long."""
        data = json.dumps(intent, separators=(",", ":")).encode()
        with self._lock:
            self._write(self._intents, _INTENT, data)
            self._intents_size += len(data) + _ROW.size
            self.open_intents[name] = data

    def add_row(self, name: str, row: Mapping[str, Any]) -> None:
        """Record an answer. Its intent is then done. Raises `OSError`, and `ValueError` if the row is too long."""
        data = json.dumps(row, separators=(",", ":")).encode()
        with self._lock:
            self._write(self._rows, _RECORD, data)
            self.rows += 1
            self.row_bytes += len(data)
            self.drop_intent(name)

    def drop_intent(self, name: str) -> None:
        """Note that an intent is done. Raises `OSError`."""
        with self._lock:
            if self.open_intents.pop(name, None) is not None:
                self._unmarked.append(name)
                self._mark()
                if self._intents_size > _COMPACT_BYTES + 4 * sum(map(len, self.open_intents.values())):
                    self._compact()

    def rotate(self) -> None:
        """End the segment that grows, if it has rows, and begin another."""
        with self._lock:
            if self.rows:
                os.close(self._rows)
                self._segment += 1
                self._rows = self._open(f"rows-{self._segment:010}.log")
                self.rows = self.row_bytes = 0

    def ended_segments(self) -> list[int]:
        """Return the segments that wait to become files, oldest first."""
        with self._lock:
            sealed = {file.segment for file in self.files()}
            return sorted(number for number, _ in self._segments() if number != self._segment and number not in sealed)

    def read_segment(self, segment: int) -> list[dict[str, Any]]:
        """Return the rows of a segment."""
        rows = []
        for kind, data in _read_rows(self._folder / f"rows-{segment:010}.log"):
            if kind == _RECORD:
                rows.append(json.loads(data))
        return rows

    def seal(self, segment: int, number: int, data: bytes) -> SealedFile:
        """Keep the file of interactions that was made of a segment. It has its name only when it is complete. Raises `OSError`."""
        digest = blake3(data).hexdigest()
        path = self._folder / f"{number:020}-{digest}.{segment:010}.bin"
        temporary = self._folder / "sealing.tmp"
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return SealedFile(path, number, digest, segment)

    def files(self) -> list[SealedFile]:
        """Return the files that wait for the store, by number."""
        found = [(path, _FILE.fullmatch(path.name)) for path in self._folder.iterdir()]
        return sorted((SealedFile(path, int(m[1]), m[2], int(m[3])) for path, m in found if m), key=lambda file: file.number)

    def forget(self, segment: int, file: SealedFile | None) -> None:
        """Delete a segment, and then its file, which the store has. Raises `OSError`."""
        with self._lock:
            self._mark()  # otherwise the next session would record an answer of the segment again
        (self._folder / f"rows-{segment:010}.log").unlink(missing_ok=True)
        if file is not None:
            file.path.unlink(missing_ok=True)

    def is_empty(self) -> bool:
        """Return whether nothing waits for anything."""
        with self._lock:
            return not self.rows and not self.open_intents and not self.files() and not self.ended_segments()

    def close(self, *, remove: bool = False) -> None:
        """Release the session, and delete its directory if asked."""
        with self._lock:
            self.is_closed = True
            if remove:
                for path in self._folder.iterdir():
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # a gateway that starts just now may have opened it
                    self._folder.rmdir()
            for descriptor in (self._intents, self._rows, self._held):
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _segments(self) -> list[tuple[int, Path]]:
        found = ((_SEGMENT.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _recover(self, segments: list[int]) -> None:
        """Read the intents of a session that ended, and forget those that have a row."""
        for kind, data in _read_rows(self._folder / "intents.log"):
            if kind == _INTENT:
                self.open_intents[str(json.loads(data)["id"])] = data
            else:
                self.open_intents.pop(data.decode(), None)
        if self.open_intents:  # only the newest row can lack its mark, but reading all of them is simpler
            for segment in segments:
                for row in self.read_segment(segment):
                    self.open_intents.pop(str(row["interactions"][0]["id"]), None)

    def _mark(self) -> None:
        """Write down which intents are done. Raises `OSError`, and then the next call writes the rest."""
        while self._unmarked:
            self._write(self._intents, _DONE, self._unmarked[0].encode())
            self._intents_size += len(self._unmarked[0]) + _ROW.size
            del self._unmarked[0]

    def _compact(self) -> None:
        temporary = self._folder / "intents.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            for data in self.open_intents.values():
                self._write(descriptor, _INTENT, data)
            temporary.rename(self._folder / "intents.log")
        except OSError:
            os.close(descriptor)
            raise
        self._unmarked.clear()
        os.close(self._intents)
        self._intents = descriptor
        self._intents_size = os.fstat(descriptor).st_size

    def _open(self, name: str) -> int:
        """Open a log for appending. A row at its end that is not complete is cut off."""
        path = self._folder / name
        good = sum(_ROW.size + len(data) for _, data in _read_rows(path))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(descriptor, good)
        return descriptor

    @staticmethod
    def _write(descriptor: int, kind: bytes, data: bytes) -> None:
        if len(data) > _MOST_ROW:  # nobody would read it, nor what follows
            raise ValueError(f"a row has {len(data):,} bytes; {_MOST_ROW:,} are allowed")
        row = _ROW.pack(kind, len(data), blake3(data).digest(16)) + data
        before = os.fstat(descriptor).st_size
        written = 0
        try:
            while written < len(row):
                written += os.write(descriptor, row[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)  # a row is there as a whole, or not at all
            raise


def ended_sessions(folder: Path) -> Iterator[Journal]:
    """Yield the journals of sessions that no process uses any more."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and is_session(path.name):
            try:
                yield Journal(folder, path.name)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.ENOENT):  # in use, or removed just now
                    raise


def _read_rows(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a log, up to the first that is damaged or not complete."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while len(head := file.read(_ROW.size)) == _ROW.size:
            kind, length, digest = _ROW.unpack(head)
            data = file.read(length) if length <= _MOST_ROW else b""
            if kind not in (_INTENT, _DONE, _RECORD) or len(data) != length or blake3(data).digest(16) != digest:
                return
            yield kind, data


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

"""Keeps the ids of a gateway's own interactions on disk, so that its next start knows them before the store has them.

    {journal}/ids/lock             held while a gateway starts
    {journal}/ids/{session}.lock   held while a process uses the session
    {journal}/ids/{session}.log    a row for each id
    {journal}/ids/{session}.old    the rows before

A start takes over the rows of sessions that ended. Every step can be repeated after a kill: rows may then be there twice, and count once.
A write is in the system's memory when it returns, so it survives the end of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

_MOST_ROW = 4096
_SUM = 16
"""Each row begins with this many hexadecimal digits of the hash of the rest."""


class OwnId(NamedTuple):
    """An interaction of this gateway."""

    id: str
    episode: str | None
    caller: str | None


class IdLog:
    """The ids of a gateway's interactions, the newest ones only. Use it from one thread.

    Parameters
    ----------
    folder
        The directory of the journal.
    session
        The session of this gateway.
    most
        The most ids that a start takes over. Twice as many are on disk at most.
    """

    def __init__(self, folder: Path, session: str, *, most: int) -> None:
        self._folder, self._session, self._most = folder / "ids", session, max(most, 1)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._starting():
            self._held = _lock(self._folder / f"{session}.lock")
            self.found = self._take_over()
            """The ids of sessions before this one, the oldest first."""
        self._rows = 0
        self._log = self._open("log")

    def add(self, own: OwnId) -> None:
        """Keep an id. Raises `OSError`."""
        if self._rows >= self._most:
            self._turn()
        row = _row(own)
        before = os.fstat(self._log).st_size
        try:
            _write(self._log, row)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._log, before)
            raise
        self._rows += 1

    def close(self) -> None:
        """Let the next start have the ids."""
        os.close(self._log)
        os.close(self._held)

    def _turn(self) -> None:
        """Begin another log in place of the one that is full."""
        self._path("log").rename(self._path("old"))
        full, self._log, self._rows = self._log, self._open("log"), 0
        os.close(full)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        held = _open(self._folder / "lock")
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def _take_over(self) -> list[OwnId]:
        """Read the rows of all sessions, write down those of sessions that ended, and delete their files."""
        ended = self._ended()
        files = [(path.stat().st_mtime_ns, path) for ending in ("log", "old") for path in self._folder.glob(f"*.{ending}")]
        found: dict[OwnId, None] = {}
        own: dict[OwnId, None] = {}
        for _, path in sorted(files):
            for each in _read(path):
                for rows in (found, own) if path.stem in ended else (found,):
                    rows.pop(each, None)
                    rows[each] = None
                    if len(rows) > self._most:
                        del rows[next(iter(rows))]
        if own:
            self._keep(own)
        for session in ended:
            for path in self._folder.glob(f"{session}.*"):
                path.unlink()
        return list(found)

    def _ended(self) -> set[str]:
        """Return the sessions that no process uses. Other gateways may use the same directory."""
        ended = set()
        for session in {path.stem for path in self._folder.glob("*.*")} - {self._session}:
            with contextlib.suppress(BlockingIOError):
                os.close(_lock(self._folder / f"{session}.lock"))
                ended.add(session)
        return ended

    def _keep(self, rows: dict[OwnId, None]) -> None:
        temporary = _open(self._path("tmp"))
        try:
            _write(temporary, b"".join(map(_row, rows)))
        finally:
            os.close(temporary)
        self._path("tmp").rename(self._path("old"))

    def _path(self, ending: str) -> Path:
        return self._folder / f"{self._session}.{ending}"

    def _open(self, ending: str) -> int:
        return _open(self._path(ending))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _lock(path: Path) -> int:
    """Return a held lock. Raises `BlockingIOError` if somebody else holds it."""
    held = _open(path)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _row(own: OwnId) -> bytes:
    data = json.dumps(own, separators=(",", ":")).encode()
    return _sum(data) + data + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])


def _read(path: Path) -> Iterator[OwnId]:
    """Yield the rows of a log, up to the first that is damaged or not complete."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while row := file.readline(_MOST_ROW):
            if not row.endswith(b"\n") or _sum(row[_SUM:-1]) != row[:_SUM]:
                return
            yield OwnId(*json.loads(row[_SUM:]))


def _sum(data: bytes) -> bytes:
    return blake3(data).hexdigest()[:_SUM].encode()

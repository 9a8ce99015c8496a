"""The operations of a journal on the disk, and its logs: files of rows, each with its length and its hash.

A row is in a log as a whole or not at all: what a killed process or a loss of power left at the end of a log is recognised by its hash.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

INTENT, DONE, RECORD = b"i", b"d", b"r"
MOST_ROW = 64 << 20
"""The most bytes of a row."""
HEAD = struct.Struct("<cI16s")


class JournalDisk:
    """Everything that a journal does to the disk. Tests put another class in its place, which fails or loses power at any operation."""

    def open(self, path: Path, *, fresh: bool = False) -> int:
        """Open a file for appending, and create it if it does not exist. A fresh one loses what it held."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o600)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Write some of the data, and return how many bytes."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut off what follows."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Bring the contents of a file onto the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, and replace the file that has it."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Delete a file, if it exists."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Bring the names in a directory onto the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RowLog:
    """A file that rows are appended to. One thread at a time may append; another one may sync meanwhile.

    Parameters
    ----------
    disk
        The operations on the disk.
    path
        The file. A row at its end that is not complete is cut off.
    fresh
        Whether to begin with an empty file.
    """

    def __init__(self, disk: JournalDisk, path: Path, *, fresh: bool = False) -> None:
        self._disk = disk
        self.size = 0 if fresh else sum(HEAD.size + len(data) for _, data in read_rows(path))
        """The bytes of all complete rows."""
        self._descriptor = disk.open(path, fresh=fresh)
        self._is_torn = os.fstat(self._descriptor).st_size != self.size
        self._is_synced = False
        try:
            self._mend()
        except OSError:
            self.close()
            raise

    def append(self, kind: bytes, data: bytes) -> None:
        """Append a row. Raises `OSError`, and `ValueError` if it is too long."""
        if len(data) > MOST_ROW:  # nobody would read it, nor what follows
            raise ValueError(f"a row has {len(data):,} bytes; {MOST_ROW:,} are allowed")
        self._mend()
        row = HEAD.pack(kind, len(data), blake3(data).digest(16)) + data
        self._is_torn = True
        try:
            write_all(self._disk, self._descriptor, row)
        except OSError:
            with contextlib.suppress(OSError):
                self._mend()
            raise
        self._is_torn = self._is_synced = False
        self.size += len(row)

    def sync(self) -> None:
        """Bring all rows onto the disk that were appended before. Raises `OSError`."""
        if not self._is_synced:
            self._is_synced = True  # a row that is appended from now on says otherwise
            try:
                self._disk.sync(self._descriptor)
            except OSError:
                self._is_synced = False
                raise

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._disk.close(self._descriptor)

    def _mend(self) -> None:
        """Cut off what a failed write left. Otherwise the rows after it could not be read."""
        if self._is_torn:
            self._disk.truncate(self._descriptor, self.size)
            self._is_torn = self._is_synced = False


def write_all(disk: JournalDisk, descriptor: int, data: bytes) -> None:
    """Write all of the data. Raises `OSError`, and then a part of it may be written."""
    view, written = memoryview(data), 0
    while written < len(data):
        written += disk.write(descriptor, view[written:])


def read_rows(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the data of each row of a log, up to the first that is damaged or not complete."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while len(head := file.read(HEAD.size)) == HEAD.size:
            kind, length, digest = HEAD.unpack(head)
            data = file.read(length) if length <= MOST_ROW else b""
            if kind not in (INTENT, DONE, RECORD) or len(data) != length or blake3(data).digest(16) != digest:
                return
            yield kind, data

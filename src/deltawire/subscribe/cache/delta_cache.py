"""Delta files on disk, kept because they are needed again: for the other slot of a mirror, or by the workers of an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...format.content_hash import content_hash
from ...format.records.record_parts import FileEntry

Fetch = Callable[[Sequence[FileEntry]], Iterable[tuple[FileEntry, memoryview]]]

PART = ".part"
"""The suffix of files that are not complete yet."""


class DeltaCache:
    """Delta files in the directory `folder`, named by their hashes. Only one process at a time may write there, under a lock of the
    caller.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{folder}{os.sep}"
        """The paths of files as text: a version has a hundred files, and workers look at them while they generate."""
        self._sound: dict[str, tuple[int, int, int]] = {}
        """Files whose content was compared with their hash, by inode, size and time of their last change."""

    def holds(self, entry: FileEntry) -> bool:
        """Return whether a file of this name and size exists. `is_sound` checks its content."""
        try:
            return os.stat(self._text_path(entry)).st_size == entry.size
        except FileNotFoundError:
            return False

    def is_sound(self, entry: FileEntry) -> bool:
        """Return whether a file exists with exactly the content that its record says. A file that did not change is read once."""
        return self.open_sound(entry) is not None

    def open_sound(self, entry: FileEntry, *, threads: bool = True) -> mmap.mmap | bytes | None:
        """Map a file into memory and return its bytes if they are exactly what its record says, as `is_sound` finds out, or else None.

        Several threads hash a large file, unless `threads` is False.
        """
        try:
            number = os.open(self._text_path(entry), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(number)
            if found.st_size != entry.size:
                return None
            data = _map(number, entry.size)
        finally:
            os.close(number)
        identity = found.st_ino, found.st_size, found.st_mtime_ns
        if self._sound.get(entry.blake3) != identity:
            if content_hash(memoryview(data), threads=threads) != entry.blake3:
                return None
            self._sound[entry.blake3] = identity
        return data

    def ensure(self, entries: Iterable[FileEntry], fetch: Fetch) -> list[FileEntry]:
        """Fetch the files that are missing or wrong. Return those that were fetched. Files are not flushed to disk; a torn one is fetched
        again.
        """
        missing = [entry for entry in entries if not self.is_sound(entry)]
        for entry, data in fetch(missing):
            arriving = self.path(entry).with_suffix(PART)
            try:
                arriving.write_bytes(data)
                os.replace(arriving, self.path(entry))
            except BaseException:
                arriving.unlink(missing_ok=True)
                raise
        return missing

    def open(self, entry: FileEntry) -> mmap.mmap | bytes:
        """Map a file into memory and return its bytes."""
        with self.path(entry).open("rb") as file:
            return _map(file.fileno(), entry.size)

    def keep_only(self, entries: Iterable[FileEntry], most_bytes: int | None = None) -> None:
        """Delete all other files, and the first of these files until the rest fit in `most_bytes`."""
        kept: set[str] = set()
        for entry in reversed(list(entries)):
            if most_bytes is None:
                kept.add(self.path(entry).name)
            elif entry.size <= most_bytes:
                most_bytes -= entry.size
                kept.add(self.path(entry).name)
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
                self._sound.pop(path.stem, None)

    def path(self, entry: FileEntry) -> Path:
        """Return where a file is kept."""
        return Path(self._text_path(entry))

    def _text_path(self, entry: FileEntry) -> str:
        return f"{self._prefix}{entry.blake3}.safetensors"


def _map(number: int, size: int) -> mmap.mmap | bytes:
    """Return the bytes of an open file, by its descriptor. Files without bytes cannot be mapped."""
    return mmap.mmap(number, 0, access=mmap.ACCESS_READ) if size else b""

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
        self._sound: dict[str, tuple[int, int, int]] = {}
        """Files whose content was compared with their hash, by inode, size and time of their last change."""

    def holds(self, entry: FileEntry) -> bool:
        """Return whether a file of this name and size exists. `is_sound` checks its content."""
        try:
            return self.path(entry).stat().st_size == entry.size
        except FileNotFoundError:
            return False

    def is_sound(self, entry: FileEntry) -> bool:
        """Return whether a file exists with exactly the content that its record says. A file that did not change is read once."""
        try:
            found = self.path(entry).stat()
        except FileNotFoundError:
            return False
        identity = found.st_ino, found.st_size, found.st_mtime_ns
        if found.st_size != entry.size:
            return False
        if self._sound.get(entry.blake3) != identity:
            if content_hash(memoryview(self.open(entry))) != entry.blake3:
                return False
            self._sound[entry.blake3] = identity
        return True

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
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if entry.size else b""

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
        return self._folder / f"{entry.blake3}.safetensors"

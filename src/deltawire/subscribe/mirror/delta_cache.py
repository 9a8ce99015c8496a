"""Delta files on disk. Each is applied to one slot of the mirror now and to the other slot at the next update."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from ...format.records.record_parts import FileEntry

Fetch = Callable[[Sequence[FileEntry]], Iterable[tuple[FileEntry, memoryview]]]


class DeltaCache:
    """The directory `folder`. Only the holder of the mirror's writer lock may use it. Files are named by their hash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, entry: FileEntry) -> bool:
        """Return whether a file of this name and size exists. `ensure` checks its content."""
        try:
            return self._path(entry).stat().st_size == entry.size
        except FileNotFoundError:
            return False

    def ensure(self, entries: Iterable[FileEntry], fetch: Fetch) -> list[FileEntry]:
        """Fetch the files that are missing or wrong. Return those that were fetched. Files are not flushed to disk; a torn one is fetched
        again.
        """
        missing = [entry for entry in entries if not (self.holds(entry) and blake3(self.open(entry)).hexdigest() == entry.blake3)]
        for entry, data in fetch(missing):
            arriving = self._path(entry).with_suffix(".part")
            arriving.write_bytes(data)
            os.replace(arriving, self._path(entry))
        return missing

    def open(self, entry: FileEntry) -> mmap.mmap | bytes:
        """Map a file into memory and return its bytes."""
        with self._path(entry).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if entry.size else b""

    def keep_only(self, entries: Iterable[FileEntry], most_bytes: int) -> None:
        """Delete all other files, and the first of these files until the rest fit in `most_bytes`."""
        kept: set[str] = set()
        for entry in reversed(list(entries)):
            if entry.size <= most_bytes:
                most_bytes -= entry.size
                kept.add(self._path(entry).name)
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, entry: FileEntry) -> Path:
        return self._folder / f"{entry.blake3}.safetensors"

"""A file in which a process notes what it did, for tests that kill the process."""

from __future__ import annotations

import os
from pathlib import Path


class Journal:
    """A file of lines. A line is on disk once `write` returns, even if the process is killed then."""

    def __init__(self, path: Path | str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *values: object) -> None:
        os.write(self._file, (" ".join(map(str, values)) + "\n").encode())
        os.fsync(self._file)


def lines_of(journal: Path) -> list[list[str]]:
    """Return the words of each line. There are none as long as the file does not exist."""
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []

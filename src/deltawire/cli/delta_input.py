"""Opens a delta file, for `apply` and `inspect`."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from ..errors import CorruptDelta


def map_delta(path: Path) -> mmap.mmap:
    """Return the mapped bytes of a delta file. Raises `CorruptDelta` if it cannot be one, and `OSError` if it cannot be opened."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise CorruptDelta(f"{path} is a directory, not a delta file.")
    if not stat.S_ISREG(status.st_mode):
        raise CorruptDelta(f"{path} is not a regular file.")
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CorruptDelta(f"{path} is empty.") from None

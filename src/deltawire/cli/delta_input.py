"""Opens a delta file, for `apply` and `inspect`."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from ..errors import CheckpointError, CorruptDelta


def refuse_delta(checkpoint: Path) -> None:
    """Raise `CheckpointError` if a file that should be a checkpoint is a delta: users swap BASE and DELTA."""
    from ..format.delta_files.grouped import MAGIC

    if checkpoint.is_file():
        with checkpoint.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                raise CheckpointError(f"{checkpoint} is a delta file. The checkpoint comes first: `deltawire apply BASE DELTA -o OUT`.")


def map_delta(path: Path) -> mmap.mmap:
    """Return the mapped bytes of a delta file. Raises `CorruptDelta` if it cannot be one, and `OSError` if it cannot be opened."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise CorruptDelta(f"{path} is a directory, not a delta file. `deltawire show` and `deltawire log` show what a chain holds.")
    if not stat.S_ISREG(status.st_mode):
        raise CorruptDelta(f"{path} is not a regular file.")
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CorruptDelta(f"{path} is empty.") from None

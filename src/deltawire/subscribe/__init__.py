"""The reading side: follow a chain in memory or in a mirror directory, or pull one version of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from .mirror.mirror import Mirror
from .pull import pull
from .subscriber import Subscriber

__all__ = ["Mirror", "Subscriber", "pull", "reading_mirror"]


def reading_mirror(path: Path | str) -> AbstractContextManager[Path]:
    """For loaders: the directory of the version that a mirror serves, which stays exactly as it is while the context lasts.

    >>> with reading_mirror("/dev/shm/policy") as checkpoint:
    ...     model = AutoModel.from_pretrained(checkpoint)

    Needs no store, and no subscriber in this process. `MirrorError` if there is no sound version.
    """
    return Mirror(Path(path)).reading()

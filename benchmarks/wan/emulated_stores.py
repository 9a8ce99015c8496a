"""Stores in front of the S3 servers that leave out work which is no part of the measurement."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

from deltawire.store import Store
from deltawire.store.base import Buffer, ObjectInfo
from deltawire.store.wrapped import WrappedStore

UPLOADS = 32


class TrainersStore(WrappedStore):
    """Does not store the files of the first version, because the regions have it. It can keep versions back that are encoded ahead.

    While it `holds`, versions wait in memory. The publisher continues as if they were stored, and `release` stores the oldest of them.

    Parameters
    ----------
    inner
        The store.
    checkpoint_bytes
        Files of at least this size belong to a checkpoint.
    """

    def __init__(self, inner: Store, checkpoint_bytes: int) -> None:
        super().__init__(inner)
        self.holds = False
        self._checkpoint_bytes = checkpoint_bytes
        self._files: list[tuple[str, bytes]] = []
        self._versions: deque[tuple[list[tuple[str, bytes]], str, bytes]] = deque()

    def release(self) -> None:
        """Store the oldest version that is held: its files at the same time, and then its commit."""
        files, key, commit = self._versions.popleft()
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(lambda file: self.inner.put(file[0], file[1], size=len(file[1])), files))
        self.inner.put_if_absent(key, commit)

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, size: int | None = None, **options: Any) -> None:
        is_whole = isinstance(data, (bytes, bytearray, memoryview))
        if not is_whole and (size or 0) >= self._checkpoint_bytes:
            return
        if self.holds and is_whole:
            self._files.append((key, bytes(data)))
            return
        super().put(key, data, size=size, **options)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.holds:
            self._versions.append((self._files, key, data))
            self._files = []
            return
        super().put_if_absent(key, data)


class RegionsStore(WrappedStore):
    """Has the files of the first version, so that a relay does not copy them.

    Parameters
    ----------
    inner
        The store.
    files
        The sizes of these files.
    """

    def __init__(self, inner: Store, files: Mapping[str, int]) -> None:
        super().__init__(inner)
        self._files = files

    def head(self, key: str) -> ObjectInfo:
        if key in self._files:
            return ObjectInfo(key, self._files[key], datetime.now(timezone.utc))
        return super().head(key)

"""A store that counts what is read, and refuses to write."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from ..errors import StoreError
from ..store.base import Buffer, ObjectInfo, Progress, Store
from ..store.wrapped import WrappedStore

_ENTRY_BYTES = 300
"""About how many bytes an object takes in a listing of an S3 server."""


class ReadOnlyStore(WrappedStore):
    """Count requests and bytes that are read. Every call that would change the store raises `StoreError`.

    Parameters
    ----------
    inner
        The store that answers the calls.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = 0
        """How many objects were read or looked up, and how many listings were begun."""
        self.bytes = 0
        """Bytes of objects that were read, and of listings; the latter are estimated."""
        self._lock = threading.Lock()

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.requests += requests
            self.bytes += size

    def get(self, key: str, *, limit: int) -> bytes:
        self._count(1, 0)
        data = self.inner.get(key, limit=limit)
        self._count(0, len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        self._count(1, 0)
        return self.inner.head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        self._count(1, 0)
        self.inner.read_into(key, buffer, offset=offset, progress=progress)
        self._count(0, buffer.nbytes)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._count(1, 0)
        for info in self.inner.list(prefix, after=after):
            self._count(0, _ENTRY_BYTES)
            yield info

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        self._count(1, 0)
        found = self.inner.get_if_changed(key, limit=limit, tag=tag)
        self._count(0, 0 if found is None else len(found[0]))
        return found

    def put_if_absent(self, key: str, data: bytes) -> None:
        raise _refusal(key)

    def put(self, key: str, data: Buffer | Iterable[Buffer], **_: object) -> None:
        raise _refusal(key)

    def delete(self, keys: Iterable[str]) -> None:
        raise _refusal(next(iter(keys), ""))


def _refusal(key: str) -> StoreError:
    return StoreError(f"{key!r} was not written: the dashboard only reads.")

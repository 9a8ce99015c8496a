"""A store in front of another, for those that watch, delay or count what passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .base import Buffer, ObjectInfo, Progress, Store


class WrappedStore(Store):
    """Hands every call on to `inner`, `close` too. Override what you want to see."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def get(self, key: str, *, limit: int) -> bytes:
        return self.inner.get(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        self.inner.read_into(key, buffer, offset=offset, progress=progress)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.inner.put_if_absent(key, data)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        self.inner.put(key, data, size=size, progress=progress, durable=durable)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

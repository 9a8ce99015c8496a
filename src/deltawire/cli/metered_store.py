"""A store that tells how many bytes go through it, so that commands can draw a bar without the layers below knowing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..store.base import Buffer, ObjectInfo, Progress, Store


class MeteredStore(Store):
    """The store `inner`; what data objects transfer is reported to `progress`, from several threads. Small records are not counted."""

    def __init__(self, inner: Store, progress: Progress) -> None:
        self.url = inner.url
        self._inner = inner
        self._progress = progress

    def get(self, key: str, *, limit: int) -> bytes:
        return self._inner.get(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        self._inner.read_into(key, buffer, offset=offset, progress=self._both(progress))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._inner.put_if_absent(key, data)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        self._inner.put(key, data, size=size, progress=self._both(progress), durable=durable)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def close(self) -> None:
        self._inner.close()

    def _both(self, other: Progress | None) -> Progress:
        def report(done: int) -> None:
            self._progress(done)
            if other is not None:
                other(done)

        return report

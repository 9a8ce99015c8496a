"""A store that tells how many bytes go through it, so that commands can draw a bar without the layers below knowing of it."""

from __future__ import annotations

from collections.abc import Iterable

from ..store.base import Buffer, Progress, Store
from ..store.wrapped import WrappedStore


class MeteredStore(WrappedStore):
    """The store `inner`; what data objects transfer is reported to `progress`, from several threads. Small records are not counted."""

    def __init__(self, inner: Store, progress: Progress) -> None:
        super().__init__(inner)
        self._progress = progress

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        super().read_into(key, buffer, offset=offset, progress=self._both(progress))

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        super().put(key, data, size=size, progress=self._both(progress), durable=durable)

    def _both(self, other: Progress | None) -> Progress:
        def report(done: int) -> None:
            self._progress(done)
            if other is not None:
                other(done)

        return report

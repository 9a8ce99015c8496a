"""A store that tells how many bytes go through it, so that commands can draw a bar without the layers below knowing of it."""

from __future__ import annotations

from collections.abc import Iterable

from ..store.base import Buffer, Progress, Store
from ..store.keys import DATA
from ..store.wrapped import WrappedStore


class MeteredStore(WrappedStore):
    """The store `inner`; what data objects transfer is reported, from several threads. Small records are not counted.

    `read` gets the bytes that were read since its last call, `written` those that were written, and `announced` the size of each object
    before it is written, where that is known.
    """

    def __init__(
        self, inner: Store, read: Progress | None = None, *, written: Progress | None = None, announced: Progress | None = None
    ) -> None:
        super().__init__(inner)
        self._read = read
        self._written = written
        self._announced = announced

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        super().read_into(key, buffer, offset=offset, progress=_both(self._read if key.startswith(DATA) else None, progress))

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        is_data = key.startswith(DATA)
        if is_data and self._announced is not None and size is not None:
            self._announced(size)
        super().put(key, data, size=size, progress=_both(self._written if is_data else None, progress), durable=durable)


def _both(first: Progress | None, second: Progress | None) -> Progress | None:
    if first is None or second is None:
        return first or second

    def report(done: int) -> None:
        first(done)
        second(done)

    return report

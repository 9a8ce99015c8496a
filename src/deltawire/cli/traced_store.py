"""A store that reports every request to it, for `--verbose`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..errors import DeltawireError
from ..store.base import Buffer, ObjectInfo, Progress, Store
from ..store.wrapped import WrappedStore
from .output import figures
from .output.terminal import print_trace


class TracedStore(WrappedStore):
    """The store `inner`; each request is a line on stderr: what was asked, how long it took, and what went wrong."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)

    def get(self, key: str, *, limit: int) -> bytes:
        with _traced(f"get {key}"):
            return super().get(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        with _traced(f"head {key}"):
            return super().head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        with _traced(f"read {key} {figures.size(buffer.nbytes)} from byte {offset:,}"):
            super().read_into(key, buffer, offset=offset, progress=progress)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with _traced(f"create {key} {figures.size(len(data))}"):
            super().put_if_absent(key, data)

    def put(
        self,
        key: str,
        data: Buffer | Iterable[Buffer],
        *,
        size: int | None = None,
        progress: Progress | None = None,
        durable: bool = True,
    ) -> None:
        with _traced(f"put {key}" + ("" if size is None else f" {figures.size(size)}")):
            super().put(key, data, size=size, progress=progress, durable=durable)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        print_trace(f"list {prefix or 'everything'}" + ("" if after is None else f" after {after}"))
        return super().list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        named = list(keys)
        with _traced(f"delete {len(named):,} objects" if len(named) != 1 else f"delete {named[0]}"):
            super().delete(named)


@contextmanager
def _traced(what: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    except DeltawireError as error:
        print_trace(f"{what}: {type(error).__name__} after {_milliseconds(start)}")
        raise
    print_trace(f"{what}: {_milliseconds(start)}")


def _milliseconds(start: float) -> str:
    return f"{1e3 * (time.perf_counter() - start):.1f} ms"

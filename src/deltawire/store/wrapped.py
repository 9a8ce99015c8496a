"""A store in front of another one. Subclasses watch, count, delay or refuse the calls that pass through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from .base import Buffer, ObjectInfo, Progress, Store
from .streams.link_estimate import LinkEstimate


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One call of a store, as `WrappedStore.watch` sees it.

    `operation` is the name of the method. `key` is the object's key; for `list` it is the prefix, and for `delete` it is empty. `size` is
    the number of bytes to transfer, if known; for `delete` it is the number of keys.
    """

    operation: str
    key: str
    size: int | None = None
    offset: int = 0
    after: str | None = None
    keys: tuple[str, ...] = ()


class WrappedStore(Store):
    """Pass every call on to another store, including `close`.

    Override `watch` to see every call, `counted` to see the bytes of transfers, or single methods to change what they do.

    Parameters
    ----------
    inner
        The store that answers the calls.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def watch(self, call: StoreCall) -> AbstractContextManager[object]:
        """Return a context that the call runs in. For `list`, the context ends before the listing is fetched."""
        return nullcontext()

    def counted(self, call: StoreCall, progress: Progress | None) -> Progress | None:
        """Return the function that gets the number of transferred bytes. It must also call `progress`, if given."""
        return progress

    def get(self, key: str, *, limit: int) -> bytes:
        with self.watch(StoreCall("get", key)):
            return self.inner.get(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        with self.watch(StoreCall("head", key)):
            return self.inner.head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        call = StoreCall("read_into", key, buffer.nbytes, offset)
        with self.watch(call):
            self.inner.read_into(key, buffer, offset=offset, progress=self.counted(call, progress))

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self.watch(StoreCall("put_if_absent", key, len(data))):
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
        call = StoreCall("put", key, size)
        with self.watch(call):
            self.inner.put(key, data, size=size, progress=self.counted(call, progress), durable=durable)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        with self.watch(StoreCall("list", prefix, after=after)):
            return self.inner.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        named = tuple(keys)
        with self.watch(StoreCall("delete", "", len(named), keys=named)):
            self.inner.delete(named)

    @property
    def streams(self) -> int:
        return self.inner.streams

    @property
    def link(self) -> LinkEstimate | None:
        return self.inner.link

    @property
    def can_wait(self) -> bool:
        return self.inner.can_wait

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        with self.watch(StoreCall("get_if_changed", key)):
            return self.inner.get_if_changed(key, limit=limit, tag=tag)

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        with self.watch(StoreCall("wait_for_change", key)):
            return self.inner.wait_for_change(key, limit=limit, tag=tag, timeout=timeout)

    def doubt(self, key: str) -> None:
        self.inner.doubt(key)

    def distrust(self, reason: str, *, may_come: bool) -> bool:
        return self.inner.distrust(reason, may_come=may_come)

    def origin_alone(self) -> AbstractContextManager[None]:
        return self.inner.origin_alone()

    def close(self) -> None:
        self.inner.close()

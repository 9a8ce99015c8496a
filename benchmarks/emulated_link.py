"""Emulates a store behind a slow link: every request waits as long as it would take on a link of a given latency and bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from deltawire.errors import ObjectMissing
from deltawire.store import Store
from deltawire.store.base import Buffer, ObjectInfo, Progress, as_pieces


class EmulatedLink(Store):
    """A store behind an emulated link. Requests wait for the latency in parallel, and transfer their bytes one after the other.

    Parameters
    ----------
    inner
        The store that answers the requests.
    latency
        Seconds that each request waits.
    bandwidth
        Bytes per second that all requests share.
    streams
        The transfers that callers should run at the same time.
    """

    def __init__(self, inner: Store, *, latency: float, bandwidth: float, streams: int = 4) -> None:
        self.inner = inner
        self.url = inner.url
        self._latency = latency
        self._bandwidth = bandwidth
        self._streams = streams
        self._line = threading.Lock()

    @property
    def streams(self) -> int:
        return self._streams

    def get(self, key: str, *, limit: int) -> bytes:
        with self._waiting_for_misses():
            data = self.inner.get(key, limit=limit)
        self._wait(len(data))
        return data

    def get_if_changed(self, key: str, *, limit: int, tag: str | None) -> tuple[bytes, str] | None:
        with self._waiting_for_misses():
            found = self.inner.get_if_changed(key, limit=limit, tag=tag)
        self._wait(0 if found is None else len(found[0]))
        return found

    def head(self, key: str) -> ObjectInfo:
        self._wait(0)
        return self.inner.head(key)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        self._wait(buffer.nbytes)
        self.inner.read_into(key, buffer, offset=offset, progress=progress)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._wait(len(data))
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
        whole = b"".join(as_pieces(data)[1])
        self._wait(len(whole))
        self.inner.put(key, whole, size=size, progress=progress, durable=durable)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._wait(0)
        return self.inner.list(prefix, after=after)

    def delete(self, keys: Iterable[str]) -> None:
        self._wait(0)
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def _waiting_for_misses(self) -> Iterator[None]:
        """Wait for the answer that an object does not exist, too."""
        try:
            yield
        except ObjectMissing:
            self._wait(0)
            raise

    def _wait(self, size: int) -> None:
        time.sleep(self._latency)
        if size:
            with self._line:
                time.sleep(size / self._bandwidth)

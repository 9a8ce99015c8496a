"""Emulates a store behind a slow link: every request waits as long as it would take on a link of a given latency and bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from deltawire.errors import ObjectMissing
from deltawire.store import Store
from deltawire.store.base import Buffer, as_pieces
from deltawire.store.wrapped import StoreCall, WrappedStore


class EmulatedLink(WrappedStore):
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
        super().__init__(inner)
        self._latency = latency
        self._bandwidth = bandwidth
        self._streams = streams
        self._line = threading.Lock()

    @property
    def streams(self) -> int:
        return self._streams

    @property
    def can_wait(self) -> bool:
        return False

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

    def wait_for_change(self, key: str, *, limit: int, tag: str | None, timeout: float) -> tuple[bytes, str] | None:
        return self.get_if_changed(key, limit=limit, tag=tag)

    def put(self, key: str, data: Buffer | Iterable[Buffer], **options: Any) -> None:
        whole = b"".join(as_pieces(data)[1])
        self._wait(len(whole))
        self.inner.put(key, whole, **options)

    def watch(self, call: StoreCall) -> AbstractContextManager[object]:
        """Wait before a call. `get`, `get_if_changed` and `put` wait by themselves, when they know the size."""
        self._wait(call.size or 0 if call.operation in ("read_into", "put_if_absent") else 0)
        return nullcontext()

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

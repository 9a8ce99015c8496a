"""Keeps a reader's pin in the store, so that what leads on from its version is not collected under its feet."""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from ..chain.pins import DEFAULT_TTL, put_pin, remove_pin
from ..chain.restore import Hop
from ..chain.uptime import uptime
from ..errors import StoreDenied, StoreError
from ..events import OnEvent, emit
from ..format.records.chain_records import Run
from ..store.base import Store
from ..store.keys import pin_key


def reader_name() -> str:
    """A name for this reader that says where it runs, and is nobody else's."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "reader"
    return f"{host}-{secrets.token_hex(4)}"


class PinKeeper:
    """Writes the pin, renews it at a third of its life, removes it in the end.

    A pin that cannot be written is reported ("pin-failed") and else ignored: without one a reader that lags may have to fetch a checkpoint,
    nothing worse. Where the store denies it, it is not tried again.
    """

    def __init__(
        self,
        store: Store,
        reader: str | None,
        *,
        enabled: bool = True,
        ttl: int = DEFAULT_TTL,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self.reader = reader or reader_name()
        pin_key(self.reader)  # ValueError now rather than a failure later
        self._store = store
        self._enabled = enabled
        self._ttl = ttl
        self._on_event = on_event
        self._clock = clock
        self._run: Run | None = None
        self._pinned: int | None = None
        self._next = 0.0
        self._lock = threading.Lock()

    def hold(self, run: Run, seq: int) -> None:
        """See to it that what leads from version `seq` on is kept."""
        with self._lock:
            is_covered = self._pinned is not None and self._pinned <= seq and self._clock() < self._next
            if self._enabled and not is_covered and (self._pinned is not None or self._clock() >= self._next):
                self._write(run, seq)

    def hold_route(self, run: Run, hops: Sequence[Hop]) -> None:
        """Keep the objects of a route that starts from nothing, also those of its first version, whose history may be abandoned."""
        self.hold(run, max(0, hops[0].target.seq - 1))

    def renew(self, _: int = 0) -> None:
        """Renew the pin if it is time. Cheap, and for any thread: to be called as the bytes of a long transfer arrive."""
        if self._pinned is None or self._clock() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            if self._enabled and self._run is not None and self._pinned is not None and self._clock() >= self._next:
                self._write(self._run, self._pinned)
        finally:
            self._lock.release()

    def _write(self, run: Run, seq: int) -> None:
        try:
            put_pin(self._store, run, self.reader, seq, self._ttl)
        except StoreError as error:
            emit(self._on_event, "pin-failed", reader=self.reader, seq=seq, reason=str(error))
            self._enabled = not isinstance(error, StoreDenied)
            self._pinned, self._next = None, self._clock() + self._ttl / 30
            return
        self._run, self._pinned, self._next = run, seq, self._clock() + self._ttl / 3

    def release(self) -> None:
        """Take the pin back. None is written after this."""
        with self._lock:
            self._enabled = False
            if self._pinned is None:
                return
            self._pinned = None
            try:
                remove_pin(self._store, self.reader)
            except StoreError as error:
                emit(self._on_event, "pin-failed", reader=self.reader, reason=str(error))

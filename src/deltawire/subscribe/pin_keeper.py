"""Keep a reader's pin in the store, so that the data it needs next are not collected."""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from ..chain.records.pins import DEFAULT_TTL, put_pin, remove_pin
from ..chain.routes.restore import Hop
from ..chain.uptime import uptime
from ..errors import StoreDenied, StoreError
from ..events import OnEvent, emit
from ..format.records.run_records import Run
from ..store.base import Store
from ..store.keys import pin_key


def reader_name() -> str:
    """Return a unique name for this reader that contains the host name."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "reader"
    return f"{host}-{secrets.token_hex(4)}"


class PinKeeper:
    """Writes the pin, renews it after a third of its life, and removes it at the end.

    A pin that cannot be written is reported ("pin-failed") and otherwise ignored. Without a pin, a reader that lags may have to fetch a
    full checkpoint, and nothing worse can happen. If the store denies access, the keeper does not try again.
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
        pin_key(self.reader)  # raises ValueError for an invalid name
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
        """Pin the data that lead from version `seq` on."""
        with self._lock:
            is_covered = self._pinned is not None and self._pinned <= seq and self._clock() < self._next
            if self._enabled and not is_covered and (self._pinned is not None or self._clock() >= self._next):
                self._write(run, seq)

    def hold_route(self, run: Run, hops: Sequence[Hop]) -> None:
        """Keep the objects of a route that starts from nothing, also those of its first version, whose history may be abandoned."""
        self.hold(run, max(0, hops[0].target.seq - 1))

    def renew(self, _: int = 0) -> None:
        """Renew the pin if it is due. It is cheap and may be called from any thread: call it as the bytes of a long transfer arrive."""
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
        """Remove the pin. None is written afterwards."""
        with self._lock:
            self._enabled = False
            if self._pinned is None:
                return
            self._pinned = None
            try:
                remove_pin(self._store, self.reader)
            except StoreError as error:
                emit(self._on_event, "pin-failed", reader=self.reader, reason=str(error))

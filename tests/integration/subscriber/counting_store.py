"""A store that records what was read, and helpers for the tests of subscribers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltawire.events import Event
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber

Subscribe = Callable[..., Subscriber]


def events_of(options: dict[str, Any]) -> list[Event]:
    events: list[Event] = []
    options["on_event"] = events.append
    return events


def names_of(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def data_reads(store: CountingStore) -> list[str]:
    return [key for key in store.read if key.startswith("data/")]


class CountingStore(MemoryStore):
    """A store that records what was read. It fails if `failure` or `put_failure` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.failure: Exception | None = None
        self.put_failure: Exception | None = None

    def get(self, key: str, *, limit: int) -> bytes:
        self._note(key)
        return super().get(key, limit=limit)

    def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
        self._note(key)
        super().read_into(key, buffer, **more)

    def put(self, key: str, data: Any, **more: Any) -> None:
        if self.put_failure is not None:
            raise self.put_failure
        super().put(key, data, **more)

    def _note(self, key: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.read.append(key)

"""A chain, copies of it that relays keep, and readers that use them, on a clock that tests move."""

from __future__ import annotations

from typing import Any

from relayed_chain import relay_once
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.format.records.signing import SigningKey
from deltawire.store import Store
from deltawire.store.copies.source_options import SourceOptions
from deltawire.store.copies.sources import Sources
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import StoreCall, WrappedStore
from deltawire.subscribe import Subscriber
from deltawire.testing import FaultyStore


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(WrappedStore):
    """A store whose answers take some time of a clock."""

    def __init__(self, inner: Store, clock: Clock, seconds: float, rate: float = 1e9) -> None:
        super().__init__(inner)
        self._clock, self._seconds, self._rate = clock, seconds, rate

    def watch(self, call: StoreCall) -> Any:
        self._clock.now += self._seconds + (call.size or 0) / self._rate
        return super().watch(call)


class Region:
    """A chain, copies of it, and readers that use them. Counts what is read from each store."""

    def __init__(self, versions: int = 3, copies: int = 1, **options: Any) -> None:
        self.key = SigningKey.generate() if options.pop("signed", False) else None
        if self.key is not None:
            options["sign"] = self.key.sign
        self.chain = ToyChain(MemoryStore("toy"), **options)
        self.chain.anchor(first_state())
        self.chain.grow(versions - 1)
        self.clock = Clock()
        self.events: list[Event] = []
        self.origin = FaultyStore(self.chain.store)
        self.copies = [FaultyStore(MemoryStore(f"copy-{number}")) for number in range(copies)]
        self.relay()

    def relay(self, number: int | None = None) -> None:
        for copy in self.copies if number is None else [self.copies[number]]:
            relay_once(self.chain.store, copy.inner, **self.trusted)
        self.forget_calls()

    @property
    def trusted(self) -> dict[str, Any]:
        return {} if self.key is None else {"trusted_keys": [self.key.public], "run": "toy"}

    def sources(self, copies: Any = None, **options: Any) -> Sources:
        options = {"signed": self.key is not None} | options
        given = self.copies if copies is None else copies
        return Sources(self.origin, given, options=SourceOptions(**options), on_event=self.events.append, clock=self.clock)

    def reader(self, sources: Store | None = None, **options: Any) -> Subscriber:
        given = ReaderOptions(**({"patience": 0.0, "pin": False, "run": "toy"} | self.trusted | options))
        return Subscriber(sources or self.sources(), options=given, threads=1)

    def forget_calls(self) -> None:
        for store in (self.origin, *self.copies):
            store.calls.clear()

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def assert_synced(self, reader: Subscriber) -> None:
        reader.sync()
        assert bits_of(reader.state) == bits_of(self.chain.state)

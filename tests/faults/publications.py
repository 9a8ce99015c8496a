"""Publish a small training run through any store, and check its chain after a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from support import bits_of, publisher_arguments
from toy_chain import State, first_state, next_state

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.version import Version
from deltawire.errors import DeltawireError, NoChain
from deltawire.events import Event
from deltawire.publish.publisher import Publisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.store import Store
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.testing import Call, FaultyStore

EVERY_FOURTH = AnchorPolicy(min_versions=4, max_versions=4)
SESSION = 6
"""The number of versions in a session: a checkpoint, then deltas. The fifth version gets a skip from the first, and an anchor."""

_TRIES = 3


@cache
def state_at(step: int) -> State:
    """Return the weights after this many steps of training."""
    return first_state() if step == 0 else next_state(state_at(step - 1), step)


@cache
def digest_at(step: int) -> Any:
    return deltawire.state_digest(state_at(step))


@cache
def bits_at(step: int) -> Any:
    return bits_of(state_at(step))


def open_publisher(store: Store, **given: Any) -> Publisher:
    """Open a publisher. `given` holds its parameters and the fields of `WriterOptions`."""
    return Publisher(store, **publisher_arguments(**({"segment_bytes": 800, "anchor_policy": EVERY_FOURTH, "threads": 1} | given)))


def open_subscriber(store: Store, mirror: Any = None, **options: Any) -> Subscriber:
    others = {name: options.pop(name) for name in ("threads", "on_event", "undo_bytes") if name in options}
    return Subscriber(store, mirror, options=ReaderOptions(**({"patience": 0.0, "pin": False} | options)), **({"threads": 1} | others))


@dataclass
class Ledger:
    """Record what a trainer knows: the acknowledged steps by sequence number, and the steps that it tried to publish."""

    first: int = 0
    acknowledged: dict[int, int] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        return self.tried[-1] + 1 if self.tried else self.first

    @property
    def newest(self) -> int | None:
        """Return the step of the newest acknowledged version."""
        return self.acknowledged[max(self.acknowledged)] if self.acknowledged else None

    def publish(self, publisher: Publisher, count: int = 1, *, tries: int = 1) -> None:
        """Train and publish `count` steps, each with its shortcuts. Repeat what fails with a retryable error, up to `tries` times."""
        for _ in range(count):
            step = self.next_step
            self.tried.append(step)
            version = repeated(lambda step=step: _publish(publisher, step), tries)
            self.acknowledged[version.seq] = step
            publisher.flush()  # so that the thread that makes shortcuts calls the store in the same order every time


def _publish(publisher: Publisher, step: int) -> Version:
    published = publisher.publish(state_at(step), step=step)
    version = published if isinstance(published, Version) else published.result(30)
    assert version is not None
    return version


def repeated(action: Callable[[], Any], tries: int = _TRIES) -> Any:
    """Call an action up to `tries` times, as long as it fails with retryable errors, and return its result."""
    for left in reversed(range(tries)):
        try:
            return action()
        except DeltawireError as error:
            if not left or not error.retryable:
                raise
    raise AssertionError


def run_session(store: Store, ledger: Ledger, *, tries: int = 1, **options: Any) -> None:
    """Open a publisher, publish a session of versions, and close the publisher."""
    publisher = repeated(lambda: open_publisher(store, **options), tries)
    try:
        ledger.publish(publisher, SESSION, tries=tries)
    finally:
        publisher.close()


def calls_of_a_session() -> list[Call]:
    """Return the calls that a session makes to a store without faults."""
    store = FaultyStore(MemoryStore())
    run_session(store, Ledger())
    made = {call.key.split("/")[0] for call in store.calls}
    assert made >= {"probe", "run.json", "epoch", "commit", "data", "HEAD", "skip", "anchor"}  # these are all kinds of objects
    return store.calls


def published(count: int, **options: Any) -> tuple[MemoryStore, Ledger]:
    """Publish a chain of `count` versions, and close its publisher."""
    store, ledger = MemoryStore(), Ledger()
    with open_publisher(store, **options) as publisher:
        ledger.publish(publisher, count)
    return store, ledger


def visible_step(store: Store) -> int | None:
    """Return the step of the newest version for a new reader, after comparing its bits. Return None if there is no chain."""
    with open_subscriber(store) as subscriber:
        try:
            step = subscriber.sync().step
        except NoChain:
            return None
        assert step is not None
        assert bits_of(subscriber.state) == bits_at(step)
        return step


def assert_one_history(store: Store, *ledgers: Ledger) -> None:
    """Check that every acknowledged version is in the chain, and that each version has the weights that a publisher was given."""
    report = verify(store, deep=True, threads=1)
    assert report.ok, report.problems
    log = ChainLog(store)
    versions = {commit.seq: commit for commit in log.tail(-1) if commit.kind != "fence"}
    for commit in versions.values():
        assert commit.step is not None
        assert commit.digest == digest_at(commit.step)
    for ledger in ledgers:
        assert versions.keys() >= ledger.acknowledged.keys()
        for seq, step in ledger.acknowledged.items():
            assert versions[seq].step == step
        steps = [commit.step for commit in versions.values() if commit.step in ledger.tried and commit.kind != "rewind"]
        assert steps == sorted(steps)


def assert_goes_on(store: Store, ledger: Ledger) -> None:
    """Check the chain after a crash.

    Readers must see the last acknowledged version or the next one, and a new publisher must continue from it.
    """
    expected = {ledger.newest, ledger.tried[-1] if ledger.tried else None}
    with open_subscriber(store) as reader:
        seen = None
        with contextlib.suppress(NoChain):
            seen = reader.sync().step
        assert seen in expected
        assert seen is None or bits_of(reader.state) == bits_at(seen)
        with open_publisher(store) as publisher:
            assert (publisher.version and publisher.version.step) == seen
            ledger.publish(publisher, 2)
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(ledger.newest)
    assert visible_step(store) == ledger.newest
    assert_one_history(store, ledger)


class Listener:
    """Collect events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.name for event in self.events]


class At:
    """A condition for `FaultyStore` that never holds, but runs an action just before one call. The caller waits for the action."""

    def __init__(self, index: int, action: Callable[[], object]) -> None:
        self._index = index
        self._action = action

    def __call__(self, call: Call) -> bool:
        if call.index == self._index:
            self._action()
        return False


def objects(store: Store, prefix: str = "") -> Iterator[str]:
    return (info.key for info in store.list(prefix))

"""Files are announced while others are still encoded. Readers fetch and decode them before the commit, and never twice."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from announced_files import look_and_arrive
from counting_store import CountingStore, Subscribe, data_reads, events_of
from support import bits_of, publisher_arguments
from toy_chain import ToyChain, first_state, next_state

from deltawire.delta.prepared import PreparedUpdate
from deltawire.publish import Publisher
from deltawire.publish.upload import announcer
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import StoreCall, WrappedStore


@pytest.fixture
def counted() -> ToyChain:
    chain = ToyChain(CountingStore())
    chain.anchor(first_state())
    return chain


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each delta file that is decoded into memory."""
    sizes: list[int] = []
    add = PreparedUpdate.add

    def noted(self: PreparedUpdate, state: Any, delta: Any) -> Any:
        sizes.append(len(delta))
        return add(self, state, delta)

    monkeypatch.setattr(PreparedUpdate, "add", noted)
    return sizes


@pytest.mark.parametrize("announced", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_announced_files_are_fetched_before_the_commit_and_never_again(
    counted: ToyChain, subscribe: Subscribe, announced: slice, decoded: list[int]
) -> None:
    events = events_of(options := {})
    reader = subscribe(counted, pin=False, **options)
    reader.sync()
    store: Any = counted.store
    old, new = counted.state, next_state(counted.state, 1)
    files = counted.delta_files(old, new)
    counted.announce(files[announced])
    store.read.clear()
    assert not look_and_arrive(reader)
    assert sorted(data_reads(store)) == sorted(entry.key for entry in files[announced])
    ahead = list(decoded)
    assert bits_of(reader.state) == bits_of(old)
    assert reader.version is not None
    assert reader.version.seq == 1
    counted.delta(new, files)
    assert reader._look()
    assert reader.sync().seq == 2
    assert bits_of(reader.state) == bits_of(new)
    assert sorted(data_reads(store)) == sorted(entry.key for entry in files)
    synced = [event for event in events if event.name == "synced"][-1]
    assert synced.fields["ahead_bytes"] == sum(entry.size for entry in files[announced])
    assert synced.fields["bytes"] == sum(entry.size for entry in files)
    if reader.path is None:  # a mirror decodes after the commit
        assert sorted(ahead) == sorted(entry.size for entry in files[announced])
        assert sorted(decoded) == sorted(entry.size for entry in files)
    counted.grow(2)
    assert reader.sync().seq == 4
    assert bits_of(reader.state) == bits_of(counted.state)


def test_files_that_are_announced_later_are_fetched_later(counted: ToyChain, subscribe: Subscribe) -> None:
    reader = subscribe(counted, pin=False)
    reader.sync()
    store: Any = counted.store
    new = next_state(counted.state, 1)
    files = counted.delta_files(counted.state, new)
    store.read.clear()
    for upto in (1, 2):
        counted.announce(files[:upto])
        for _ in range(3):
            assert not look_and_arrive(reader)
        assert Counter(data_reads(store)) == Counter(entry.key for entry in files[:upto])
    counted.delta(new, files)
    reader.sync()
    assert bits_of(reader.state) == bits_of(new)
    assert Counter(data_reads(store)) == Counter(entry.key for entry in files)


def test_a_look_takes_one_small_request_more(counted: ToyChain, subscribe: Subscribe) -> None:
    """The request is conditional, so that a store with tags answers with nothing if nothing has changed."""

    class Watched(WrappedStore):
        def watch(self, call: StoreCall) -> Any:
            calls.append((call.operation, call.key))
            return super().watch(call)

    calls: list[tuple[str, str]] = []
    reader = subscribe(Watched(counted.store), pin=False)
    reader.sync()
    for has_announcement in (False, True):
        if has_announcement:
            counted.announce(counted.delta_files(counted.state, next_state(counted.state, 1)))
            look_and_arrive(reader)
        calls.clear()
        for _ in range(3):
            assert not look_and_arrive(reader)
        assert calls == 3 * [("get", keys.commit_key(2)), ("get_if_changed", keys.COMING)]
    reader = subscribe(Watched(counted.store), pin=False, ahead_bytes=0)
    reader.sync()
    calls.clear()
    assert not look_and_arrive(reader)
    assert calls == [("get", keys.commit_key(2))]


@pytest.mark.parametrize("moves", ["fence", "rewind", "undo"])
def test_what_was_decoded_for_another_state_is_not_used(counted: ToyChain, subscribe: Subscribe, moves: str) -> None:
    """A fence keeps the state, but its writer makes a new delta. After a rewind or a step back the weights are others."""
    counted.grow(2)
    reader = subscribe(counted, pin=False)
    reader.sync(seq=2)
    reader.sync()
    new = next_state(counted.state, 9)
    counted.announce(counted.delta_files(counted.state, new))
    look_and_arrive(reader)
    if moves == "undo":
        reader.sync(seq=2)
        assert bits_of(reader.state) == bits_of(counted.states[2])
        look_and_arrive(reader)
        counted.delta(new)
    elif moves == "fence":
        counted.claim(2)
        counted.delta(new)
    else:
        counted.rewind(2)
        counted.delta()
    reader.sync()
    assert bits_of(reader.state) == bits_of(counted.state)


def test_the_announcement_of_a_shared_mirror_is_fetched_by_one_of_its_processes(counted: ToyChain, subscribe: Subscribe) -> None:
    """Locks exclude subscribers of one process in the same way as processes."""
    readers = [subscribe(counted, pin=False) for _ in range(3)]
    for reader in readers:
        reader.sync()
    if readers[0].path is None:
        return
    store: Any = counted.store
    new = next_state(counted.state, 1)
    files = counted.delta_files(counted.state, new)
    counted.announce(files)
    store.read.clear()
    for reader in readers:
        look_and_arrive(reader)
    counted.delta(new, files)
    for reader in reversed(readers):
        reader.sync()
        assert bits_of(reader.state) == bits_of(new)
    assert Counter(data_reads(store)) == Counter(entry.key for entry in files)
    readers[0].close()
    assert readers[2]._replica.wants_ahead()


def big_state(step: int) -> Any:
    state = {f"{name}{number}": array for number in range(3) for name, array in first_state(number).items()}
    for each in range(step):
        state = next_state(state, each)
    return state


def test_a_publisher_announces_while_it_encodes_and_a_follower_fetches_meanwhile(
    monkeypatch: pytest.MonkeyPatch, subscribe: Subscribe
) -> None:
    """The last upload waits until the follower has everything else. The commit waits for that upload."""
    monkeypatch.setattr(announcer, "INTERVAL", 0.0)
    fetched = threading.Event()
    reads: list[str] = []

    class Uploading(WrappedStore):
        """The publisher's view: from the second version on, one upload waits."""

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.held: str | None = None
            self.puts: set[str] = set()
            self.lock = threading.Lock()

        def put(self, key: str, data: Any, **more: Any) -> None:
            if key.startswith("data/") and publisher.version is not None:
                with self.lock:
                    is_last, self.held = self.held is None, self.held or key
                if is_last:
                    assert fetched.wait(60)
                else:
                    self.puts.add(key)
            super().put(key, data, **more)

    class Fetching(WrappedStore):
        """The reader's view."""

        def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
            super().read_into(key, buffer, **more)
            reads.append(key)
            if len(reads) == segments - 1:
                fetched.set()

    segments = 0
    store = MemoryStore()
    uploading = Uploading(store)
    with Publisher(uploading, **publisher_arguments(segment_bytes=800, threads=1, skips=False)) as publisher:
        publisher.publish(big_state(0), step=0)
        reader = subscribe(Fetching(store), pin=False)
        reader.sync()
        baseline = publisher._appender.baseline
        assert baseline is not None
        segments = len(baseline.segments)
        assert segments > 3
        reads.clear()
        publishing = threading.Thread(target=publisher.publish, args=(big_state(1),), kwargs={"step": 1})
        publishing.start()
        assert next(reader.follow(poll=0.001)).step == 1
        publishing.join()
    assert bits_of(reader.state) == bits_of(big_state(1))
    assert Counter(reads) == Counter([*uploading.puts, uploading.held])

"""A reader with several stores reads from the nearest copy that serves the right thing, and from the origin otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from relayed_chain import copy_of, open_relay, reads_of_data, relay_once
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.maintenance.collect import collect
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import BadUrl, DataMissing, ObjectMissing, StoreUnavailable
from deltawire.events import Event
from deltawire.format.records.signing import SigningKey
from deltawire.store import Store, StoreOptions, keys
from deltawire.store.base import ObjectInfo
from deltawire.store.copies import Copy
from deltawire.store.link_estimate import LinkEstimate
from deltawire.store.memory import MemoryStore
from deltawire.store.sources import SourceOptions, Sources, open_sources
from deltawire.store.wrapped import StoreCall, WrappedStore
from deltawire.subscribe import Subscriber, pull
from deltawire.testing import Before, FaultyStore, Reading, call


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


@pytest.mark.parametrize("signed", [False, True])
def test_readers_of_a_region_read_no_data_from_the_origin(signed: bool):
    region = Region(signed=signed)
    with region.reader() as one:
        readers = [one, *(region.reader() for _ in range(9))]
        for _ in range(4):
            region.chain.grow(2)
            region.chain.add_anchor(region.chain.commits[-1].seq)
            region.relay()
            region.clock.now += 60
            for reader in readers:
                region.assert_synced(reader)
            assert not reads_of_data(region.origin)
            assert reads_of_data(region.copies[0])
            commits = [each for each in region.origin.calls if each.op == "get" and each.key.startswith(keys.COMMITS)]
            if signed:  # a reader that checks signatures asks the origin only whether there is a commit that the copy lacks
                assert {each.key for each in commits} <= {keys.commit_key(len(region.chain.commits))}
        for reader in readers:
            reader.close()
    assert set(region.names()) == {"relay-used"}


def test_far_behind_readers_use_the_shortcuts_of_their_region():
    region = Region()
    with region.reader() as reader:
        region.assert_synced(reader)
        region.chain.grow(20)
        region.relay()
        region.chain.add_anchor(20)  # the copy does not have it
        region.assert_synced(reader)
        with region.reader() as new:
            region.assert_synced(new)
        assert not reads_of_data(region.origin)


def test_a_copy_that_lags_is_waited_for_and_then_passed_by():
    region = Region()
    sources = region.sources(patience=10.0)
    with region.reader(sources, relay_patience=10.0) as reader:
        region.assert_synced(reader)
        region.chain.delta()
        region.clock.now += 60
        with pytest.raises(DataMissing):  # the subscriber of this test does not wait at all
            reader.sync()
        assert not reads_of_data(region.origin)
        region.clock.now += 11
        region.assert_synced(reader)
        assert reads_of_data(region.origin)
        assert region.names().count("relay-late") == 1
        region.chain.delta()
        region.clock.now += 6
        region.assert_synced(reader)  # the next one is not waited for
        region.relay()
        region.chain.delta()
        region.relay()
        region.clock.now += 6
        region.assert_synced(reader)  # the copy keeps up again
        assert not reads_of_data(region.origin)


def test_a_copy_that_gets_something_new_is_still_waited_for():
    region = Region()
    sources = region.sources(patience=10.0)
    with region.reader(sources) as reader:
        region.assert_synced(reader)
        first, second = region.chain.delta().files
        for _ in range(2):
            region.clock.now += 6
            with pytest.raises(ObjectMissing):
                sources.read_into(second.key, memoryview(bytearray(second.size)))
            with pytest.raises(ObjectMissing):
                sources.read_into(first.key, memoryview(bytearray(first.size)))
            region.copies[0].inner.put(first.key, region.chain.store.get(first.key, limit=first.size))
            sources.read_into(first.key, memoryview(bytearray(first.size)))
            region.copies[0].inner.delete([first.key])
        assert not reads_of_data(region.origin)
        region.clock.now += 11
        sources.read_into(second.key, memoryview(bytearray(second.size)))
        assert reads_of_data(region.origin)


def test_commits_that_the_copy_lacks_are_asked_for_at_the_origin_now_and_then():
    region = Region()
    with region.reader(region.sources(origin_poll=5.0)) as reader:
        region.assert_synced(reader)
        region.forget_calls()
        for second in range(60):
            region.clock.now = 100.0 + second
            assert not reader._look()
        key = keys.commit_key(len(region.chain.commits))
        assert len([each for each in region.origin.calls if each.key == key]) == 12
        assert len([each for each in region.copies[0].calls if each.key == key]) == 60


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("lie", ["flip", "truncate", "missing"])
@pytest.mark.parametrize("what", [keys.DATA, keys.COMMITS, keys.ANCHORS, keys.HEAD, keys.RUN, keys.MARKS])
def test_a_copy_that_lies_does_no_harm(what: str, lie: Any, signed: bool):
    region = Region(12, signed=signed)
    region.chain.add_anchor(8)
    region.relay()
    lying = FaultyStore(region.copies[0].inner, [Reading(call(None, what), lie, times=None)])
    with region.reader(region.sources([lying], patience=0.0)) as reader:
        region.assert_synced(reader)
        region.chain.grow(2)
        region.relay()
        region.clock.now += 60
        region.assert_synced(reader)


def test_a_copy_without_a_chain_is_reported_once_and_used_when_it_has_one():
    region = Region()
    empty = MemoryStore("empty")
    with region.reader(region.sources([empty])) as reader:
        for _ in range(3):
            region.clock.now += 60
            region.assert_synced(reader)
            region.chain.delta()
        avoided = [event for event in region.events if event.name == "relay-avoided"]
        assert [event.fields["relay"] for event in avoided] == [empty.url]
        assert "no chain is there yet" in str(avoided[0].fields["reason"])
        relay_once(region.chain.store, empty)
        region.clock.now += 60
        region.forget_calls()
        region.assert_synced(reader)
    assert not reads_of_data(region.origin)
    assert region.names().count("relay-avoided") == 1


@pytest.mark.parametrize("signed", [False, True])
def test_a_copy_of_another_run_is_not_used_and_reported(signed: bool):
    region = Region(signed=signed)
    other = ToyChain(MemoryStore("other"), sign=region.key.sign if region.key else None)
    other.anchor(first_state(5))
    other.grow(9)
    with region.reader(region.sources([other.store])) as reader:
        region.assert_synced(reader)
        assert region.events[0].name == "relay-avoided"
        assert region.events[0].fields["reason"] == "another run is there"
        for info in other.store.list(keys.COMMITS):  # it pretends to be the run, and serves its own commits
            assert info.size
        other.store.put(keys.RUN, region.chain.run.to_bytes())
        region.clock.now += 1000
        region.chain.delta()
        region.assert_synced(reader)


def test_a_copy_that_serves_an_old_state_cannot_take_a_reader_back():
    region = Region(signed=True)
    old = copy_of(region.copies[0].inner)
    region.chain.grow(3)
    region.relay()
    with region.reader(region.sources([old], patience=0.0)) as reader:
        region.assert_synced(reader)
        region.chain.grow(1)
        region.clock.now += 60
        region.assert_synced(reader)


def test_a_signed_commit_that_is_not_in_the_chain_is_found_out():
    """The copy serves another commit that the same key has signed, with the right parent."""
    region = Region(signed=True)
    fork = copy_of(region.chain.store)
    forked = ToyChain.__new__(ToyChain)
    forked.__dict__ |= region.chain.__dict__ | {"store": fork, "commits": [*region.chain.commits], "states": [*region.chain.states]}
    forked.delta()
    region.chain.grow(2)
    with region.reader(region.sources([fork], patience=0.0)) as reader:
        for _ in range(3):
            region.clock.now += 60
            region.assert_synced(reader)
            region.chain.delta()
    assert "relay-avoided" in region.names()


@pytest.mark.parametrize("when", range(12))
def test_a_copy_that_fails_in_the_middle_of_a_sync_is_left_and_asked_again_later(when: int):
    region = Region(5)
    counted = [0]

    def fails(each: Any) -> bool:
        counted[0] += 1
        return counted[0] > when

    dying = FaultyStore(region.copies[0].inner, [Before(fails, "unavailable", times=None)])
    with region.reader(region.sources([dying])) as reader:
        region.assert_synced(reader)
        if counted[0] > when:
            assert "relay-avoided" in region.names()
        dying._script.clear()
        region.clock.now += 1000
        region.chain.delta()
        region.relay()
        region.forget_calls()
        region.assert_synced(reader)
        assert not reads_of_data(region.origin)


def test_all_copies_gone_leaves_the_origin():
    region = Region(5, copies=3)
    dead = [FaultyStore(copy.inner, [Before(call(), "unavailable", times=None)]) for copy in region.copies]
    with region.reader(region.sources(dead)) as reader:
        region.assert_synced(reader)
        region.chain.delta()
        region.clock.now += 60
        region.assert_synced(reader)
    seconds = [event.fields["seconds"] for event in region.events if event.fields["relay"] == dead[0].url]
    assert seconds == sorted(seconds)
    assert len(seconds) >= 2


def test_data_that_were_collected_in_the_region_come_from_the_origin():
    region = Region(3)
    with region.reader() as reader:
        region.assert_synced(reader)
        with open_relay(region.chain.store, region.copies[0].inner) as relay:
            for _ in range(3):
                region.chain.grow(4)
                region.chain.add_anchor(region.chain.commits[-1].seq)
                relay.copy()
                relay.copy_shortcuts()
        for _ in range(2):
            collect(region.copies[0].inner, grace=0)
        region.forget_calls()
        with region.reader() as old:
            old.sync(seq=2)
            assert bits_of(old.state) == bits_of(region.chain.states[2])
        assert reads_of_data(region.origin)
        region.forget_calls()
        region.assert_synced(reader)
        assert not reads_of_data(region.origin)


def test_the_nearest_copy_is_read_and_none_if_the_origin_is_nearer():
    region = Region(3, copies=2)
    stores = [Slow(copy, region.clock, 0.1) for copy in region.copies]
    near = Slow(region.copies[1], region.clock, 0.001)
    far_origin = Slow(region.origin, region.clock, 0.2)
    for given, read in (([stores[0], near], region.copies[1]), ([near, stores[0]], region.copies[1])):
        region.forget_calls()
        with region.reader(Sources(far_origin, given, clock=region.clock)) as reader:
            region.assert_synced(reader)
        assert reads_of_data(read)
        assert not reads_of_data(region.origin) + reads_of_data(region.copies[0])
    region.forget_calls()
    with region.reader(Sources(Slow(region.origin, region.clock, 0.001), stores, clock=region.clock)) as reader:
        region.assert_synced(reader)
    assert not reads_of_data(region.copies[0]) + reads_of_data(region.copies[1])


def test_of_two_near_copies_the_faster_one_is_read():
    clock = Clock()
    origin, copies = MemoryStore("origin"), [MemoryStore("slow"), MemoryStore("fast")]
    names = [keys.data_key(1, 1, f"{number:064x}", "file") for number in range(8)]
    for store in (origin, *copies):
        store.put(keys.RUN, b"run")
        for name in names:
            store.put(name, bytes(1 << 20))
    counted = [FaultyStore(Slow(copy, clock, 0.001, rate)) for copy, rate in zip(copies, (1e6, 1e8), strict=True)]
    sources = Sources(origin, counted, clock=clock)
    for name in names:
        sources.read_into(name, memoryview(bytearray(1 << 20)))
    assert [len(reads_of_data(store)) for store in counted] == [1, 7]
    clock.now += 3600
    sources.read_into(names[0], memoryview(bytearray(1 << 20)))
    assert len(reads_of_data(counted[0])) == 1 or reads_of_data(counted[0])[names[0]] == 2  # measured again after a while


def test_bytes_that_are_read_again_are_reported_once():
    class Cut(WrappedStore):
        def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Any = None) -> None:
            progress(600)
            raise StoreUnavailable("cut")

    origin, copy = MemoryStore("origin"), MemoryStore("copy")
    key = keys.data_key(1, 1, "0" * 64, "file")
    for store in (origin, copy):
        store.put(keys.RUN, b"run")
        store.put(key, bytes(1000))
    reported: list[int] = []
    Sources(origin, [Cut(copy)]).read_into(key, memoryview(bytearray(1000)), progress=reported.append)
    assert sum(reported) == 1000


class Dripping(WrappedStore):
    """A store that sends one byte each second, and never stops."""

    def __init__(self, inner: Store, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Any = None) -> None:
        while True:
            self._clock.now += 1
            progress(1)


def test_a_copy_that_sends_byte_after_byte_is_left_after_a_bounded_time():
    region = Region(2)
    with region.reader(region.sources([Dripping(region.copies[0], region.clock)], patience=15.0)) as reader:
        region.assert_synced(reader)
    assert "relay-avoided" in region.names()
    assert region.clock.now == 15.0
    assert reads_of_data(region.origin)


def test_transfers_that_are_slow_only_together_with_others_go_on():
    copy = Copy(MemoryStore("copy"))
    with copy.reading(0.0), copy.reading(5.0):
        assert not copy.is_too_slow(100, 9.0, 10.0, 20.0)
        assert not copy.is_too_slow(150, 10.0, 10.0, 20.0)  # 25 bytes per second
        assert not copy.is_too_slow(1, 19.0, 10.0, 20.0)
        assert copy.is_too_slow(1, 20.0, 10.0, 20.0)
        assert copy.is_too_slow(10**9, 20.0, 10.0, 20.0)  # the others end, too
    with copy.reading(100.0):
        assert not copy.is_too_slow(1, 101.0, 10.0, 20.0)


def test_a_user_who_allows_few_bytes_per_second_may_read_a_copy(tmp_path: Any):
    sources = open_sources([tmp_path / "a", tmp_path / "b"], options=StoreOptions(max_rate=1000.0))
    assert isinstance(sources, Sources)
    assert sources._options.slowest == 500.0


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_listing_of_a_copy_that_does_not_end_is_not_used(is_slow: bool, monkeypatch: pytest.MonkeyPatch):
    class Endless(WrappedStore):
        def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
            for number in itertools.count():
                region.clock.now += 1 if is_slow else 0
                yield ObjectInfo(keys.anchor_key(number), 1, datetime.now(UTC))

    monkeypatch.setattr("deltawire.store.sources._MOST_LISTED", 10**9 if is_slow else 1000)
    region = Region(3)
    region.chain.add_anchor(2)
    region.relay()
    with region.reader(region.sources([Endless(region.copies[0])])) as reader:
        region.assert_synced(reader)
    assert [event.fields["reason"] for event in region.events if event.name == "relay-avoided"]


def test_a_copy_that_holds_data_back_is_still_blamed_for_wrong_records():
    """The reader waits for data that may still come to a copy. Meanwhile that copy must not end the reader with a wrong commit."""
    region = Region(2, signed=True)
    with region.reader() as reader:
        for _ in range(2):
            region.assert_synced(reader)
            region.chain.grow(1)
            region.relay()
            region.clock.now += 6
        region.assert_synced(reader)  # the copy keeps up, so it is waited for
        region.chain.grow(2)
        copy = region.copies[0].inner
        copy.put(keys.commit_key(region.chain.commits[-2].seq), b"{}")
        missed = region.chain.commits[-1].files[0]
        region.clock.now += 6
        assert reader._store.get(keys.commit_key(region.chain.commits[-2].seq), limit=1 << 16) == b"{}"
        with pytest.raises(ObjectMissing):
            reader._store.read_into(missed.key, memoryview(bytearray(missed.size)))
        region.assert_synced(reader)
    assert "relay-avoided" in region.names()


def test_copies_that_lie_in_turn_do_not_keep_a_reader_from_the_origin():
    """While the reader tries again with the origin, another copy is asked again, which was left alone before and lies, too."""
    region = Region(2, copies=2, signed=True)
    with region.reader() as reader:
        region.assert_synced(reader)
        region.chain.grow(1)
        region.relay()
        for copy in region.copies:
            copy.inner.put(keys.commit_key(region.chain.commits[-1].seq), b"{}")
        sources = reader._store
        assert isinstance(sources, Sources)
        leave = sources._leave

        def leave_for_a_moment(copy: Copy, reason: str) -> None:
            leave(copy, reason)
            copy.wait_until(region.clock.now)

        sources._leave = leave_for_a_moment  # type: ignore[method-assign]
        region.assert_synced(reader)


def test_a_reader_says_when_it_begins_to_read_a_copy():
    region = Region(2)
    with region.reader() as reader:
        region.assert_synced(reader)
        region.chain.grow(1)
        region.relay()
        region.assert_synced(reader)
    assert [(event.name, event.fields) for event in region.events] == [("relay-used", {"relay": "memory://copy-0"})]


def test_writes_and_records_of_a_location_go_to_the_origin():
    region = Region()
    sources = region.sources()
    sources.put("fleet/board.json", b"board")
    sources.put_if_absent(keys.pin_key("me"), b"pin")
    assert sources.get("fleet/board.json", limit=10) == b"board"
    found = sources.get_if_changed("fleet/board.json", limit=10, tag=None)
    assert found is not None
    assert sources.wait_for_change("fleet/board.json", limit=10, tag=found[1], timeout=0) is None
    assert [info.key for info in sources.list(keys.PINS)] == [keys.pin_key("me")]
    assert isinstance(sources.head(keys.pin_key("me")), ObjectInfo)
    sources.delete([keys.pin_key("me")])
    assert not list(region.chain.store.list(keys.PINS))
    assert not [each for each in region.copies[0].calls if each.op not in ("get", "list", "read_into")]
    assert sources.streams == 4
    assert sources.link is None or isinstance(sources.link, LinkEstimate)


def test_a_list_of_locations_is_opened_as_one_store(tmp_path: Any):
    chain = ToyChain(open_sources(tmp_path / "toy"))
    chain.anchor(first_state())
    relay_once(chain.store, open_sources(tmp_path / "copy"))
    with Subscriber([tmp_path / "toy", str(tmp_path / "copy")], threads=1) as reader:
        reader.sync()
        assert bits_of(reader.state) == bits_of(chain.state)
    version = pull([tmp_path / "toy", tmp_path / "copy", tmp_path / "missing"], tmp_path / "out", threads=1)
    assert version.updates == 1
    with pytest.raises(BadUrl):
        open_sources([])
    assert open_sources([tmp_path / "toy", tmp_path / "toy"]).url == chain.store.url
    opened = MemoryStore("open")
    opened.put("fleet/board.json", b"board")
    with open_sources([opened, opened]) as store:
        assert store.get("fleet/board.json", limit=5) == b"board"

"""Copies that lie, fail, stall or never end do a reader no harm: it leaves them alone, and reads the origin."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from copied_region import Clock, Region
from relayed_chain import copy_of, reads_of_data, relay_once
from toy_chain import ToyChain, first_state

from deltawire.errors import ObjectMissing, StoreUnavailable
from deltawire.store import Store, StoreOptions, keys
from deltawire.store.base import ObjectInfo
from deltawire.store.copies.copy_state import Copy
from deltawire.store.copies.locations import open_sources
from deltawire.store.copies.sources import Sources
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.testing import Before, FaultyStore, Reading, call


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
        assert "it holds no chain yet" in str(avoided[0].fields["reason"])
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
        assert region.events[0].fields["reason"] == "it holds another run"
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

    monkeypatch.setattr("deltawire.store.copies.sources._MOST_LISTED", 10**9 if is_slow else 1000)
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
        leave = sources._choice.leave

        def leave_for_a_moment(copy: Copy, reason: str) -> None:
            leave(copy, reason)
            copy.wait_until(region.clock.now)

        sources._choice.leave = leave_for_a_moment  # type: ignore[method-assign]
        region.assert_synced(reader)

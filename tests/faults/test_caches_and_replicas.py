"""Stores that show objects late: replicas that are behind their source, and caches of old answers or of missing objects."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from fetch_clock import Waiting
from publications import Ledger, Listener, assert_one_history, bits_at, open_publisher, open_subscriber, published, visible_step
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.errors import CommitOutcomeUnknown, DataMissing, RollbackDetected
from deltawire.format.records.run_records import Head
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import FaultyStore, Reading, call


@pytest.fixture
def chain() -> ToyChain:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    return chain


def test_data_that_arrive_after_their_commit_are_waited_for(chain: ToyChain, waiting: Waiting) -> None:
    events = Listener()
    with open_subscriber(chain.store, patience=30.0, on_event=events) as reader:
        reader.sync()
        late = {entry.key: chain.store.get(entry.key, limit=1 << 20) for entry in chain.delta().files}
        chain.store.delete(late)

        def arrive() -> None:
            if waiting.now > 5:
                for key, data in late.items():
                    chain.store.put(key, data)

        waiting.meanwhile = arrive
        assert reader.sync().seq == 2
        assert bits_of(reader.state) == bits_of(chain.state)
    assert waiting.now > 5
    assert "retrying" in events.names()


def test_data_that_never_arrive_are_an_alarm_after_a_bounded_time(chain: ToyChain, waiting: Waiting) -> None:
    events = Listener()
    with open_subscriber(chain.store, patience=30.0, on_event=events) as reader:
        reader.sync()
        before = bits_of(reader.state)
        chain.lose(chain.delta().files[0])
        with pytest.raises(DataMissing) as caught:
            reader.sync()
        assert caught.value.retryable
        assert 20 < waiting.now < 120
        assert events.names().count("sync-failed") == 1
        assert reader.version is not None
        assert reader.version.seq == 1
        assert bits_of(reader.state) == before
        chain.add_anchor(2)  # another process adds an anchor
        assert reader.sync().seq == 2


def test_a_new_commit_that_a_cache_says_is_not_there_is_found_later() -> None:
    inner, ledger = published(2)
    store = FaultyStore(inner, [Reading(call("get", keys.commit_key(4)), "missing", times=5)])
    with open_subscriber(store) as reader:
        assert reader.sync().step == 1
        with open_publisher(inner) as publisher:
            ledger.publish(publisher, 3)
        steps = []
        for _ in range(8):
            with contextlib.suppress(DataMissing):
                reader.sync()
            assert reader.version is not None
            steps.append(reader.version.step)
            assert bits_of(reader.state) == bits_at(steps[-1] or 0)
        assert (steps[0], steps[-1]) == (1, ledger.newest)
        assert bits_of(reader.state) == bits_at(ledger.newest or 0)


def test_a_commit_that_is_hidden_below_a_newer_one_is_an_error_that_heals() -> None:
    inner, ledger = published(6)
    store = FaultyStore(inner, [Reading(call("get", keys.commit_key(5)), "missing")])
    with open_subscriber(store) as reader:
        with pytest.raises(DataMissing) as caught:
            reader.sync()
        assert caught.value.retryable
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(ledger.newest or 0)


def test_an_old_head_costs_requests_only() -> None:
    inner, ledger = published(1)
    store = FaultyStore(inner, [Reading(call("get", keys.HEAD), "stale", times=None)])
    store.remember()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 5)
    assert visible_step(store) == ledger.newest
    with open_publisher(store) as publisher:
        assert publisher.version is not None
        assert publisher.version.step == ledger.newest
        ledger.publish(publisher)
    assert visible_step(store) == ledger.newest
    assert_one_history(inner, ledger)


def test_old_listings_cost_readers_a_detour_and_nothing_else(tmp_path: Path) -> None:
    inner, ledger = published(3)
    store = FaultyStore(inner, [Reading(call("list"), "stale", times=None)])
    store.remember()
    with open_publisher(inner) as publisher:
        ledger.publish(publisher, 12)
    assert list(inner.list(keys.ANCHORS))
    for mirror in (None, tmp_path / "mirror"):
        with open_subscriber(store, mirror) as reader:
            assert reader.sync().step == ledger.newest
            assert bits_of(reader.state) == bits_at(ledger.newest or 0)


def test_old_listings_do_not_give_an_epoch_to_two_publishers() -> None:
    inner, ledger = published(1)
    store = FaultyStore(inner, [Reading(call("list", keys.EPOCHS), "stale", times=None)])
    store.remember()
    epochs = []
    for _ in range(3):
        with open_publisher(store) as publisher:
            ledger.publish(publisher)
            epochs.append(publisher.epoch)
    assert epochs == [2, 3, 4]
    assert_one_history(inner, ledger)


def test_a_publisher_that_is_shown_too_old_a_chain_finds_the_end_of_it_by_writing() -> None:
    """The publisher is shown an empty slot that is taken. It learns that when it tries to create its commit there."""
    inner, ledger = published(4)
    hidden = [Reading(call("get", keys.commit_key(seq)), "missing") for seq in (3, 4)]
    inner.put(keys.HEAD, Head(2).to_bytes())
    with open_publisher(FaultyStore(inner, hidden)) as publisher:
        assert publisher.version is not None
        assert publisher.version.step == 3
        ledger.publish(publisher)
    assert visible_step(inner) == ledger.newest
    assert_one_history(inner, ledger)


def test_a_slot_that_is_neither_free_nor_to_be_seen_stops_a_publisher_until_it_shows() -> None:
    inner, ledger = MemoryStore(), Ledger()
    store = FaultyStore(inner, [Reading(call("get", keys.commit_key(2)), "missing", times=None)])
    with open_publisher(store) as publisher:
        ledger.publish(publisher)
        inner.put_if_absent(keys.commit_key(2), b"somebody's")
        with pytest.raises(CommitOutcomeUnknown):
            ledger.publish(publisher)
        inner.delete([keys.commit_key(2)])
        ledger.publish(publisher)
    assert visible_step(inner) == ledger.newest


def test_a_store_that_shows_less_than_was_seen_is_refused_until_it_has_caught_up(tmp_path: Path) -> None:
    inner, ledger = published(4)
    with open_subscriber(inner, tmp_path / "mirror") as reader:
        reader.sync()
    store = FaultyStore(inner, [Reading(call("get", keys.commit_key(4)), "missing", times=1)])
    with open_subscriber(store, tmp_path / "mirror") as reader:
        with pytest.raises(RollbackDetected):
            reader.sync()
        assert reader.version is not None
        assert reader.version.step == ledger.newest
        assert reader.sync().step == ledger.newest


def test_a_publisher_waits_for_data_of_its_own_run_that_arrive_late(waiting: Waiting) -> None:
    inner, ledger = published(2)
    entry = next(iter(ChainLog(inner).tail(1))).files[0]
    late = inner.get(entry.key, limit=1 << 20)
    inner.delete([entry.key])
    waiting.meanwhile = lambda: inner.put(entry.key, late)
    events = Listener()
    with open_publisher(inner, on_event=events) as publisher:
        ledger.publish(publisher)
    assert waiting.now > 0
    assert "retrying" in events.names()
    assert_one_history(inner, ledger)

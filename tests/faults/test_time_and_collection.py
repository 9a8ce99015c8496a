"""Readers that are slow, late, or active during a garbage collection; and clocks that are wrong."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from publications import Ledger, Listener, assert_one_history, bits_at, open_publisher, open_subscriber, published, visible_step
from support import bits_of, publish_fully

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.routes import plan
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.errors import ChainStale, DataMissing, VersionGone
from deltawire.publish.commits import ChainWriter
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.chain_view import ChainView
from deltawire.testing import Before, Call, FaultyStore, ProcessDied

DAYS = 86400.0 * 10


def long_chain() -> tuple[MemoryStore, Ledger]:
    """Publish thirteen versions. The first one and every fourth one after it have anchors."""
    return published(13)


def wide_state(version: int) -> dict[str, Any]:
    """Return a state whose checkpoint is much larger than a delta."""
    positions = np.arange(20_000, dtype=np.int32)
    return {"weight": positions + 10**6 * (positions < version)}


def prefer_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose routes by their bytes alone, as readers of a large model do."""
    monkeypatch.setattr(plan, "HOP_COST", 0)
    monkeypatch.setattr(plan, "OBJECT_COST", 0)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_reader_slower_than_collection_starts_again_from_an_anchor(mirrored: bool, tmp_path: Path) -> None:
    store, ledger = long_chain()
    events = Listener()
    with open_subscriber(store, tmp_path / "mirror" if mirrored else None, on_event=events) as reader:
        reader.sync(seq=2)
        assert collect(store, grace=0).outcome == "collected"
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(12)
        assert "resynced" in events.names()
        with pytest.raises(VersionGone):
            reader.sync(seq=3)
        assert bits_of(reader.state) == bits_at(12)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_collection_at_any_call_of_a_reader_costs_it_a_detour_at_most(
    mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has no grace period and no pin, unlike normal readers. It prefers deltas, as readers of a large model do."""
    prefer_deltas(monkeypatch)
    states = [wide_state(version) for version in range(13)]
    index, events, collections = 0, Listener(), 0
    while True:
        inner = MemoryStore()
        with open_publisher(inner) as publisher:
            for state in states:
                publish_fully(publisher, state)
        begins = [10**6]
        store = FaultyStore(inner, [Before(lambda call, begins=begins, inner=inner: collected(call.index == begins[0], inner), "crash")])
        with open_subscriber(store, tmp_path / str(index) if mirrored else None, on_event=events) as reader:
            reader.sync(seq=2)
            begins[0] = len(store.calls) + index
            assert reader.sync().seq == 13
            assert bits_of(reader.state) == bits_of(states[-1])
        if begins[0] >= len(store.calls):
            break
        print(store.calls[begins[0]])
        collections += store.calls[begins[0]].op == "read_into"
        index += 1
    assert collections > 3  # this many collections happened during a fetch
    assert {"avoiding", "resynced"} <= set(events.names())


def collected(is_due: bool, store: MemoryStore) -> bool:
    if is_due:
        assert collect(store, grace=0).outcome == "collected"
    return False


def test_data_above_the_floor_that_are_missing_are_an_alarm() -> None:
    store, ledger = long_chain()
    with open_subscriber(store) as reader:
        reader.sync(seq=10)
        collect(store, grace=0)
        log = ChainLog(store)
        commit = log.read(12)
        assert commit is not None
        assert commit.seq > log.floor()
        store.delete([entry.key for entry in commit.files])
        store.delete([info.key for prefix in (keys.ANCHORS, keys.SKIPS) for info in list(store.list(prefix))])
        with pytest.raises(DataMissing):
            reader.sync()
        assert reader.version is not None
        assert bits_of(reader.state) == bits_at(reader.version.step or 0)
        assert reader.version.step != ledger.newest


def test_a_pin_keeps_what_a_slow_reader_needs() -> None:
    store, ledger = long_chain()
    with open_subscriber(store, pin=True) as reader:
        reader.sync(seq=2)
        collect(store, grace=0)
        assert reader.sync(seq=3).step == 2
        assert bits_of(reader.state) == bits_at(2)
        assert reader.sync().step == ledger.newest


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_pin_keeps_what_a_reader_from_nothing_reads_though_it_is_abandoned(mirrored: bool, tmp_path: Path) -> None:
    """The reader waits before it reads the anchor of version 5.

    Meanwhile another publisher resumes from version 3, and publishes more versions.
    """
    inner, ledger = published(5)
    anchor = ChainLog(inner).shortcut(5)
    assert anchor is not None

    def go_on_elsewhere(call: Call) -> bool:
        if call.op == "read_into" and not list(inner.list(keys.MARKS)):
            with open_publisher(inner, resume_from_seq=3) as publisher:
                ledger.publish(publisher, 13)
            assert collect(inner, grace=0).floor == 4
            assert collect(inner, grace=0).outcome == "nothing"
        return False

    store = FaultyStore(inner, [Before(go_on_elsewhere, "crash", times=None)])
    events = Listener()
    with open_subscriber(store, tmp_path / "mirror" if mirrored else None, pin=True, on_event=events) as reader:
        assert reader.sync().seq == 5
        assert bits_of(reader.state) == bits_at(4)
        assert "avoiding" not in events.names()
        assert reader.sync().step == ledger.newest


def test_the_pin_of_a_reader_that_died_expires_and_is_deleted() -> None:
    inner, ledger = long_chain()
    now = [datetime.now(timezone.utc)]
    store = FaultyStore(inner, clock=lambda: now[0])
    open_subscriber(store, pin=True).sync(seq=2)
    pins = []
    for hours in (0.5, 1.0, 1.6):  # a pin expires after one hour, and is deleted after three
        now[0] += timedelta(hours=hours)
        floor = collect(store, grace=0).floor
        pins.append((floor, len(list(inner.list(keys.PINS)))))
    assert pins == [(None, 1), (9, 1), (9, 0)]
    assert visible_step(inner) == ledger.newest


def test_a_collector_killed_at_any_call_leaves_a_chain_that_can_be_read_and_collected() -> None:
    index = 0
    while True:
        inner, ledger = long_chain()
        store = FaultyStore(inner, [Before(index, "crash")])
        with contextlib.suppress(ProcessDied):
            collect(store, grace=0)
        assert visible_step(inner) == ledger.newest
        collect(inner, grace=0)
        assert visible_step(inner) == ledger.newest
        with open_publisher(inner) as publisher:
            ledger.publish(publisher)
        assert visible_step(inner) == ledger.newest
        if not store.died:
            break
        print(store.calls[-1])
        index += 1
    assert index > 40
    assert_one_history(inner, ledger)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_reader_that_joins_at_any_version_ends_at_the_head_bit_for_bit(
    mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader passes skips, anchors, the fence of a new publisher, and a rewind. Then it goes back to its first version."""
    sources: set[str] = set()
    find = Routes.find

    def noting(routes: Routes, have: Any, target: Any) -> Any:
        hops = find(routes, have, target)
        sources.update(hop.source for hop in hops)
        return hops

    monkeypatch.setattr(Routes, "find", noting)
    prefer_deltas(monkeypatch)
    store = MemoryStore()
    states: dict[int, Any] = {}
    for resume_from_seq, count in ((None, 9), (None, 6), (8, 9)):
        with open_publisher(store, resume_from_seq=resume_from_seq) as publisher:
            if resume_from_seq is not None:
                assert publisher.version is not None
                states[publisher.version.seq] = states[resume_from_seq]
            for _ in range(count):
                state = wide_state(len(states))
                states[publish_fully(publisher, state).seq] = state
    versions = [commit.seq for commit in ChainLog(store).tail(-1) if commit.kind != "fence"]
    assert versions == sorted(states)
    for seq in versions:
        with open_subscriber(store, tmp_path / str(seq) if mirrored else None) as reader:
            for target in (seq, None, seq):
                assert reader.sync(seq=target).seq == (target or versions[-1])
                assert bits_of(reader.state) == bits_of(states[target or versions[-1]])
    assert sources == {"anchor", "commit", "fence", "rewind", "skip"}


def test_a_reader_that_joins_while_the_chain_grows_follows_it_from_there() -> None:
    store, ledger = MemoryStore(), Ledger()
    readers = []
    with open_publisher(store) as publisher:
        for _ in range(10):
            ledger.publish(publisher)
            readers.append(open_subscriber(store))
            for reader in readers[::-3]:
                assert reader.sync().step == ledger.newest
                assert bits_of(reader.state) == bits_at(ledger.newest or 0)
    for reader in readers:
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(9)


@pytest.mark.parametrize("skew", [-DAYS, DAYS])
def test_a_publishers_wrong_clock_changes_nothing_but_the_times_that_it_writes(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ledger = published(3)
    monkeypatch.setitem(ChainWriter.__init__.__kwdefaults__, "clock", lambda: time.time() + skew)
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 10)
        version = publisher.version
    assert version is not None
    assert abs(version.time - time.time() - skew) < 3600
    assert visible_step(store) == ledger.newest
    assert_one_history(store, ledger)
    assert collect(store, grace=3600).outcome == "waiting"
    assert collect(store, grace=0).outcome == "collected"
    assert visible_step(store) == ledger.newest


@pytest.mark.parametrize("skew", [-DAYS, DAYS])
def test_a_readers_wrong_clock_changes_nothing_but_what_it_takes_for_silence(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ledger = published(3)
    monkeypatch.setitem(ChainView.__init__.__kwdefaults__, "clock", lambda: time.time() + skew)
    assert visible_step(store) == ledger.newest
    with open_subscriber(store, max_silence=3600.0) as reader:
        if skew > 0:
            with pytest.raises(ChainStale):
                reader.sync()
        else:
            reader.sync()
        assert bits_of(reader.state) == bits_at(2)


@pytest.mark.parametrize("skew", [-DAYS, DAYS])
def test_a_collectors_wrong_clock_does_not_shorten_the_grace(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own clock does not shorten it either, as long as it only moves forward."""
    inner, ledger = long_chain()
    wrong = time.time_ns() + int(skew * 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: wrong)
    now = [datetime.now(timezone.utc) + timedelta(seconds=skew)]
    store = FaultyStore(inner, clock=lambda: now[0])
    assert collect(store, grace=600).outcome == "waiting"
    now[0] += timedelta(seconds=599)
    assert collect(store, grace=600).outcome == "waiting"
    now[0] += timedelta(seconds=2)
    assert collect(store, grace=600).outcome == "collected"
    assert visible_step(inner) == ledger.newest


def test_a_silence_that_is_not_credible_is_reported_and_the_version_kept() -> None:
    store, ledger = published(2)
    events = Listener()
    with open_subscriber(store, max_silence=-1.0, on_event=events) as reader:
        with pytest.raises(ChainStale) as caught:
            reader.sync()
        assert caught.value.retryable
        assert reader.version is not None
        assert reader.version.step == ledger.newest
        assert bits_of(reader.state) == bits_at(1)
    assert "sync-failed" in events.names()

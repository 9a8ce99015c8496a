"""Relays that are killed, cut off or lied to at every call: the region never shows a commit without its data, and gets all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from announced_files import BeforeCommits, announce_at_once
from publications import Ledger, assert_one_history, open_publisher, published, repeated, visible_step
from relayed_chain import MeteredStore, assert_commits_before_moves, assert_data_before_commits, copy_of, objects_of, open_relay, relay_once

from deltawire.chain.find import find_version
from deltawire.chain.log import ChainLog
from deltawire.errors import DeltawireError
from deltawire.format.records.announcement_records import Announcement
from deltawire.format.records.canonical import MAX_RECORD_BYTES
from deltawire.publish.channels import ChannelWriter
from deltawire.relay import data_copy
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, ProcessDied, Reading


def a_chain() -> tuple[MemoryStore, MemoryStore, Ledger]:
    """Return a chain with anchors and skips, a region that has the beginning of it, and what was published."""
    store, ledger = published(2)
    region = MemoryStore("region")
    relay_once(store, region)
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 4)
    log = ChainLog(store)
    for version in (1, 6, 3):
        ChannelWriter(log, "stable").promote(find_version(log, version))
    return store, region, ledger


@pytest.fixture(scope="module")
def chain() -> tuple[MemoryStore, MemoryStore, Ledger]:
    return a_chain()


def relay_with_faults(source: Any, target: Any) -> None:
    """Relay until a fault ends it."""
    with contextlib.suppress(ProcessDied, DeltawireError):
        relay_once(source, target)


def assert_resumes(store: MemoryStore, region: MemoryStore, ledger: Ledger) -> None:
    """Check what a killed relay has left, and that the next one finishes it without reading again what the region has."""
    assert_data_before_commits(store, region)
    assert_commits_before_moves(store, region)
    assert visible_step(region) in {None, *ledger.tried}
    had, source = {info.key for info in region.list(keys.DATA)}, MeteredStore(store)
    relay_once(source, region)
    assert not had & set(source.read)
    assert all(source.read[info.key] <= info.size for info in store.list(keys.DATA))
    assert_data_before_commits(store, region)
    assert_commits_before_moves(store, region, at_least=3)
    assert visible_step(region) == ledger.newest
    assert_one_history(region)


def everywhere(chain: tuple[MemoryStore, MemoryStore, Ledger], fault: Callable[[int], Any], *, at_target: bool, from_nothing: bool) -> int:
    """Let a relay meet a fault at each call in turn, and check what follows. Return the number of calls."""
    store, begun, ledger = chain
    for index in range(1000):
        region = MemoryStore("region") if from_nothing else copy_of(begun)
        faulty = FaultyStore(region if at_target else store, [fault(index)])
        relay_with_faults(store if at_target else faulty, faulty if at_target else region)
        if len(faulty.calls) <= index:
            return index
        assert_resumes(store, region, ledger)
    raise AssertionError


@pytest.mark.parametrize("from_nothing", [True, False], ids=["first copy", "later copy"])
@pytest.mark.parametrize("fault", [Before, After])
def test_a_relay_killed_at_any_call_of_its_target_is_finished_by_the_next(chain: Any, fault: Any, from_nothing: bool) -> None:
    assert everywhere(chain, lambda index: fault(index, "crash"), at_target=True, from_nothing=from_nothing) > 25


@pytest.mark.parametrize("from_nothing", [True, False], ids=["first copy", "later copy"])
def test_a_relay_killed_at_any_call_of_its_source_is_finished_by_the_next(chain: Any, from_nothing: bool) -> None:
    assert everywhere(chain, lambda index: Before(index, "crash"), at_target=False, from_nothing=from_nothing) > 15


@dataclass(frozen=True)
class AnnouncedChain:
    """A chain before its newest commit, whose files are announced; the chain after it; a region with its beginning; what was published."""

    before: MemoryStore
    after: MemoryStore
    begun: MemoryStore
    ledger: Ledger


@pytest.fixture(scope="module")
def announced() -> AnnouncedChain:
    store, ledger = published(2)
    region = MemoryStore("region")
    relay_once(store, region)
    held, before = BeforeCommits(store), []
    with pytest.MonkeyPatch.context() as patched:
        announce_at_once(patched)
        with open_publisher(held) as publisher:
            ledger.publish(publisher, 1)
            for version in (1, 3, 2):
                ChannelWriter(ChainLog(store), "stable").promote(find_version(ChainLog(store), version))
            held.action = lambda: before.append(copy_of(store))
            ledger.publish(publisher, 1)
    assert len(before) == 1
    return AnnouncedChain(before[0], store, region, ledger)


def announced_files_of(store: MemoryStore) -> set[str]:
    """Return the files that the announcement in a store names. Empty if there is none."""
    if keys.COMING not in {info.key for info in store.list("")}:
        return set()
    return {entry.key for entry in Announcement.parse(store.get(keys.COMING, limit=MAX_RECORD_BYTES)).files}


@pytest.mark.parametrize("from_nothing", [True, False], ids=["first copy", "later copy"])
@pytest.mark.parametrize(
    ("fault", "at_target"), [(Before, True), (After, True), (Before, False)], ids=["before a target's", "after a target's", "a source's"]
)
def test_a_relay_killed_at_any_call_around_an_announcement_is_finished_by_the_next(
    announced: AnnouncedChain, fault: Any, at_target: bool, from_nothing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_copy, "_AT_ONCE", 1)  # so that the calls have the same order every time
    pending = announced_files_of(announced.before)
    assert len(pending) > 1
    seen = set()
    for index in range(1000):
        source, region = copy_of(announced.before), MemoryStore("region") if from_nothing else copy_of(announced.begun)
        faulty = FaultyStore(region if at_target else source, [fault(index, "crash")])
        with (
            contextlib.suppress(ProcessDied, DeltawireError),
            open_relay(source if at_target else faulty, faulty if at_target else region) as relay,
        ):
            relay.copy()
            assert relay.copy_announced()
            for info in announced.after.list(""):  # now the commit is there
                source.put(info.key, announced.after.get(info.key, limit=info.size))
            relay.copy()
            relay.copy_shortcuts()
        if len(faulty.calls) <= index:
            break
        had = {info.key for info in region.list("")}
        assert announced_files_of(region) <= had
        if announced.ledger.newest != visible_step(region):
            seen.add(len(pending & had))
        assert_resumes(announced.after, region, announced.ledger)
    assert seen >= set(range(len(pending) + 1))  # relays were killed before, between and after all announced files


@pytest.mark.parametrize("at_once", [1, 3])
def test_only_objects_in_flight_cross_the_link_again_after_a_relay_was_killed(
    chain: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_copy, "_AT_ONCE", at_once)
    store, begun, _ = chain
    sizes = {info.key: info.size for info in store.list(keys.DATA)}
    again = set()
    for index in range(1000):
        region = copy_of(begun)
        target, first, second = FaultyStore(region, [Before(index, "crash")]), MeteredStore(store), MeteredStore(store)
        relay_with_faults(first, target)
        if len(target.calls) <= index:
            break
        had = {info.key for info in region.list(keys.DATA)}
        relay_once(second, region)
        twice = {key for key, size in sizes.items() if first.read[key] >= size and second.read[key] >= size}
        assert len(twice) <= at_once
        assert not had & set(second.read)
        again |= twice
    assert len(again) > 4  # otherwise no relay was killed between reading an object and writing it


@pytest.mark.parametrize("kind", ["unavailable", "unknown"])
def test_a_relay_whose_target_loses_any_answer_finishes(chain: Any, kind: Any) -> None:
    store, begun, ledger = chain
    calls = everywhere(chain, lambda index: After(index, kind), at_target=True, from_nothing=False)
    for index in range(calls):
        region = copy_of(begun)
        faulty = FaultyStore(region, [After(index, kind)])
        with open_relay(store, faulty) as relay:
            repeated(relay.copy)
            repeated(relay.copy_shortcuts)
        assert visible_step(region) == ledger.newest


@pytest.mark.parametrize("lie", ["flip", "truncate", "missing"])
def test_a_relay_that_reads_anything_wrong_writes_nothing_wrong(chain: Any, lie: Any) -> None:
    assert everywhere(chain, lambda index: Reading(index, lie), at_target=False, from_nothing=True) > 15


def test_a_relay_that_is_shown_the_past_keeps_its_copy(chain: Any) -> None:
    store, begun, ledger = chain
    region = copy_of(begun)
    relay_once(store, region)
    before = objects_of(region)
    relay_once(begun, region)
    assert objects_of(region) == before
    assert visible_step(region) == ledger.newest

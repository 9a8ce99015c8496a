"""Several publishers write to one run. Exactly one of them continues, and later requests of the others change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fetch_clock import Waiting
from publications import (
    SESSION,
    At,
    Ledger,
    Listener,
    assert_one_history,
    bits_at,
    calls_of_a_session,
    objects,
    open_publisher,
    open_subscriber,
    published,
    visible_step,
)
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import Fenced, ObjectExists
from deltawire.publish.publisher import Publisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.store import Store, keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied, call

Action = Callable[[], None]

OTHERS = 20
"""The first step of a second trainer, so that its states differ from those of the first trainer."""


def referenced(store: Store) -> set[str]:
    """Return the keys of the data that commits and shortcuts name."""
    log = ChainLog(store)
    anchors, skips = log.shortcuts(None, 2**63 - 1)
    records = [*log.tail(-1), *(log.shortcut(seq) for seq in anchors), *(log.shortcut(seq, base) for seq, base in skips)]
    return {entry.key for record in records if record is not None for entry in record.files}


def test_exactly_one_of_two_publishers_continues_at_whichever_call_the_second_starts() -> None:
    """The second publisher opens the run and publishes at every call of the first publisher's session."""
    events = Listener()
    for index in range(len(calls_of_a_session())):
        inner, ours, theirs = MemoryStore(), Ledger(), Ledger(OTHERS)
        second: list[Publisher] = []

        def come_in(inner: MemoryStore = inner, theirs: Ledger = theirs, second: list[Publisher] = second) -> None:
            second.append(open_publisher(inner))
            theirs.publish(second[0])

        store = FaultyStore(inner, [Before(At(index, come_in), "crash", times=None)])
        alive: list[tuple[Publisher, Ledger]] = []
        with contextlib.suppress(Fenced):
            first = open_publisher(store, on_event=events)
            halted = [(first, ours)]
            ours.publish(first, SESSION)
            ours.publish(first)
            alive, halted = halted, []
        print(store.calls[index])
        if alive:
            with pytest.raises(Fenced):
                theirs.publish(second[0])
            halted = [(second[0], theirs)]
        else:
            alive = [(second[0], theirs)]
        for publisher, ledger in halted:
            for _ in range(2):
                with pytest.raises(Fenced):
                    ledger.publish(publisher)
        publisher, ledger = alive[0]
        ledger.publish(publisher)
        assert visible_step(inner) == ledger.newest
        assert_one_history(inner, ours, theirs)
    assert "fenced" in events.names()


def test_a_publisher_that_wakes_up_after_another_took_over_halts_and_no_version_uses_its_late_data() -> None:
    """The publisher sleeps before an upload, or before a commit, while the other publisher continues."""
    for waiting_for in (call("put", "data/0000000001/00000000000000000003"), call("put_if_absent", keys.commit_key(3))):
        inner, ours, theirs = MemoryStore(), Ledger(), Ledger(OTHERS)

        def take_over(inner: MemoryStore = inner, theirs: Ledger = theirs) -> None:
            with open_publisher(inner) as other:
                theirs.publish(other, 9)

        sleeping = iter([take_over])

        def sleeps(this: Call, waiting_for: Callable[[Call], bool] = waiting_for, sleeping: Iterator[Action] = sleeping) -> bool:
            if waiting_for(this):
                next(sleeping, lambda: None)()
            return False

        zombie = open_publisher(FaultyStore(inner, [Before(sleeps, "crash", times=None)]))
        ours.publish(zombie, 2)
        for _ in range(2):
            with pytest.raises(Fenced):
                ours.publish(zombie)
        assert next(sleeping, None) is None
        late = set(objects(inner, "data/0000000001/00000000000000000003/"))
        assert late
        assert not late & referenced(inner)
        assert visible_step(inner) == theirs.newest
        assert_one_history(inner, ours, theirs)
        assert collect(inner, grace=0).outcome == "collected"
        assert not late & set(objects(inner))
        assert visible_step(inner) == theirs.newest


def asleep(store: Store, prefix: str, meanwhile: Action, op: str = "put_if_absent") -> FaultyStore:
    """Return a store whose user sleeps once, before the first call that creates such an object."""
    sleeping = iter([meanwhile])

    def sleeps(this: Call) -> bool:
        if call(op, prefix)(this):
            next(sleeping, lambda: None)()
        return False

    return FaultyStore(store, [Before(sleeps, "crash", times=None)])


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_shortcut_made_after_its_data_were_collected_is_avoided_and_removed(mirrored: bool, tmp_path: Path, waiting: Waiting) -> None:
    """The earlier publisher has uploaded an anchor of version 9, and is about to create its record."""
    inner, ours, theirs = MemoryStore(), Ledger(), Ledger(OTHERS)

    def take_over_and_collect() -> None:
        with open_publisher(inner, anchor_policy=AnchorPolicy(10**6, None)) as other:
            theirs.publish(other, 2)
        assert collect(inner, grace=0).outcome == "collected"

    zombie = open_publisher(asleep(inner, keys.anchor_key(9), take_over_and_collect))
    ours.publish(zombie, 9)
    with pytest.raises(Fenced):
        ours.publish(zombie)
    dangling = ChainLog(inner).shortcut(9)
    assert dangling is not None
    assert not {entry.key for entry in dangling.files} & set(objects(inner))

    report = verify(inner, deep=True)
    assert report.ok
    assert [note.where for note in report.notes] == [keys.anchor_key(9)]
    events = Listener()
    with open_subscriber(inner, tmp_path / "mirror" if mirrored else None, patience=30.0, on_event=events) as reader:
        assert reader.sync(seq=9).step == 8
        assert bits_of(reader.state) == bits_at(8)
        assert "avoiding" in events.names()
        assert waiting.now == 0
        assert reader.sync().step == theirs.newest
    with open_publisher(inner) as publisher:
        theirs.publish(publisher)
    assert waiting.now == 0

    collect(inner, grace=0)
    assert keys.anchor_key(9) not in set(objects(inner))
    assert not verify(inner, deep=True).notes
    assert visible_step(inner) == theirs.newest
    assert_one_history(inner, ours, theirs)


def test_a_publisher_makes_no_shortcut_once_another_took_over() -> None:
    inner, ours, theirs = MemoryStore(), Ledger(), Ledger(OTHERS)
    events = Listener()

    def take_over() -> None:
        with open_publisher(inner, skips=False, anchor_policy=AnchorPolicy(10**6, None)) as other:
            theirs.publish(other)

    zombie = open_publisher(asleep(inner, keys.epoch_key(2), take_over, "head"), on_event=events)
    ours.publish(zombie, 5)
    assert {event.fields["kind"] for event in events.events if event.name == "shortcut-failed"} == {"skip", "anchor"}
    assert not list(objects(inner, keys.ANCHORS))
    assert not list(objects(inner, keys.SKIPS))
    with pytest.raises(Fenced):
        ours.publish(zombie)
    assert_one_history(inner, ours, theirs)


def test_a_commit_that_lands_after_a_higher_epoch_is_void() -> None:
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state())
    chain.claim(2)
    before = bits_of(chain.state)
    chain.epoch = 1
    chain.delta()  # this writer uses an epoch that is too low
    with open_subscriber(store) as reader:
        assert reader.sync().seq == 1
        assert bits_of(reader.state) == before
        assert verify(store, deep=True).void == 1
        with open_publisher(store) as publisher:
            assert publisher.version is not None
            assert publisher.version.seq == 1
            ledger = Ledger()
            ledger.publish(publisher, 2)
        assert reader.sync().step == ledger.newest
        assert bits_of(reader.state) == bits_at(1)


def test_a_commit_of_a_dead_publisher_that_arrives_while_another_takes_over_is_in_the_chain_or_not() -> None:
    """The request was still under way when its sender died. It arrives at every call of opening the next publisher."""
    index = 0
    while True:
        inner, ledger = published(2)
        dying = FaultyStore(inner, [After(call("put_if_absent", keys.commit_key(4)), "crash")])
        with contextlib.suppress(ProcessDied):
            ledger.publish(open_publisher(dying))
        late = inner.get(keys.commit_key(4), limit=65536)
        inner.delete([keys.commit_key(4)])

        def arrive(inner: MemoryStore = inner, late: bytes = late) -> None:
            with contextlib.suppress(ObjectExists):
                inner.put_if_absent(keys.commit_key(4), late)

        store = FaultyStore(inner, [Before(At(index, arrive), "crash", times=None)])
        with open_publisher(store) as publisher:
            if index >= len(store.calls):
                break
            landed = inner.get(keys.commit_key(4), limit=65536) == late
            assert publisher.version is not None
            assert publisher.version.step == (2 if landed else 1)
            ledger.publish(publisher)
        print(store.calls[index], landed)
        assert visible_step(inner) == ledger.newest
        assert_one_history(inner, ledger)
        index += 1
    assert index > 10


def test_readers_go_back_when_a_run_is_taken_up_from_an_older_version(tmp_path: Path) -> None:
    store, ledger = published(5)
    events = []
    with open_subscriber(store, on_event=events.append) as memory, open_subscriber(store, tmp_path / "mirror") as mirror:
        for reader in (memory, mirror):
            assert reader.sync().step == 4
        with open_publisher(store, resume_from_seq=2) as publisher:
            for reader in (memory, mirror):
                assert reader.sync().step == 1
                assert bits_of(reader.state) == bits_at(1)
            ledger.publish(publisher, 2)
        for reader in (memory, mirror):
            assert reader.sync().step == 6
            assert bits_of(reader.state) == bits_at(6)
    assert [(event.fields["from_seq"], event.fields["seq"]) for event in events if event.name == "rolled-back"] == [(5, 7)]
    commits = list(ChainLog(store).tail(-1))
    rewind = next(commit for commit in commits if commit.kind == "rewind")
    assert rewind.base is not None
    abandoned = [commit.seq for commit in commits if rewind.base.seq < commit.seq < rewind.seq and commit.kind != "fence"]
    assert abandoned == [3, 4, 5]
    assert visible_step(store) == 6
    assert_one_history(store, ledger)

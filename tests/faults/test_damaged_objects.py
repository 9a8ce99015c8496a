"""Data that differ from their records: flipped, cut short, missing, or older. The reader takes another route, or the error says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from publications import Ledger, Listener, open_publisher, open_subscriber, published, visible_step
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import DataDamaged, DataMissing, DeltawireError
from deltawire.format.records.record_parts import FileEntry
from deltawire.publish.publisher import Publisher
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber

HARMS = {"flipped": DataDamaged, "cut short": DataDamaged, "gone": DataMissing, "an older one's": DataDamaged}
Open = Callable[..., Subscriber]


@pytest.fixture(params=HARMS)
def harm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chain() -> ToyChain:
    """Publish a chain. Version 1 is a checkpoint, and versions 2 to 4 are deltas."""
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(3)
    return chain


@pytest.fixture(params=["memory", "mirror"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    numbers = iter(range(10**6))
    return lambda chain, **options: open_subscriber(
        chain.store, None if request.param == "memory" else tmp_path / str(next(numbers)), **options
    )


def do_harm(chain: ToyChain, entry: FileEntry, harm: str, older: FileEntry) -> bytes:
    """Damage an object, and return its bytes from before."""
    whole = chain.store.get(entry.key, limit=1 << 20)
    if harm == "flipped":
        chain.damage(entry)
    elif harm == "cut short":
        chain.store.put(entry.key, whole[: len(whole) // 2])
    elif harm == "gone":
        chain.lose(entry)
    else:
        chain.store.put(entry.key, chain.store.get(older.key, limit=1 << 20))
    return whole


def test_a_reader_keeps_its_version_if_a_bad_delta_has_no_other_route(chain: ToyChain, opened: Open, harm: str) -> None:
    chain.grow(1)
    bad = chain.commits[4].files[1]
    events = Listener()
    with opened(chain, on_event=events) as reader:
        reader.sync(seq=2)
        whole = do_harm(chain, bad, harm, chain.commits[2].files[1])
        with pytest.raises(HARMS[harm]) as caught:
            reader.sync()
        assert isinstance(caught.value, DeltawireError)
        assert caught.value.retryable
        assert reader.version is not None
        assert reader.version.seq in (2, 3)  # in memory, the hop before the bad one is already done
        assert bits_of(reader.state) == bits_of(chain.states[reader.version.seq] or {})
        assert "sync-failed" in events.names()
        assert not verify(chain.store, deep=True).ok
        chain.store.put(bad.key, whole)
        assert reader.sync().seq == 5
        assert bits_of(reader.state) == bits_of(chain.state)


def test_a_bad_delta_is_avoided_by_an_anchor(chain: ToyChain, opened: Open, harm: str) -> None:
    events = Listener()
    with opened(chain, on_event=events) as reader:
        reader.sync(seq=2)
        do_harm(chain, chain.commits[3].files[0], harm, chain.commits[2].files[0])
        chain.add_anchor(3)
        assert reader.sync().seq == 4
        assert bits_of(reader.state) == bits_of(chain.state)
    assert {"avoiding", "resynced"} <= set(events.names())


def test_a_bad_delta_in_front_of_an_anchor_that_was_confirmed_before_is_avoided(chain: ToyChain, opened: Open, harm: str) -> None:
    """The anchor belongs to the same version as the bad delta."""
    events = Listener()
    with opened(chain, on_event=events) as reader:
        reader.sync(seq=1)
        chain.add_anchor(2)
        do_harm(chain, chain.commits[2].files[1], harm, chain.commits[3].files[1])
        assert reader.sync().seq == 4
        assert bits_of(reader.state) == bits_of(chain.state)
    assert "avoiding" in events.names()


def test_a_bad_file_list_is_avoided_by_another_route_or_stops_at_the_last_good_version(opened: Open, harm: str) -> None:
    chain = ToyChain(MemoryStore(), listed=True)
    chain.anchor(first_state())
    chain.grow(3)
    lists = [commit.file_list.entry for commit in chain.commits if commit.file_list is not None]
    events = Listener()
    with opened(chain, on_event=events) as reader:
        reader.sync(seq=2)
        whole = do_harm(chain, lists[-1], harm, lists[-2])
        with pytest.raises(HARMS[harm]) as caught:
            reader.sync()
        assert caught.value.retryable
        assert reader.version is not None
        assert reader.version.seq == 2
        assert bits_of(reader.state) == bits_of(chain.states[2] or {})
        assert not verify(chain.store).ok
        chain.add_anchor(4)
        assert reader.sync().seq == 4
        assert bits_of(reader.state) == bits_of(chain.state)
        assert "avoiding" in events.names()
    with opened(chain) as joiner:
        joiner.sync(seq=3)
        chain.lose(lists[0])
        assert joiner.sync().seq == 4
    chain.store.put(lists[-1].key, whole)
    assert not verify(chain.store).problems


def test_collection_keeps_the_files_of_a_list_that_it_cannot_read(chain: ToyChain) -> None:
    chain.listed = True
    chain.anchor(chain.state)
    chain.anchor(chain.state)
    chain.delta()
    newest = chain.commits[-1].file_list
    assert newest is not None
    whole = chain.store.get(newest.key, limit=1 << 20)
    chain.lose(newest.entry)
    collected = collect(chain.store, grace=0.0)
    assert (collected.outcome, collected.floor) == ("collected", 5)
    chain.store.put(newest.key, whole)
    with open_subscriber(chain.store) as reader:
        assert reader.sync().seq == 7
        assert bits_of(reader.state) == bits_of(chain.state)
    assert verify(chain.store, deep=True).ok


def test_a_bad_anchor_is_replaced_by_an_older_one(chain: ToyChain, opened: Open, harm: str) -> None:
    shortcut = chain.add_anchor(4)
    do_harm(chain, shortcut.files[0], harm, chain.commits[1].files[0])
    events = Listener()
    with opened(chain, on_event=events) as reader:
        assert reader.sync().seq == 4
        assert bits_of(reader.state) == bits_of(chain.state)
    assert "avoiding" in events.names()


def test_a_bad_anchor_without_another_route_stops_only_new_readers(chain: ToyChain, opened: Open, harm: str) -> None:
    with opened(chain) as reader:
        reader.sync()
        do_harm(chain, chain.commits[1].files[0], harm, chain.commits[1].files[1])
        with opened(chain) as joiner:
            with pytest.raises(HARMS[harm]):
                joiner.sync()
            assert joiner.version is None
            assert not joiner.state
        chain.delta()
        assert reader.sync().seq == 5
        assert bits_of(reader.state) == bits_of(chain.state)


def test_a_bad_skip_is_replaced_by_its_deltas(chain: ToyChain, opened: Open, harm: str) -> None:
    chain.grow(12)
    skip = chain.add_skip(13, 1)
    do_harm(chain, skip.files[0], harm, chain.commits[2].files[0])
    events = Listener()
    with opened(chain, on_event=events) as reader:
        reader.sync(seq=1)
        assert reader.sync().seq == 16
        assert bits_of(reader.state) == bits_of(chain.state)
    assert "avoiding" in events.names()


def test_a_publisher_that_resumes_over_bad_data_takes_another_route_or_says_why(chain: ToyChain, harm: str, waiting: object) -> None:
    whole = do_harm(chain, chain.commits[3].files[0], harm, chain.commits[2].files[0])
    with pytest.raises(HARMS[harm]):
        Publisher(chain.store)
    chain.store.put(chain.commits[3].files[0].key, whole)
    shortcut = chain.add_anchor(4)
    do_harm(chain, shortcut.files[0], harm, chain.commits[1].files[0])
    with Publisher(chain.store) as publisher:
        assert publisher.version is not None
        assert publisher.version.seq == 4
        publisher.publish(chain.state)
    with open_subscriber(chain.store) as reader:
        assert reader.sync().kind == "delta"
        assert bits_of(reader.state) == bits_of(chain.state)


def test_a_chain_that_was_repaired_as_documented_is_sound_again() -> None:
    """If no publisher can read the newest version back, the user resumes from the newest sound version (docs/operations.md)."""
    store, ledger = published(4)
    log = ChainLog(store)
    bad = log.read(3)
    assert bad is not None
    whole = store.get(bad.files[0].key, limit=1 << 20)
    store.put(bad.files[0].key, whole[:-1] + bytes([whole[-1] ^ 1]))
    report = verify(store, deep=True, threads=1)
    assert not report.ok
    assert any("commit 3" in problem.where for problem in report.problems)
    with pytest.raises(DataDamaged):
        open_publisher(store)
    with open_publisher(store, resume_from_seq=2) as publisher:
        ledger.publish(publisher, 2)
        assert_repaired(store, ledger, {bad.files[0].key})
        ledger.publish(publisher, 12)  # this also makes checkpoints
        collect(store, grace=0)
    report = verify(store, deep=True, threads=1)
    assert (report.ok, report.superseded) == (True, [])


def test_a_new_checkpoint_repairs_a_damaged_chain() -> None:
    """The publisher has the newest version in memory, so damage in the store does not stop it. Its next checkpoint repairs the chain."""
    store, ledger = MemoryStore(), Ledger()
    with open_publisher(store) as publisher:
        ledger.publish(publisher, 4)
        anchor = ChainLog(store).read(1)
        assert anchor is not None
        store.delete([anchor.files[0].key])  # this is the only checkpoint, so no new reader can join
        assert not verify(store, threads=1).ok
        ledger.publish(publisher, 2)
        assert_repaired(store, ledger, {anchor.files[0].key})


def assert_repaired(store: MemoryStore, ledger: Ledger, damaged: set[str]) -> None:
    report = verify(store, deep=True, threads=1)
    assert (report.ok, report.problems) == (True, [])
    assert all(any(key in problem.what for problem in report.superseded) for key in damaged)
    assert visible_step(store) == ledger.newest

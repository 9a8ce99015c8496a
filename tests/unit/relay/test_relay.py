"""A relay makes the same chain in another store: one copy of each object crosses the link, and shortcuts are made in the region."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from relayed_chain import assert_data_before_commits, objects_of, open_relay, reads_of_data, relay_once
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import BadUrl, DataDamaged, MirrorError, NoChain, RelayConflict, SignatureInvalid
from deltawire.events import Event
from deltawire.format.records.signing import SigningKey
from deltawire.relay import Relay, data_copy
from deltawire.relay.region_records import region_floor
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.testing import FaultyStore, Reading, call


class Listener:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def bits_in(store: Any, seq: int | None = None, **options: Any) -> Any:
    """Return the weights of a version as a new reader of a store gets them."""
    with Subscriber(store, options=ReaderOptions(**({"patience": 0.0, "pin": False, "run": "toy"} | options)), threads=1) as reader:
        reader.sync(seq=seq)
        return bits_of(reader.state)


def toy(count: int, **options: Any) -> tuple[ToyChain, MemoryStore]:
    """Return a chain of one full checkpoint and `count` − 1 deltas, and an empty store."""
    chain = ToyChain(MemoryStore("origin"), **options)
    chain.anchor(first_state())
    chain.grow(count - 1)
    return chain, MemoryStore("region")


def test_every_object_of_a_chain_is_read_once_and_has_the_same_bytes_in_the_region():
    chain, region = toy(6)
    source = FaultyStore(chain.store)
    with open_relay(source, region) as relay:
        assert relay.copy() == 7
        assert relay.version is not None
        assert relay.version.updates == 6
        chain.grow(3)
        assert relay.copy() == 3
        assert relay.copy() == 0
        read = reads_of_data(source)
        assert set(read.values()) == {1}
        assert relay.bytes_read == sum(info.size for info in chain.store.list(keys.DATA))
    assert objects_of(region) == objects_of(chain.store)
    assert verify(region, deep=True, threads=1).ok
    for seq, state in enumerate(chain.states):
        if state is not None:
            assert bits_in(region, seq) == bits_of(state)


def test_a_relay_that_begins_late_copies_one_full_checkpoint_and_what_follows():
    chain, region = toy(20)
    chain.add_anchor(15)
    chain.add_skip(19, 15)
    source = FaultyStore(chain.store)
    relay_once(source, region)
    read = reads_of_data(source)
    assert set(read.values()) == {1}
    wanted = [chain.commits[seq] for seq in range(16, len(chain.commits))]
    anchor = ChainLog(chain.store).shortcut(15)
    assert set(read) == {entry.key for record in (anchor, *wanted) for entry in record.named_objects}
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems
    assert bits_in(region) == bits_of(chain.state)
    assert_data_before_commits(chain.store, region)
    assert set(ChainLog(region).skips(None, 100)) == {(19, 15)}


def test_full_checkpoints_and_skips_are_made_in_the_region():
    chain, region = toy(2)
    source = FaultyStore(chain.store)
    events = Listener()
    with open_relay(source, region, on_event=events) as relay:
        relay.copy()
        for _ in range(5):
            chain.grow(4)
            seq = chain.commits[-1].seq
            chain.add_anchor(seq)
            chain.add_skip(seq, seq - 4)
            relay.copy()
            assert relay.copy_shortcuts() == 2
        assert relay.copy_shortcuts() == 0
    assert objects_of(region) == objects_of(chain.store)
    shards = {entry.key for seq in ChainLog(region).anchors(None, 100) for entry in ChainLog(region).shortcut(seq).files}
    skips = {entry.key for seq, base in ChainLog(region).skips(None, 100) for entry in ChainLog(region).shortcut(seq, base).files}
    crossed = [call for call in source.calls if call.op == "read_into" and call.key in shards | skips]
    assert not {call.key for call in crossed} & skips
    made = [event.fields for event in events.events if event.name == "shortcut-relayed"]
    anchors = [ChainLog(region).shortcut(seq) for seq in ChainLog(region).anchors(None, 100)]
    small = [entry.size for anchor in anchors for entry in anchor.files if not entry.raw]
    assert sum(fields["fetched"] for fields in made) == sum(small)
    assert all(fields["rebuilt"] for fields in made)


def test_a_full_checkpoint_that_cannot_be_made_crosses_the_link_and_a_skip_is_left_out():
    chain, region = toy(6)
    real_states = list(chain.states)
    relay_once(chain.store, region)
    chain.grow(1)
    state = chain.states[7]
    assert state is not None
    chain.states[7] = {name: state[name] for name in sorted(state, reverse=True)}  # the writer of this shortcut had another order of data
    anchor = chain.add_anchor(7)
    skip = chain._shortcut(keys.skip_key(7, 3), 7, 3, chain.delta_files(real_states[2], state, at=7))
    events = Listener()
    relay_once(chain.store, region, on_event=events)
    fields = {event.name: event.fields for event in events.events}
    assert fields["shortcut-left-out"]["kind"] == "skip"
    assert ChainLog(region).shortcut(7) == anchor
    assert ChainLog(region).shortcut(7, 3) is None
    assert skip.files
    assert bits_in(region) == bits_of(state)


@pytest.mark.parametrize("shortcuts", ["none", "anchors"])
def test_a_relay_makes_only_the_shortcuts_that_it_is_asked_for(shortcuts: str):
    chain, region = toy(5)
    relay_once(chain.store, region)
    chain.grow(4)
    chain.add_anchor(9)
    chain.add_skip(9, 5)
    relay_once(chain.store, region, shortcuts=shortcuts)
    assert ChainLog(region).anchors(None, 100) == ([9] if shortcuts == "anchors" else [])
    assert ChainLog(region).skips(None, 100) == []
    with pytest.raises(ValueError, match="shortcuts"):
        Relay(chain.store, region, shortcuts="some")


def test_a_replica_in_a_mirror_makes_the_same_shortcuts(tmp_path: Path):
    chain, region = toy(5)
    relay_once(chain.store, region)
    chain.grow(4)
    chain.add_anchor(9)
    chain.add_skip(9, 5)
    relay_once(chain.store, region, mirror=tmp_path / "replica")
    assert objects_of(region) == objects_of(chain.store)


def test_file_lists_attachments_rewinds_fences_and_void_commits_are_relayed():
    chain, region = toy(4, listed=True)
    source = FaultyStore(chain.store)
    with open_relay(source, region) as relay:
        relay.copy()
        chain.rewind(3)
        chain.delta()
        chain.claim(2)
        chain.delta()
        chain.epoch = 1
        void = chain._append(chain.state, kind="delta", base=chain.ref(len(chain.commits) - 1), files=(), changed=0)
        chain.commits[-1] = void
        chain.epoch = 2
        relay.copy()
        assert set(reads_of_data(source).values()) == {1}
        assert relay.version is not None
        assert relay.version.seq == void.seq - 1
    with open_relay(source, region) as again:
        assert again.copy() == 0
        assert again.version == relay.version
    assert objects_of(region) == objects_of(chain.store)
    assert ChainLog(region).is_void(void)
    assert_data_before_commits(chain.store, region)
    assert bits_in(region) == bits_of(chain.state)


def test_a_rewind_to_a_version_before_the_beginning_of_the_copy_brings_its_data():
    chain, region = toy(20)
    chain.add_anchor(15)
    relay_once(chain.store, region)
    chain.rewind(3)
    chain.delta()
    relay_once(chain.store, region)
    assert bits_in(region) == bits_of(chain.state)
    assert_data_before_commits(chain.store, region)


def test_a_signed_chain_stays_signed_and_a_forged_one_is_not_copied():
    key = SigningKey.generate()
    chain, region = toy(4, sign=key.sign)
    trusted = {"trusted_keys": [key.public], "run": "toy"}
    relay_once(chain.store, region, **trusted)
    assert bits_in(region, **trusted) == bits_of(chain.state)
    before = objects_of(region)
    chain._sign = lambda record: record
    chain.delta()
    with open_relay(chain.store, region, **trusted) as relay, pytest.raises(SignatureInvalid):
        relay.copy()
    assert objects_of(region) == before


def test_a_relay_refuses_a_store_that_holds_another_chain_and_writes_nothing():
    chain, region = toy(3)
    other = ToyChain(region)
    other.anchor(first_state(1))
    before = objects_of(region)
    with open_relay(chain.store, region) as relay, pytest.raises(RelayConflict):
        relay.copy()
    assert objects_of(region) == before


def test_a_relay_stops_where_the_copy_differs_from_the_chain():
    chain, region = toy(3)
    relay_once(chain.store, region)
    chain.delta()
    fork = MemoryStore("fork")
    for info in region.list(""):
        fork.put(info.key, region.get(info.key, limit=info.size))
    relay_once(chain.store, region)
    forked = ToyChain.__new__(ToyChain)
    forked.__dict__ |= chain.__dict__ | {"store": fork, "commits": chain.commits[:-1], "states": chain.states[:-1]}
    forked.grow(2)
    before = objects_of(region)
    with open_relay(fork, region) as relay, pytest.raises(RelayConflict):
        relay.copy()
    assert objects_of(region) == before


def test_a_relay_whose_source_is_behind_its_copy_waits_for_it():
    """Another relay, with a better source, writes to the same store."""
    chain, region = toy(3)
    middle = MemoryStore("middle")
    relay_once(chain.store, middle)
    chain.grow(2)
    relay_once(chain.store, region)
    before = objects_of(region)
    with open_relay(middle, region) as relay:
        assert relay.copy() == 0
        assert objects_of(region) == before
        relay_once(chain.store, middle)
        chain.grow(1)
        relay_once(chain.store, middle)
        relay.copy()
    assert objects_of(region) == objects_of(chain.store)


def test_relays_in_a_tree_make_the_same_chain():
    chain, region = toy(3)
    regions = [region, MemoryStore("second"), MemoryStore("third")]
    for _ in range(3):
        for source, target in zip([chain.store, *regions], regions, strict=False):
            relay_once(source, target)
        chain.grow(2)
        chain.add_anchor(chain.commits[-1].seq)
    for source, target in zip([chain.store, *regions], regions, strict=False):
        relay_once(source, target)
    for each in regions:
        assert objects_of(each) == objects_of(chain.store)
    assert bits_in(regions[-1]) == bits_of(chain.state)


def test_two_relays_with_the_same_target_make_one_chain():
    chain, region = toy(3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                relay_once(chain.store, region)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    chain.grow(8)
    for thread in threads:
        thread.join()
    relay_once(chain.store, region)
    assert not errors
    assert objects_of(region) == objects_of(chain.store)


def test_a_relay_that_was_away_for_long_continues_with_a_full_checkpoint_if_that_is_less():
    chain, region = toy(3)
    relay_once(chain.store, region)
    chain.grow(30)
    chain.add_anchor(30)
    source = FaultyStore(chain.store)
    relay_once(source, region)
    assert bits_in(region) == bits_of(chain.state)
    assert_data_before_commits(chain.store, region)
    skipped = {entry.key for seq in range(4, 30) for entry in chain.commits[seq].files}
    assert not skipped & set(reads_of_data(source))


def test_data_that_were_collected_before_they_were_copied_are_replaced_by_a_full_checkpoint():
    chain, region = toy(3)
    relay_once(chain.store, region)
    chain.grow(7)
    chain.add_anchor(6)
    chain.add_anchor(9)
    for entry in chain.commits[4].files:
        chain.lose(entry)
    from deltawire.relay.region_records import raise_floor

    raise_floor(chain.store, chain.run, 6, epoch=1)
    relay_once(chain.store, region)
    assert bits_in(region) == bits_of(chain.state)
    assert_data_before_commits(chain.store, region)
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems


def test_collection_in_the_region_deletes_what_its_readers_do_not_need():
    chain, region = toy(3)
    with open_relay(chain.store, region) as relay:
        for _ in range(3):
            chain.grow(4)
            chain.add_anchor(chain.commits[-1].seq)
            relay.copy()
            relay.copy_shortcuts()
        collect(region, grace=0)
        done = collect(region, grace=0)
        assert done.deleted or collect(region, grace=0).outcome in ("collected", "nothing")
        assert len(list(region.list(keys.DATA))) < len(list(chain.store.list(keys.DATA)))
        chain.grow(3)
        relay.copy()
    assert bits_in(region) == bits_of(chain.state)
    assert_data_before_commits(chain.store, region)
    report = verify(region, deep=True, threads=1)
    assert report.ok, report.problems


def test_large_objects_go_through_a_file_and_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_copy, "IN_MEMORY", 100)
    chain, region = toy(3)
    relay_once(chain.store, region, spool=tmp_path / "spool")
    assert objects_of(region) == objects_of(chain.store)
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_relay_waits_for_the_first_version_and_follows_until_it_is_stopped():
    chain = ToyChain(MemoryStore("origin"))
    region = MemoryStore("region")
    stop = threading.Event()
    events = Listener()
    with open_relay(chain.store, region, on_event=events) as relay:
        with open_relay(MemoryStore("empty"), region) as waiting, pytest.raises(NoChain):
            waiting.copy()
        versions = relay.follow(poll=0.01, stop=stop)
        chain.anchor(first_state())
        assert next(versions).updates == 1
        chain.delta()
        assert next(versions).updates == 2
        stop.set()
        assert list(versions) == []
    assert "relayed" in [event.name for event in events.events]
    assert not list(chain.store.list(keys.PINS))


def test_a_relay_that_keeps_up_asks_its_source_for_the_commit_and_its_data_and_nothing_else():
    chain, region = toy(3)
    source = FaultyStore(chain.store)
    with open_relay(source, region) as relay:
        relay.copy()
        commit = chain.delta()
        source.calls.clear()
        assert relay.copy() == 1
        asked = [each.key for each in source.calls]
        assert sorted(asked) == sorted(
            [keys.commit_key(commit.seq), *(entry.key for entry in commit.files), keys.commit_key(commit.seq + 1)]
        )
        assert asked[0] == keys.commit_key(commit.seq)
        source.calls.clear()
        assert relay.copy() == 0
        assert [each.key for each in source.calls] == [keys.commit_key(commit.seq + 1)]


@pytest.mark.parametrize("is_new", [True, False], ids=["new copy", "old copy"])
def test_a_relay_of_a_relay_follows_a_rewind_to_a_version_before_those_that_were_collected(is_new: bool):
    chain, region = toy(1)
    further = MemoryStore("further")
    relay_once(chain.store, region)
    if not is_new:
        relay_once(region, further)
    chain.grow(1)
    chain.anchor(first_state(1))
    relay_once(chain.store, region)
    later = datetime.now(timezone.utc) + timedelta(days=1)
    for _ in range(2):
        collect(region, grace=0, keep_anchors=1, now=later)
    assert not any(entry.key in objects_of(region) for entry in chain.commits[2].files)
    chain.rewind(1)
    relay_once(chain.store, region)
    relay_once(region, further)
    chain.grow(1)
    relay_once(chain.store, region)
    relay_once(region, further)
    assert bits_in(further) == bits_of(chain.state)
    report = verify(further, deep=True, threads=1)
    assert report.ok, report.problems


@pytest.mark.parametrize("key", [keys.RUN, keys.commit_key(2)])
def test_a_bit_that_flips_in_transit_is_no_conflict(key: str):
    chain, region = toy(2)
    relay_once(chain.store, region)
    chain.grow(1)
    relay_once(chain.store, FaultyStore(region, [Reading(call("get", key), "flip")]))
    assert bits_in(region) == bits_of(chain.state)


def test_a_rewind_to_a_collected_version_that_a_later_one_has_replaced_does_not_stop_a_relay():
    chain, region = toy(3)
    chain.anchor(first_state(1))
    for _ in range(8):
        chain.grow(1)
    relay_once(chain.store, region)
    assert region_floor(region, chain.run) == 4
    chain.rewind(2)
    chain.rewind(5)
    chain.grow(1)
    later = datetime.now(timezone.utc) + timedelta(days=1)
    for _ in range(2):
        collect(chain.store, grace=0, keep_anchors=1, now=later)
    assert not any(entry.key in objects_of(chain.store) for entry in chain.commits[2].files)
    relay_once(chain.store, region)
    assert bits_in(region) == bits_of(chain.state)


def test_an_epoch_that_is_read_wrongly_is_not_written_to_the_region():
    chain, region = toy(1)
    chain.claim(2)
    chain.grow(1)
    with pytest.raises(DataDamaged):
        relay_once(FaultyStore(chain.store, [Reading(call("get", keys.epoch_key(1)), "flip")]), region)
    relay_once(chain.store, region)
    assert objects_of(region) == objects_of(chain.store)


def test_a_relay_refuses_a_directory_with_other_files_for_its_mirror_before_it_copies(tmp_path: Path):
    chain, region = toy(1)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(MirrorError, match=r"notes\.txt"):
        Relay(chain.store, region, mirror=tmp_path)
    assert not objects_of(region)


def test_a_relay_from_a_location_to_itself_is_refused(tmp_path: Path):
    with pytest.raises(BadUrl, match="to itself"):
        Relay(tmp_path, f"file://{tmp_path}/")

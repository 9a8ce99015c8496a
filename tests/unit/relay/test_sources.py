"""A reader with several stores reads from the nearest copy that has what it needs, and from the origin otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from copied_region import Clock, Region, Slow
from relayed_chain import open_relay, reads_of_data, relay_once
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.maintenance.collect import collect
from deltawire.errors import BadUrl, DataMissing, ObjectMissing
from deltawire.store import keys
from deltawire.store.base import ObjectInfo
from deltawire.store.copies.locations import open_sources
from deltawire.store.copies.sources import Sources
from deltawire.store.memory import MemoryStore
from deltawire.store.streams.link_estimate import LinkEstimate
from deltawire.subscribe import Subscriber, pull
from deltawire.testing import FaultyStore


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

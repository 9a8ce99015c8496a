"""Announced files are in the region before their commit, and readers there begin with them."""

from __future__ import annotations

from typing import Any

import pytest
from announced_files import look_and_arrive
from relayed_chain import objects_of, open_relay, reads_of_data
from support import bits_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.format.records.announcement_records import Announcement
from deltawire.relay import announcement_copy
from deltawire.store import keys
from deltawire.store.copies.sources import Sources
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.testing import Before, FaultyStore, call


class Announced:
    """A chain whose next version is uploaded and announced, but not committed."""

    def __init__(self) -> None:
        self.chain = ToyChain(MemoryStore("toy"))
        self.chain.anchor(first_state())
        self.chain.grow(2)
        self.next = next_state(self.chain.state, 99)
        self.source, self.region = FaultyStore(self.chain.store), FaultyStore(MemoryStore("region"))

    def announce(self, **changed: Any) -> Announcement:
        files = self.chain.delta_files(self.chain.state, self.next)
        base = self.chain.ref(len(self.chain.commits) - 1)
        given: dict[str, Any] = {
            "id": self.chain.run.id,
            "epoch": 1,
            "number": 1,
            "seq": len(self.chain.commits),
            "base": base,
            "files": files,
        }
        announcement = Announcement(**(given | changed))
        self.chain.store.put(keys.COMING, announcement.to_bytes())
        return announcement


def test_announced_files_cross_the_link_once_and_before_their_commit():
    world = Announced()
    with open_relay(world.source, world.region) as relay:
        relay.copy()
        assert not relay.copy_announced()
        announcement = world.announce()
        assert relay.copy_announced()
        assert not relay.copy_announced()
        assert world.region.get(keys.COMING, limit=1 << 16) == announcement.to_bytes()
        for entry in announcement.files:
            assert world.region.get(entry.key, limit=entry.size)
        calls = [each.key for each in world.region.calls if each.op == "put" and each.key.startswith((keys.DATA, keys.COMING))]
        assert calls[-1] == keys.COMING
        world.chain.delta(world.next)
        assert relay.copy() == 1
    assert set(reads_of_data(world.source).values()) == {1}
    assert objects_of(world.region) == objects_of(world.chain.store)


@pytest.mark.parametrize(
    "changed",
    [{"id": "0" * 32}, {"epoch": 2, "files": ()}, {"base": None}, {"files": None}],
    ids=["another run", "another writer", "another base", "files that do not exist"],
)
def test_a_wrong_announcement_is_not_passed_on(changed: dict[str, Any]):
    world = Announced()
    if "base" in changed:
        changed = {"base": world.chain.ref(1)}
    if "files" in changed and changed["files"] is None:
        files = world.chain.delta_files(world.chain.state, world.next)
        changed = {"files": files}
        world.announce(**changed)
        for entry in files:
            world.chain.lose(entry)
    else:
        world.announce(**changed)
    with open_relay(world.source, world.region) as relay:
        relay.copy()
        assert not relay.copy_announced()
    assert keys.COMING not in {info.key for info in world.region.list("")}


def test_a_relay_does_not_wait_for_an_announced_file_that_is_missing():
    world = Announced()
    events: list[str] = []
    with open_relay(world.source, world.region, patience=1.0, on_event=lambda event: events.append(event.name)) as relay:
        relay.copy()
        world.chain.lose(world.announce().files[0])
        assert not relay.copy_announced()
    assert "retrying" not in events


def test_files_of_one_version_that_are_announced_in_turn_share_one_budget(monkeypatch: pytest.MonkeyPatch):
    world = Announced()
    size = sum(entry.size for entry in world.announce().files)
    monkeypatch.setattr(announcement_copy, "_SHARE", world.chain.commits[-1].state_bytes)
    monkeypatch.setattr(announcement_copy, "_LEAST", 2 * size + size // 2)
    with open_relay(world.source, world.region) as relay:
        relay.copy()
        copied = []
        for seed in range(4):
            world.next = next_state(world.chain.state, 100 + seed)
            world.announce()
            copied.append(relay.copy_announced())
        assert copied == [True, True, False, False]
        world.chain.delta(world.next)
        relay.copy()
        world.next = next_state(world.chain.state, 200)
        world.announce()
        assert relay.copy_announced()


def test_a_reader_of_the_region_takes_announced_files_from_there():
    world = Announced()
    sources = Sources(FaultyStore(world.chain.store), [world.region])
    options = ReaderOptions(patience=0.0, pin=False, run="toy")
    with open_relay(world.source, world.region) as relay, Subscriber(sources, options=options, threads=1) as reader:
        relay.copy()
        reader.sync()
        world.announce()
        assert not look_and_arrive(reader)
        relay.copy_announced()
        world.region.calls.clear()
        assert not look_and_arrive(reader)
        assert len(reads_of_data(world.region)) == 2
        world.chain.delta(world.next)
        relay.copy()
        reader.sync()
        assert bits_of(reader.state) == bits_of(world.next)
        assert set(reads_of_data(world.region).values()) == {1}
        assert isinstance(sources.origin, FaultyStore)
        assert not reads_of_data(sources.origin)


def test_a_copy_whose_announcement_cannot_be_read_is_left_alone():
    world = Announced()
    with open_relay(world.source, world.region) as relay:
        relay.copy()
    events: list[str] = []
    failing = FaultyStore(world.region, [Before(call("get", keys.COMING), "unavailable", times=None)])
    sources = Sources(world.chain.store, [failing], on_event=lambda event: events.append(event.name))
    with Subscriber(sources, options=ReaderOptions(patience=0.0, pin=False, run="toy"), threads=1) as reader:
        reader.sync()
        assert not reader._look()
        assert not reader._look()
    assert events.count("relay-avoided") == 1

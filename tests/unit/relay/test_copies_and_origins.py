"""Copies and origins are told apart, and stores whose listings leave something out do no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from relayed_chain import assert_data_before_commits, objects_of, open_relay, reads_of_data, relay_once
from support import bits_of
from test_relay import bits_in, toy

from deltawire import Publisher
from deltawire.errors import RelayConflict
from deltawire.format.records.relay_records import CopyRecord
from deltawire.format.records.run_records import Run
from deltawire.relay.region_records import raise_floor, region_floor
from deltawire.store import keys
from deltawire.store.base import ObjectInfo
from deltawire.store.copies.copy_state import Copy
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.testing import FaultyStore


class Forgetful(WrappedStore):
    """A store whose listings of some folders are empty."""

    hidden: tuple[str, ...] = ()

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(()) if prefix in self.hidden else super().list(prefix, after=after)


def test_a_relay_back_to_the_origin_is_refused_and_writes_nothing():
    chain, region = toy(3)
    relay_once(chain.store, region)
    further = MemoryStore("further")
    relay_once(region, further)
    before = objects_of(chain.store)
    for copy in (region, further):
        with open_relay(copy, chain.store, pin=False) as relay, pytest.raises(RelayConflict, match="is not a copy"):
            relay.copy()
    assert objects_of(chain.store) == before
    relay_once(further, region)  # a copy may have several sources


def test_nothing_is_published_to_a_copy_unless_it_replaces_the_origin():
    chain, region = toy(3)
    relay_once(chain.store, region)
    record = CopyRecord.parse(region.get(keys.COPY, limit=1000))
    assert record.id == Run.parse(region.get(keys.RUN, limit=10_000)).id
    before = objects_of(region)
    with pytest.raises(RelayConflict, match=r"Publish to the origin.*delete copy\.json"):
        Publisher(region)
    assert objects_of(region) == before
    chain.grow(1)
    relay_once(chain.store, region)
    region.delete([keys.COPY])
    with Publisher(region) as publisher:
        assert publisher.version is not None
        assert publisher.version.seq == len(chain.commits) - 1


def test_a_relay_that_died_before_its_first_version_leaves_a_place_for_relays_only():
    chain, region = toy(2)
    region.put_if_absent(keys.COPY, CopyRecord(chain.run.id).to_bytes())
    with pytest.raises(RelayConflict):
        Publisher(region)
    relay_once(chain.store, region)
    assert bits_in(region) == bits_of(chain.state)


def test_a_copy_that_gets_nothing_new_is_waited_for_a_short_time():
    copy = Copy(MemoryStore())
    copy.showed(5, 100.0)  # the newest commit that it had when the reader began
    assert copy.is_awaited("data", 6, 101.0, 15.0)
    assert copy.is_awaited("data", 6, 103.9, 15.0)
    assert not copy.is_awaited("data", 6, 104.0, 15.0)


@pytest.mark.parametrize("progress", ["a commit", "a file"])
def test_a_copy_that_gets_something_new_is_waited_for_longer(progress: str):
    copy = Copy(MemoryStore())
    copy.showed(5, 100.0)
    assert copy.is_awaited("data", 7, 101.0, 15.0)
    if progress == "a commit":
        copy.showed(6, 102.0)
        assert copy.is_awaited("data", 7, 102.0, 15.0)
    else:
        assert copy.is_awaited("other", 7, 101.0, 15.0)
        copy.delivered("other", 10, 101.0, 102.0)
    assert copy.is_awaited("data", 7, 116.9, 15.0)
    assert not copy.is_awaited("data", 7, 117.0, 15.0)


@pytest.mark.parametrize("hidden", [(keys.MARKS,), (keys.MARKS, keys.ANCHORS, keys.SKIPS)])
def test_a_rewind_brings_its_data_even_if_the_region_lists_no_marks(hidden: tuple[str, ...]):
    chain, inner = toy(20)
    chain.add_anchor(15)
    relay_once(chain.store, inner)
    assert region_floor(inner, chain.run) == 15
    region = Forgetful(inner)
    region.hidden = hidden
    with open_relay(chain.store, region) as relay:
        relay.copy()
        chain.rewind(3)
        relay.copy()
    region.hidden = ()
    assert bits_in(inner) == bits_of(chain.states[3])
    assert_data_before_commits(chain.store, inner)
    chain.delta()
    relay_once(chain.store, inner)
    assert bits_in(inner) == bits_of(chain.state)


def test_a_rewind_within_the_copy_brings_nothing_over_the_link():
    chain, region = toy(12)
    source = FaultyStore(chain.store)
    with open_relay(source, region) as relay:
        relay.copy()
        chain.add_anchor(10)  # at the source only
        before = reads_of_data(source)
        chain.rewind(11)
        relay.copy()
        assert reads_of_data(source) == before
        assert bits_in(region) == bits_of(chain.states[11])


def test_a_mark_is_made_once_although_listings_leave_marks_out():
    chain, inner = toy(2)
    region = Forgetful(inner)
    region.hidden = (keys.MARKS,)
    for floor in (5, 9, 9, 7):
        raise_floor(region, chain.run, floor, epoch=1)
    assert region_floor(inner, chain.run) == 9
    assert len([*inner.list(keys.MARKS)]) == 2

"""Relays copy the moves of channels, byte for byte, each after the commit that it names."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from channelled_chain import ChannelledChain
from relayed_chain import open_relay, relay_once

from deltawire import Subscriber
from deltawire.errors import DeltawireError, NoChain, NoChannel, RelayConflict
from deltawire.events import Event
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, ProcessDied


def moves(store: MemoryStore, name: str = "stable") -> list[bytes]:
    return [store.get(info.key, limit=1 << 20) for info in store.list(f"{keys.CHANNELS}{name}/")]


def test_moves_are_copied_and_followed_in_the_region() -> None:
    chain, region = ChannelledChain(), MemoryStore("region")
    chain.promote(2)
    chain.promote(4, "canary", share=1000)
    with open_relay(chain.store, region, run="toy") as relay:
        relay.copy()
        with Subscriber(region, options=chain.options()) as follower:
            assert follower.sync().seq == 2
            chain.promote(5)
            chain.rollback()
            assert relay.copy_moves() == 2
            assert relay.copy_moves() == 0
            assert follower.sync().seq == 2
            chain.chain.grow(1)
            chain.promote(7)
            assert relay.copy_moves() == 0  # its commit is not in the region yet
            assert relay.copy() == 1
            assert follower.sync().seq == 7
    for name in ("stable", "canary"):
        assert moves(region, name) == moves(chain.store, name)
    relay_once(chain.store, region, run="toy")
    assert len(moves(region)) == 4


def test_a_move_that_readers_refuse_is_not_copied_and_stops_no_other_channel() -> None:
    chain, region = ChannelledChain(), MemoryStore("region")
    chain.promote(2)
    chain.promote(3, "canary")
    events: list[Event] = []
    with open_relay(chain.store, region, run="toy", on_event=events.append) as relay:
        relay.copy()
        chain.store.put(keys.channel_key("stable", 1), b"{}")
        chain.promote(4, "canary")
        assert relay.copy_moves() == 1
        assert relay.copy_moves() == 0
        assert [event.fields["channel"] for event in events if event.name == "channel-refused"] == ["stable"]
        assert len(moves(region)) == 1
        chain.store.delete([keys.channel_key("stable", 1)])
        chain.promote(5)
        assert relay.copy_moves() == 1
    assert moves(region) == moves(chain.store)


def test_another_move_in_the_region_is_a_conflict() -> None:
    chain, region = ChannelledChain(), MemoryStore("region")
    chain.promote(2)
    relay_once(chain.store, region, run="toy")
    chain.store.delete([keys.channel_key("stable", 0)])
    chain.promote(3)
    with pytest.raises(RelayConflict):
        relay_once(chain.store, region, run="toy")


def chain_with_late_checkpoint() -> ChannelledChain:
    """A chain whose copy begins with its last version, and a channel that names an earlier one."""
    chain = ChannelledChain()
    chain.chain.anchor(chain.state(6))
    for version in (1, 3, 5):
        chain.promote(version)
    return chain


def test_the_region_gets_the_versions_of_a_channel_before_its_moves() -> None:
    chain, region = chain_with_late_checkpoint(), MemoryStore("region")
    with open_relay(chain.store, region, run="toy", shortcuts="none") as relay:
        relay.copy()
        with Subscriber(region, options=chain.options()) as follower:
            assert follower.sync().seq == 5
        for version in (3, 1):
            chain.rollback()
            assert relay.copy_moves() == 1
            with Subscriber(region, options=chain.options()) as follower:  # a new one has no version to start from
                assert follower.sync().seq == version


def version_of_the_channel(chain: ChannelledChain, region: MemoryStore) -> int | None:
    """Return the version that a new follower of the region gets. None if there is no channel yet."""
    try:
        with Subscriber(region, options=chain.options()) as follower:
            return follower.sync().seq
    except (NoChain, NoChannel):
        return None


@pytest.mark.parametrize("at_target", [False, True], ids=["source", "target"])
def test_followers_get_what_the_channel_names_wherever_a_relay_fails(at_target: bool) -> None:
    chain = chain_with_late_checkpoint()
    seen = set()
    for number in itertools.count():
        region = MemoryStore("region")
        faulty = FaultyStore(region if at_target else chain.store, [Before(number, "crash")])
        with contextlib.suppress(ProcessDied, DeltawireError):
            relay_once(chain.store if at_target else faulty, faulty if at_target else region, run="toy", shortcuts="none")
        seen.add(version_of_the_channel(chain, region))
        relay_once(chain.store, region, run="toy", shortcuts="none")
        assert version_of_the_channel(chain, region) == 5
        if len(faulty.calls) <= number:
            break
    assert {None, 5} <= seen <= {None, 1, 3, 5}

"""Relays copy the moves of channels, byte for byte, each after the commit that it names."""

from __future__ import annotations

import pytest
from channelled_chain import ChannelledChain
from relayed_chain import open_relay, relay_once

from deltawire import Subscriber
from deltawire.errors import RelayConflict
from deltawire.events import Event
from deltawire.store import keys
from deltawire.store.memory import MemoryStore


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

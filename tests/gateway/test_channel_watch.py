"""The gateway's view of channels is right after the next look, whichever call of the store fails."""

from __future__ import annotations

import pytest
from channelled_chain import ChannelledChain

from deltawire.events import Event
from deltawire.gateway.channel_watch import ChannelWatch
from deltawire.testing.faulty_store import Before, FaultyStore


@pytest.mark.parametrize("move", [False, True])
def test_a_look_that_fails_at_any_call_is_made_good_by_the_next(move: bool) -> None:
    chain = ChannelledChain()
    for version in (1, 2, 4):
        chain.promote(version)
    failed = 0
    while True:
        store = FaultyStore(chain.store, [])
        watch = ChannelWatch(chain.log(store), ["stable"], "stable")
        if move:
            watch.look()
            chain.promote(3 if failed % 2 else 4)
        target = chain.reader().newest().target.seq
        faulty = FaultyStore(chain.store, [Before(failed, "unavailable")])
        for reader in watch._readers.values():
            reader.log.store = faulty
        watch.look()
        is_over = len(faulty.calls) <= failed
        watch.look()
        assert watch.rank("stable", target) == 0, failed
        assert watch.rank("stable", 5) is None
        if is_over:
            break
        failed += 1
    assert failed >= 2


def test_a_channel_that_does_not_exist_is_told_once_with_those_that_do() -> None:
    chain = ChannelledChain()
    for name in ("canary", "stable"):
        chain.promote(2, name)
    told: list[Event] = []
    watch = ChannelWatch(chain.log(chain.store), ["stabel"], "stabel", on_event=told.append)
    watch.look()
    watch.look()
    assert [event.name for event in told] == ["channel-unreadable"]
    assert str(told[0].fields["reason"]).startswith("--engine stabel=URL: the chain at ")
    assert "has no channel 'stabel'. It has canary, stable." in str(told[0].fields["reason"])

"""Collection keeps the versions that channels name, and those that rollbacks lead to, and nothing else below the floor."""

from __future__ import annotations

import dataclasses

import pytest
from hand_made_chain import HandMadeChain, trained_chain
from test_collect import GRACE, announce_and_collect, can_rebuild, data_of, stored_data

from deltawire.chain.channels import KEPT_TARGETS, ChannelReader, kept_targets
from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.maintenance.verify import verify
from deltawire.errors import UnsupportedVersion, VersionGone
from deltawire.publish.channels import ChannelWriter
from deltawire.store import keys


@pytest.fixture
def chain() -> HandMadeChain:
    """Return a chain of versions 1 to 13, with anchors of versions 1, 5, 9 and 12."""
    chain = trained_chain(12)
    for seq in (5, 9, 12):
        chain.anchor_shortcut(seq)
    return chain


def promote(chain: HandMadeChain, seq: int, name: str = "stable") -> None:
    ChannelWriter(ChainLog(chain.store), name).promote(chain.commits[seq])


def test_versions_on_channels_stay_with_what_leads_to_them(chain: HandMadeChain) -> None:
    promote(chain, 3)
    promote(chain, 7, "canary")
    _, collected = announce_and_collect(chain)
    assert (collected.outcome, collected.floor) == ("collected", 9)
    log = ChainLog(chain.store)
    assert all(can_rebuild(chain, seq) for seq in (3, 7, *range(9, 14)))
    below = [chain.commits[seq] for seq in (1, 2, 3, 6, 7)]
    needed = set().union(*map(data_of, [*below, *(chain.commits[seq] for seq in range(10, 14))]))
    needed |= set().union(*(data_of(log.shortcut(seq)) for seq in (5, 9, 12)))
    assert stored_data(chain) == needed
    assert chain.store.keys_under("anchor/") == [keys.anchor_key(seq) for seq in (5, 9, 12)]


def test_versions_of_rollbacks_stay_although_many_others_were_tried(chain: HandMadeChain) -> None:
    promote(chain, 2)
    promote(chain, 3)
    for seq in range(4, 13):
        promote(chain, seq)
        ChannelWriter(ChainLog(chain.store), "stable").rollback()
    assert kept_targets(ChainLog(chain.store)) == {2, 3}
    announce_and_collect(chain)
    assert ChannelWriter(ChainLog(chain.store), "stable").rollback().target.seq == 2
    assert can_rebuild(chain, 2)
    assert can_rebuild(chain, 3)


def test_only_the_last_targets_stay(chain: HandMadeChain) -> None:
    for seq in range(1, 10):
        promote(chain, seq)
    assert kept_targets(ChainLog(chain.store)) == set(range(10 - KEPT_TARGETS, 10))


def test_a_version_that_is_announced_for_collection_is_not_promoted(chain: HandMadeChain) -> None:
    promote(chain, 3)
    collect(chain.store, grace=GRACE)
    with pytest.raises(VersionGone):
        promote(chain, 4, "canary")
    promote(chain, 3, "canary")  # a channel keeps it
    promote(chain, 10, "canary")
    chain.store.pass_time(GRACE + 1)
    assert collect(chain.store, grace=GRACE).outcome == "collected"
    assert can_rebuild(chain, 3)


def test_bad_moves_hold_nothing_up_and_lose_nothing(chain: HandMadeChain) -> None:
    promote(chain, 3)
    promote(chain, 4)
    newest = ChannelReader(ChainLog(chain.store), "stable").newest()
    chain.store.put(keys.channel_key("stable", 2), b"{}")
    chain.store.put(keys.channel_key("other", 0), b"x" * 70_000)
    far = dataclasses.replace(newest.target, seq=10**9)
    chain.store.put(keys.channel_key("far", 0), dataclasses.replace(newest, channel="far", move=0, before=None, target=far).to_bytes())
    assert kept_targets(ChainLog(chain.store)) == {3, 4, 10**9}
    _, collected = announce_and_collect(chain)
    assert collected.outcome == "collected"
    assert can_rebuild(chain, 3)
    assert can_rebuild(chain, 4)


def test_a_channel_of_a_later_release_stops_collection(chain: HandMadeChain) -> None:
    promote(chain, 3)
    key = keys.channel_key("stable", 0)
    chain.store.put(key, chain.store.get(key, limit=1 << 20).replace(b'"version":1', b'"version":2'))
    before = stored_data(chain)
    with pytest.raises(UnsupportedVersion):
        announce_and_collect(chain)
    assert stored_data(chain) == before


def test_verify_says_which_channel_cannot_be_followed(chain: HandMadeChain) -> None:
    promote(chain, 3)
    promote(chain, 13, "canary")
    assert verify(chain.store).problems == []
    chain.store.put(keys.channel_key("canary", 1), b"{}")
    (problem,) = verify(chain.store).problems
    assert problem.where == "channel/canary"
    chain.store.delete([keys.channel_key("canary", 1), chain.commits[1].files[0].key])
    found = {problem.where: problem.what for problem in verify(chain.store).problems}
    assert "no new reader can get to version 3" in found["channel/stable"]
    assert "channel/canary" not in found

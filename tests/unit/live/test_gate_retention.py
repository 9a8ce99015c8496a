"""Evidence about earlier canaries is deleted when it is old, and only then."""

from __future__ import annotations

import pytest
from gated_chain import GatedChain

from deltawire.live.gate import GateOptions
from deltawire.store import live_keys
from deltawire.testing import Before, FaultyStore

DAY = 86400.0


def rolled_back() -> GatedChain:
    """A chain whose first canary, move 0, was rolled back."""
    chain = GatedChain()
    chain.traffic(0.2, 0.8, 120)
    chain.gate().look()
    assert chain.moves("canary") == [("promote", 3), ("rollback", 2)]
    return chain


@pytest.mark.parametrize(("days", "is_kept"), [(29, True), (31, False)])
def test_evidence_is_deleted_after_its_retention(days, is_kept):
    chain = rolled_back()
    chain.pass_time(days * DAY)
    chain.promote(4, "canary")
    chain.gate().look()
    assert bool(chain.records(move=0)) == is_kept
    assert len(chain.records(move=2)) == 1


def test_evidence_about_a_canary_that_is_watched_stays_however_old_it_is():
    chain = GatedChain()
    gate = chain.gate(retention=1.0)
    gate.look()
    chain.pass_time(500)
    chain.traffic(0.6, 0.6, 40)
    gate.look()
    chain.gate(retention=1.0).look()
    assert [record.number for record in chain.records(move=0)] == [0, 1, 2]


def test_a_dry_run_and_a_gate_without_a_canary_delete_nothing():
    chain = rolled_back()
    chain.pass_time(31 * DAY)
    assert chain.gate(retention=1.0).look().state == "idle"
    chain.promote(4, "canary")
    chain.gate(retention=1.0, dry_run=True).look()
    assert len(chain.records(move=0)) == 1


def test_other_channels_and_other_objects_are_left_alone():
    chain = rolled_back()
    others = [live_keys.gate_key("beta", 0, 0), live_keys.gates_of("canary") + "0000000000/note.txt"]
    for key in others:
        chain.store.put(key, b"{}")
    chain.pass_time(31 * DAY)
    chain.promote(4, "canary")
    chain.gate().look()
    left = [info.key for info in chain.store.list(live_keys.GATES)]
    assert left == sorted([*others, live_keys.gate_key("canary", 2, 0)])


def test_a_store_that_refuses_to_delete_does_not_stop_the_gate():
    chain = rolled_back()
    chain.pass_time(31 * DAY)
    chain.promote(4, "canary")
    chain.traffic(0.9, 0.4, 120, version=4)
    denied = FaultyStore(chain.store, [Before(lambda call: call.op == "delete", "unavailable")])
    look = chain.gate(store=denied).look()
    assert (look.state, look.moved.channel) == ("decided", "stable")
    assert [event.name for event in chain.events][-1] == "sweep-failed"
    assert len(chain.records(move=0)) == 1


def test_a_retention_of_nothing_is_refused():
    with pytest.raises(ValueError, match="retention"):
        GateOptions(retention=0.0)

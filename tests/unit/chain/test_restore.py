"""Routes through hand-made chains lead to the right states."""

import dataclasses

import numpy as np
import pytest
from hand_made_chain import RUN_ID, HandMadeChain, make_state, replaced, step, trained_chain
from support import bits_of

from deltawire import state_digest
from deltawire.chain.fetch import Fetcher
from deltawire.chain.log import ChainLog
from deltawire.chain.memory_state import MemoryState
from deltawire.chain.routes import restore
from deltawire.chain.routes.plan import Edge, plan
from deltawire.chain.routes.rebuild import rebuild, take_hop
from deltawire.chain.routes.restore import find_route
from deltawire.errors import ChainBroken, DataDamaged, DataMissing, RollbackDetected, VersionGone
from deltawire.format.records.collection_records import Mark
from deltawire.format.records.record_parts import FileEntry
from deltawire.store import keys


def route(chain, have, target=None, **options):
    log = ChainLog(chain.store)
    goal = chain.newest if target is None else chain.commits[target]
    return find_route(log, None if have is None else chain.ref(have), goal, **options)


def steps(hops):
    return [(hop.base, hop.target.seq, hop.source) for hop in hops]


def rebuilt(chain, target=None, state=None):
    state = state or MemoryState(threads=1)
    goal = chain.newest if target is None else chain.commits[target]
    rebuild(state, ChainLog(chain.store), Fetcher(chain.store, patience=0), goal)
    return state


def mark(chain, floor):
    chain.store.put_if_absent(keys.mark_key(0), Mark(RUN_ID, 0, 1, floor, "a" * 32, 1).to_bytes())


def cheap_shortcuts(chain):
    """Add skips to a chain. These states are so small that only the number of hops counts, so skips are always cheaper."""
    for base, target in [(1, 5), (5, 9), (9, 13), (1, 17), (13, 17)]:
        chain.skip(base, target)
    return chain


def test_a_reader_at_the_target_needs_no_hop():
    chain = trained_chain(3)
    assert route(chain, 4) == []
    with pytest.raises(RollbackDetected):
        find_route(ChainLog(chain.store), dataclasses.replace(chain.ref(4), commit="0" * 64), chain.commits[4])


def test_a_reader_near_the_target_reads_commits_and_lists_nothing():
    chain = trained_chain(8)
    chain.store.requests.clear()
    assert steps(route(chain, 6)) == [(6, 7, "commit"), (7, 8, "commit"), (8, 9, "commit")]
    assert not [key for op, key in chain.store.requests if op == "list"]


def test_a_joiner_begins_with_the_first_anchor():
    chain = trained_chain(3)
    assert steps(route(chain, None)) == [(None, 1, "anchor"), (1, 2, "commit"), (2, 3, "commit"), (3, 4, "commit")]


def test_a_joiner_begins_with_the_newest_anchor():
    chain = trained_chain(20)
    chain.anchor_shortcut(10)
    chain.anchor_shortcut(20)
    hops = route(chain, None)
    assert steps(hops) == [(None, 20, "anchor"), (20, 21, "commit")]
    assert len(hops[0].files) == 3


def test_a_joiner_finds_an_anchor_among_the_commits():
    chain = trained_chain(10)
    chain.anchor(make_state(7))
    chain.train(2)
    assert steps(route(chain, None)) == [(None, 12, "anchor"), (12, 13, "commit"), (13, 14, "commit")]
    assert steps(route(chain, 11)) == [(None, 12, "anchor"), (12, 13, "commit"), (13, 14, "commit")]


def test_a_laggard_takes_skips():
    chain = cheap_shortcuts(trained_chain(17))
    assert steps(route(chain, 1)) == [(1, 17, "skip"), (17, 18, "commit")]
    assert steps(route(chain, 4)) == [(4, 5, "commit"), (5, 9, "skip"), (9, 13, "skip"), (13, 17, "skip"), (17, 18, "commit")]


def test_a_long_route_of_uneven_deltas_is_planned_only_a_few_times(monkeypatch):
    chain = trained_chain(0)
    first = chain.commits[1]
    for seq in range(2, 202):
        key = keys.data_key(1, seq, f"{seq:064x}", "safetensors")
        file = FileEntry(key, 10 if seq % 3 else 10**9, 10, f"{seq:064x}", None, 0, 1)
        same = {"digest": first.digest, "state_bytes": first.state_bytes, "tensors": first.tensors, "changed": 1}
        chain.append("delta", base=chain.ref(seq - 1), state_seq=seq, updates=seq, files=(file,), **same)
    plans = []
    monkeypatch.setattr(restore, "plan", lambda *given: (plans.append(1), plan(*given))[1])
    log = ChainLog(chain.store)
    assert len(find_route(log, None, log.head())) == 201
    assert len(plans) < 12


def test_a_long_route_takes_few_requests():
    chain = HandMadeChain()
    chain.fence()
    chain.anchor(make_state())
    chain.train(129)
    for span in (4, 16, 64):
        for update in range(span, 130, span):
            chain.skip(1 + update - span, 1 + update)
    chain.store.requests.clear()
    hops = route(chain, 2)
    assert len(hops) <= 12
    assert len(chain.store.requests) <= 60


def test_through_fences_and_back():
    chain = trained_chain(1)
    chain.fence()
    chain.train(1)
    assert steps(route(chain, 2)) == [(2, 3, "fence"), (3, 4, "commit")]
    assert steps(route(chain, 3)) == [(3, 4, "commit")]
    assert steps(route(chain, 3, target=2)) == [(3, 2, "fence")]
    chain.skip(2, 4)
    assert steps(route(chain, None))[-1] in [(3, 4, "commit"), (2, 4, "skip")]


def test_after_a_rewind_the_abandoned_versions_are_not_passed_through():
    chain = trained_chain(4)
    chain.fence()
    chain.rewind(3)
    chain.train(1)
    assert steps(route(chain, 3)) == [(3, 7, "rewind"), (7, 8, "commit")]
    assert steps(route(chain, 5)) == [(None, 1, "anchor"), (1, 2, "commit"), (2, 3, "commit"), (3, 7, "rewind"), (7, 8, "commit")]
    undo = Edge(5, 3, 10, 0, "undo")
    assert steps(route(chain, 5, extra=[undo])) == [(5, 3, "undo"), (3, 7, "rewind"), (7, 8, "commit")]


def test_a_far_reader_of_an_abandoned_version_finds_a_route():
    chain = trained_chain(12)
    chain.anchor_shortcut(2)
    chain.anchor_shortcut(9)
    chain.fence()
    chain.rewind(4)
    chain.train(12)
    assert steps(route(chain, 13))[:4] == [(None, 2, "anchor"), (2, 3, "commit"), (3, 4, "commit"), (4, 15, "rewind")]
    assert bits_of(rebuilt(chain)) == bits_of(chain.states[chain.newest.seq])


def test_void_commits_are_no_part_of_a_route():
    chain = trained_chain(1)
    chain.fence()
    old = chain.commits[2]
    chain.append(
        "delta", epoch=1, base=chain.ref(2), state_seq=4, updates=3, digest=old.digest, state_bytes=old.state_bytes, tensors=old.tensors
    )
    chain.train(2)
    assert steps(route(chain, 2)) == [(2, 3, "fence"), (3, 5, "commit"), (5, 6, "commit")]
    assert bits_of(rebuilt(chain)) == bits_of(chain.states[6])


def test_a_shortcut_that_the_chain_does_not_bear_out_is_dropped():
    chain = trained_chain(12)
    chain.store.put(keys.anchor_key(9), b"garbage")
    wrong = dataclasses.replace(chain.anchor_shortcut(10), target=dataclasses.replace(chain.ref(10), commit="0" * 64))
    chain.store.put(keys.anchor_key(10), wrong.to_bytes())
    lying = dataclasses.replace(chain.anchor_shortcut(11), tensors=3)
    chain.store.put(keys.anchor_key(11), lying.to_bytes())
    assert steps(route(chain, None))[0] == (None, 1, "anchor")


def test_a_skip_from_another_base_is_dropped():
    chain = trained_chain(12)
    wrong = dataclasses.replace(chain.skip(1, 13), base=dataclasses.replace(chain.ref(1), commit="0" * 64))
    assert steps(route(chain, 1)) == [(1, 13, "skip")]
    chain.store.put(keys.skip_key(13, 1), wrong.to_bytes())
    assert len(route(chain, 1)) == 12


def test_a_base_that_is_not_in_the_chain_breaks_it():
    chain = trained_chain(2)
    base = dataclasses.replace(chain.ref(2), commit="0" * 64)
    chain.delta(step(chain.states[3], 9))
    changed = replaced(chain, 4, base=base)
    with pytest.raises(ChainBroken):
        find_route(ChainLog(chain.store), chain.ref(3), changed)


def test_data_marked_for_deletion_are_used_only_if_there_is_no_other_route():
    chain = trained_chain(14)
    chain.anchor_shortcut(3)
    chain.anchor_shortcut(8)
    mark(chain, 8)
    assert steps(route(chain, 4))[0] == (None, 8, "anchor")
    assert steps(route(chain, None, target=6))[0] == (None, 3, "anchor")


def test_without_finds_a_route_that_avoids_a_hop():
    chain = trained_chain(12)
    chain.anchor_shortcut(10)
    assert steps(route(chain, None, without={(None, 10, "anchor")}))[0] == (None, 1, "anchor")
    with pytest.raises(VersionGone):
        route(chain, None, without={(None, 10, "anchor"), (None, 1, "anchor")})


def test_a_reader_whose_version_leads_nowhere_starts_from_an_anchor():
    chain = trained_chain(12)
    chain.anchor_shortcut(3)
    chain.skip(4, 8)
    found = steps(route(chain, 5, without={(5, 6, "commit")}))
    assert found[:3] == [(None, 3, "anchor"), (3, 4, "commit"), (4, 8, "skip")]


@pytest.mark.parametrize("target", range(1, 8))
def test_rebuild_gives_every_version_bit_for_bit(target):
    chain = trained_chain(6)
    state = rebuilt(chain, target)
    assert bits_of(state) == bits_of(chain.states[target])
    assert state.commit == chain.commits[target]
    assert state.digest == state_digest(state)
    state.check()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_rebuild_of_a_delta_in_parts(parts):
    chain = trained_chain(0)
    chain.train(3, parts=parts)
    assert bits_of(rebuilt(chain)) == bits_of(chain.states[4])


def test_parts_that_are_left_out_are_unchanged():
    chain = trained_chain(0)
    new = step(chain.states[1], 2)
    files = [entry for entry in chain.delta_files(chain.states[1], new, 4) if entry.first % 2 == 0]
    chain._version("delta", new, files, base=chain.ref(1), changed=5)
    assert len(chain.newest.files) == 2
    assert bits_of(rebuilt(chain)) == bits_of(new)


def test_rebuild_replans_when_data_were_collected():
    chain = trained_chain(12)
    chain.anchor_shortcut(9)
    mark(chain, 9)
    have = rebuilt(chain, 5)
    chain.store.delete(entry.key for seq in range(1, 10) for entry in chain.commits[seq].files)
    assert bits_of(rebuilt(chain, state=have)) == bits_of(chain.states[13])
    with pytest.raises(VersionGone):
        rebuilt(chain, 7)


def test_rebuild_goes_round_a_damaged_shortcut():
    chain = cheap_shortcuts(trained_chain(17))
    entry = chain.anchor_shortcut(16).files[0]
    chain.store.put(entry.key, b"?" * entry.size)
    assert bits_of(rebuilt(chain)) == bits_of(chain.states[18])


def test_rebuild_names_damaged_or_missing_data_if_there_is_no_other_route():
    chain = trained_chain(3)
    entry = chain.commits[3].files[1]
    chain.store.put(entry.key, b"?" * entry.size)
    with pytest.raises(DataDamaged):
        rebuilt(chain)
    chain.store.delete([entry.key])
    with pytest.raises(DataMissing):
        rebuilt(chain)
    have = rebuilt(chain, 2)
    with pytest.raises(DataMissing):
        rebuilt(chain, state=have)
    assert bits_of(have) == bits_of(chain.states[2])


def test_rebuild_drops_a_state_that_is_not_what_it_should_be():
    chain = trained_chain(3)
    state = rebuilt(chain, 3)
    state.writable["model.norm"].view(np.uint16)[3] ^= 1
    assert bits_of(rebuilt(chain, state=state)) == bits_of(chain.states[4])


def test_take_hop_counts_seconds_by_phase():
    chain = trained_chain(1)
    fetcher = Fetcher(chain.store)
    state = MemoryState(threads=1)
    for hop in route(chain, None):
        take_hop(state, hop, ChainLog(chain.store), fetcher)
    assert set(fetcher.watch.seconds) == {"fetch", "verify", "wait", "digest", "resolve", "apply"}

"""A state in memory is always at exactly one version, before and after any failure."""

import dataclasses

import numpy as np
import pytest
from hand_made_chain import make_state, safetensors_bytes, trained_chain
from support import bits_of

from deltawire import encode_delta, state_digest
from deltawire.chain.fetch import Fetcher
from deltawire.chain.log import ChainLog
from deltawire.chain.memory_state import MemoryState
from deltawire.chain.routes.rebuild import rebuild
from deltawire.chain.routes.restore import Hop, find_route
from deltawire.errors import BaseMismatch, ChainBroken, CorruptDelta, DataDamaged, DeltawireError, LimitExceeded, ResultMismatch


@pytest.fixture
def chain():
    return trained_chain(2)


@pytest.fixture
def fetcher(chain):
    return Fetcher(chain.store, patience=0)


def state_at(chain, seq):
    state = MemoryState(threads=1)
    rebuild(state, ChainLog(chain.store), Fetcher(chain.store, patience=0), chain.commits[seq])
    return state


def next_hop(chain, seq):
    [hop] = find_route(ChainLog(chain.store), chain.ref(seq - 1), chain.commits[seq])
    return hop


def test_resolve_changes_nothing_and_apply_leads_to_the_version(chain, fetcher):
    state = state_at(chain, 2)
    update = state.resolve(next_hop(chain, 3), fetcher)
    assert bits_of(state) == bits_of(chain.states[2])
    state.apply(update, chain.commits[3])
    assert bits_of(state) == bits_of(chain.states[3])
    assert state.commit == chain.commits[3]


def test_undo_leads_back(chain, fetcher):
    state = state_at(chain, 2)
    update = state.resolve(next_hop(chain, 3), fetcher)
    undo = state.apply(update, chain.commits[3])
    assert undo.nbytes >= 6 * chain.commits[3].changed > 0
    state.undo(undo)
    assert bits_of(state) == bits_of(chain.states[2])
    assert state.commit == chain.commits[2]
    state.check()
    with pytest.raises(BaseMismatch):
        state.undo(undo)


def test_resolve_refuses_another_base(chain, fetcher):
    with pytest.raises(BaseMismatch):
        state_at(chain, 1).resolve(next_hop(chain, 3), fetcher)
    with pytest.raises(BaseMismatch):
        MemoryState().resolve(next_hop(chain, 3), fetcher)


def test_resolve_notices_a_rotten_state(chain, fetcher):
    state = state_at(chain, 2)
    for name in state:
        state.writable[name].reshape(-1).view(np.uint16)[0] ^= 1
    with pytest.raises(BaseMismatch):
        state.resolve(next_hop(chain, 3), fetcher)
    with pytest.raises(BaseMismatch):
        state.check()


def test_resolve_refuses_parts_that_do_not_add_up(chain, fetcher):
    hop = next_hop(chain, 3)
    state = state_at(chain, 2)
    with pytest.raises(ResultMismatch):
        state.resolve(dataclasses.replace(hop, files=hop.files[:1]), fetcher)
    with pytest.raises(DeltawireError):
        state.resolve(dataclasses.replace(hop, files=(hop.files[0], hop.files[0])), fetcher)
    assert bits_of(state) == bits_of(chain.states[2])


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 1), (2**62, 2**62), (None, None)])
def test_resolve_refuses_a_part_that_is_not_there(chain, fetcher, first, count):
    hop = next_hop(chain, 3)
    with pytest.raises(ChainBroken):
        state_at(chain, 2).resolve(dataclasses.replace(hop, files=(dataclasses.replace(hop.files[0], first=first, count=count),)), fetcher)


def test_resolve_refuses_a_delta_that_adds_tensors(chain, fetcher):
    grown = chain.states[3] | {"model.zzz": np.ones(3, np.float32)}
    entry = chain.upload(encode_delta(chain.states[3], grown), None, 1, 0, 4)
    target = dataclasses.replace(chain.commits[3], seq=4, digest=state_digest(grown))
    with pytest.raises(CorruptDelta):
        state_at(chain, 3).resolve(Hop(target, 3, (entry,), "commit", chain.commits[3].digest), fetcher)


def test_reading_is_read_only(chain):
    state = state_at(chain, 3)
    assert list(state) == sorted(chain.states[3])
    assert "model.norm" in state
    with pytest.raises(ValueError, match="read-only"):
        state["model.norm"][0] = 1
    state.clear()
    assert (len(state), state.commit, state.digest) == (0, None, None)


def test_relabel_needs_the_same_state(chain):
    chain.fence()
    state = state_at(chain, 3)
    state.relabel(chain.commits[4])
    assert state.commit.seq == 4
    with pytest.raises(BaseMismatch):
        state.relabel(chain.commits[2])


def test_load_anchor_keeps_the_old_state_until_all_is_well(chain, fetcher):
    state = state_at(chain, 2)
    other = make_state(5)
    files = chain.checkpoint_files(other)
    target = dataclasses.replace(chain.commits[1], seq=9, files=files, digest=state_digest(other))
    hop = Hop(target, None, files, "anchor")
    wrong = [
        (ResultMismatch, dataclasses.replace(target, digest=chain.commits[1].digest), files),
        (ResultMismatch, target, files[:1]),
        (LimitExceeded, dataclasses.replace(target, tensors=3), files),
        (DataDamaged, target, (files[0], files[0])),
        (DataDamaged, target, (dataclasses.replace(files[0], raw=files[0].raw + 1), files[1])),
        (DataDamaged, target, (chain.upload(b"not a safetensors file", "model.safetensors", 10),)),
    ]
    for error, goal, entries in wrong:
        with pytest.raises(error):
            state.load_anchor(dataclasses.replace(hop, target=goal, files=entries), fetcher)
        assert bits_of(state) == bits_of(chain.states[2])
        assert state.commit == chain.commits[2]
    state.load_anchor(hop, fetcher)
    assert bits_of(state) == bits_of(other)


def test_load_anchor_of_a_single_file_with_odd_shapes(chain, fetcher):
    odd = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.zeros((0, 4), np.float32),
        "c": np.float64(2.5).reshape(()),
        "d": np.ones(1, np.int16),
    }
    entry = chain.upload(safetensors_bytes(odd), "model.safetensors", sum(array.nbytes for array in odd.values()))
    target = dataclasses.replace(chain.commits[1], files=(entry,), digest=state_digest(odd), tensors=4)
    state = MemoryState(threads=1)
    state.load_anchor(Hop(target, None, (entry,), "anchor"), fetcher)
    assert bits_of(state) == bits_of(odd)
    assert all(array.flags.aligned for array in state.values())


def test_a_delta_without_files_is_a_version_with_the_same_state(chain, fetcher):
    chain._version("delta", chain.states[3], (), base=chain.ref(3))
    state = state_at(chain, 4)
    assert state.commit.seq == 4
    assert bits_of(state) == bits_of(chain.states[3])

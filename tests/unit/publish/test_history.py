"""The publisher keeps the right reverse deltas, and they lead back to the right versions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import bits_of, copied

import deltawire
from deltawire.format.records.record_parts import CommitRef
from deltawire.publish.baseline import Baseline
from deltawire.publish.history import History, HistoryDropped, Reverse

RANDOM = np.random.default_rng(3)


def ref(seq: int, state=None) -> CommitRef:
    return CommitRef(seq, f"{seq:064x}", deltawire.state_digest(state) if state else None)


def advance(history: History, versions: int, *, compose: bool = True) -> None:
    """Add this many versions with reverse deltas of one byte, and compose them as a baseline does."""
    for _ in range(versions):
        history.advance(ref(history.here.seq + 1), {0: b"x"}, 10)
        level = 1
        while compose and (parts := history.composable(level)):
            history.add_composed(Reverse(level, parts[0].end, parts[-1].base, parts[0].target, {0: b"x"}, 10))
            level += 1
        history.prune()


def test_few_reverse_deltas_wait_at_any_time():
    history = History(ref(0), 1000)
    for _ in range(300):
        advance(history, 1)
        assert history.size <= 3 * 5 + 1


@pytest.mark.parametrize(("position", "levels"), [(1, 0), (4, 1), (8, 1), (16, 2), (48, 2), (64, 3), (12, 1), (256, 4)])
def test_spans_are_the_powers_of_four_that_divide_the_position(position, levels):
    history = History(ref(0), 1000)
    advance(history, position - 1)
    history.advance(ref(position), {}, 0)
    found = 0
    while parts := history.composable(found + 1):
        found += 1
        assert (parts[0].end, parts[-1].start) == (position, position - 4**found)
        history.add_composed(Reverse(found, position, parts[-1].base, parts[0].target, {}, 0))
    assert found == levels


def test_a_held_version_stays_within_reach_and_costs_memory_only_while_held():
    history = History(ref(0), 1000)
    advance(history, 5)
    history.hold()
    advance(history, 30)
    way = history.deltas_back(5)
    assert (way[0].end, way[-1].start) == (35, 5)
    assert all(before.start == after.end for before, after in itertools.pairwise(way))
    assert len(way) < 30, "the route must use composed deltas where they fit"
    history.release(5)
    assert history.size <= 10
    with pytest.raises(HistoryDropped):
        history.deltas_back(5)


def test_what_a_composition_needs_stays_until_it_begins():
    """The thread of shortcuts may release an older version after a move, but before the compositions that are due there begin."""
    history = History(ref(1), 1 << 20)
    advance(history, 3)
    history.hold()
    held = history.here.seq
    advance(history, 1, compose=False)
    history.release(held)
    assert history.begin_composing() == 4
    assert history.composable(1) is not None


def test_changes_beyond_the_budget_are_forgotten_not_kept():
    history = History(ref(0), 10)
    history.hold()
    history.advance(ref(1), {0: b"x" * 8}, 0)
    assert len(history.deltas_back(0)) == 1
    history.advance(ref(2), {0: b"x" * 8}, 0)
    assert history.size == 0
    with pytest.raises(HistoryDropped):
        history.deltas_back(0)


def test_a_restart_forgets_everything():
    history = History(ref(0), 1000)
    history.hold()
    advance(history, 3)
    history.restart(ref(9))
    assert (history.position, history.size, history.held) == (0, 0, False)
    history.release(0)


def changed(state, share=0.02):
    new = copied(state)
    for array in new.values():
        bits = array.view(np.uint32).reshape(-1)
        bits[RANDOM.random(bits.size) < share] ^= 1 << 9
    return new


def moved(baseline: Baseline, state, seq: int, *, swap: bool, remember: bool = True):
    parts = range(len(baseline.segments))
    different = [i for i in parts if bits_of(baseline.part_of(state, i)) != bits_of(baseline.part(i))]
    digest = deltawire.state_digest(state)
    move = baseline.move_by_swap if swap else baseline.move_by_copy
    return move(copied(state) if swap else state, different, ref(seq, state), digest, 10**6, remember=remember)


def composed_now(baseline: Baseline):
    due = baseline.begin_composing()
    return [] if due is None else list(baseline.compose(due))


@pytest.mark.parametrize("swap", [False, True])
def test_segments_of_a_held_version_are_what_they_were(swap):
    states = [{name: RANDOM.standard_normal(500).astype(np.float32) for name in "abcd"}]
    baseline = Baseline(copied(states[0]), ref(0, states[0]), deltawire.state_digest(states[0]), segment_bytes=2000)
    assert len(baseline.segments) == 4
    for seq in range(1, 40):
        states.append(changed(states[-1]) | {"b": states[-1]["b"]})
        moved(baseline, states[-1], seq, swap=swap)
        for composed in composed_now(baseline):
            assert composed.versions in (4, 16)
            assert composed.forward is not None
            assert 1 not in composed.forward, "a segment that did not change has no delta"
            then = copied(states[composed.base.seq])
            for index, delta in composed.forward.items():
                deltawire.apply_delta({name: then[name] for name in baseline.part(index)}, delta)
            assert bits_of(then) == bits_of(states[seq])
        if seq == 7:
            baseline.hold()
    assert bits_of(baseline.arrays) == bits_of(states[-1])
    for index in range(4):
        part = baseline.segment_at(7, index)
        assert bits_of(part) == bits_of({name: states[7][name] for name in part})
    with pytest.raises(HistoryDropped):
        baseline.segment_at(8, 0)


def test_skips_of_held_versions_are_made_while_the_baseline_moves_on():
    """All are made late, in order: each is of its own version, and the history ends as if none had been late."""
    states = [{name: RANDOM.standard_normal(500).astype(np.float32) for name in "abcd"}]
    late, prompt = (Baseline(copied(states[0]), ref(0, states[0]), deltawire.state_digest(states[0]), segment_bytes=2000) for _ in range(2))
    waiting = []
    for seq in range(1, 20):
        states.append(changed(states[-1], 0.005))
        for baseline in (late, prompt):
            moved(baseline, states[-1], seq, swap=seq % 2 == 0)
        waiting.append(late.begin_composing())
        composed_now(prompt)
    found = [composed for due in waiting if due is not None for composed in late.compose(due)]
    assert [(composed.target.seq, composed.versions) for composed in found] == [(4, 4), (8, 4), (12, 4), (16, 4), (16, 16)]
    for composed in found:
        then = copied(states[composed.base.seq])
        assert composed.forward is not None
        for index, delta in composed.forward.items():
            deltawire.apply_delta({name: then[name] for name in late.part(index)}, delta)
        assert bits_of(then) == bits_of(states[composed.target.seq])
    late.begin_composing()
    assert late._history.size == prompt._history.size > 0


def test_skips_that_are_late_end_with_the_history_that_they_need():
    state = {"a": RANDOM.standard_normal(500).astype(np.float32)}
    baseline = Baseline(copied(state), ref(0, state), deltawire.state_digest(state))
    for seq in range(1, 5):
        state = changed(state)
        moved(baseline, state, seq, swap=False)
    due = baseline.begin_composing()
    assert due is not None
    other = {"b": np.zeros(3, np.float32)}
    baseline.replace(copied(other), ref(5, other), deltawire.state_digest(other))
    assert list(baseline.compose(due)) == []
    for seq in range(6, 10):  # the new history has four versions, too
        other = changed(other, 0.9)
        moved(baseline, other, seq, swap=False)
    assert list(baseline.compose(due)) == []
    assert [composed.target.seq for composed in composed_now(baseline)] == [9]


def test_reverse_deltas_take_a_small_part_of_the_state():
    state = {"w": RANDOM.standard_normal(200_000).astype(np.float32)}
    baseline = Baseline(copied(state), ref(0, state), deltawire.state_digest(state))
    for seq in range(1, 18):
        state = changed(state, 0.002)
        moved(baseline, state, seq, swap=False)
        composed_now(baseline)
        assert baseline._history.size < 0.05 * 800_000


def test_a_move_that_is_cut_off_leaves_a_mark(monkeypatch):
    state = {"a": np.zeros(10, np.float32), "b": np.zeros(10, np.float32)}
    baseline = Baseline(copied(state), ref(0, state), deltawire.state_digest(state), segment_bytes=1)
    new = {name: array + 1 for name, array in state.items()}

    class Interrupting(dict):
        def __getitem__(self, name):
            if name == "b":
                raise KeyboardInterrupt
            return super().__getitem__(name)

    with pytest.raises(KeyboardInterrupt):
        baseline.move_by_copy(Interrupting(new), [0, 1], ref(1, new), deltawire.state_digest(new), 0, remember=False)
    assert not baseline.intact
    baseline.replace(copied(new), ref(1, new), deltawire.state_digest(new))
    assert baseline.intact
    assert baseline.at == ref(1, new)


def test_without_memory_of_the_past_there_is_nothing_to_compose():
    state = {"a": np.zeros(100, np.float32)}
    baseline = Baseline(copied(state), ref(0, state), deltawire.state_digest(state))
    for seq in range(1, 9):
        state = changed(state, 0.5)
        moved(baseline, state, seq, swap=False, remember=False)
        assert composed_now(baseline) == []
    assert baseline._history.size == 0


def test_a_history_that_forgets_does_not_even_lead_to_the_newest_version():
    history = History(ref(0), 1000)
    advance(history, 5)
    history.hold()
    history.forget()
    for seq in (0, 4, 5):
        with pytest.raises(HistoryDropped):
            history.deltas_back(seq)
    history.release(5)

"""Test how far the undo log reaches back, and how much memory it may use."""

from __future__ import annotations

import pytest
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.memory_state import UpdateStep
from deltawire.delta.prepared import PreparedUpdate
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.undo import MOST_STEPS, UndoLog


@pytest.fixture
def chain() -> ToyChain:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    chain.grow(5)
    return chain


def step(chain: ToyChain, after: int) -> UpdateStep:
    """Return the step that leads from a version back to the previous one."""
    update = PreparedUpdate(threads=1)
    for entry in chain.commits[after].files:
        names = sorted(chain.states[after] or {})[entry.first : (entry.first or 0) + (entry.count or 0)]
        update.add({name: (chain.states[after - 1] or {})[name].copy() for name in names}, chain.store.get(entry.key, limit=entry.size))
    update.apply()
    return UpdateStep(chain.commits[after - 1], chain.commits[after], update)


def test_the_steps_back_is_found_by_the_state_it_leads_to(chain: ToyChain) -> None:
    log = UndoLog(1 << 20)
    steps = [step(chain, seq) for seq in (2, 3, 4)]
    for made in steps:
        log.push(made)
    here = chain.commits[4].digest
    assert log.steps_back(here, chain.commits[4]) is None
    assert log.steps_back(here, chain.commits[2]) == [steps[2], steps[1]]
    assert log.steps_back(here, chain.rewind(2)) == [steps[2], steps[1]]
    assert log.steps_back(here, chain.commits[5]) is None


def test_there_is_no_steps_back_over_a_gap(chain: ToyChain) -> None:
    log = UndoLog(1 << 20)
    steps = [step(chain, seq) for seq in (2, 3, 4)]
    for made in steps:
        log.push(made)
    assert log.steps_back(chain.commits[5].digest, chain.commits[2]) is None  # the log does not have the step from version 4 to 5
    steps[1].update.revert()  # the step is reverted, but the log still has it
    assert log.steps_back(chain.commits[4].digest, chain.commits[3]) == [steps[2]]
    assert log.steps_back(chain.commits[4].digest, chain.commits[2]) is None


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_ctrl_c_while_values_are_written_leaves_one_version_under_its_own_number(
    chain: ToyChain, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = PreparedUpdate._exchange

    def interrupted(update: PreparedUpdate) -> None:
        exchange(update)
        raise KeyboardInterrupt

    with Subscriber(chain.store, undo_bytes=1 << 20) as subscriber:
        for seq in (2, 3, 4):
            subscriber.sync(seq=seq)
        with monkeypatch.context() as patch:
            patch.setattr(PreparedUpdate, "_exchange", interrupted)
            with pytest.raises(KeyboardInterrupt):
                subscriber.sync(seq=5 if direction == "forth" else 2)
        for seq in (None, 2, 3, 5, 4):
            if seq is not None:
                subscriber.sync(seq=seq)
            assert subscriber.version is not None
            assert seq is None or subscriber.version.seq == seq
            assert bits_of(subscriber.state) == bits_of(chain.states[subscriber.version.seq] or {})


def test_the_oldest_steps_are_forgotten_first(chain: ToyChain) -> None:
    steps = [step(chain, seq) for seq in (2, 3, 4, 5)]
    log = UndoLog(steps[2].nbytes + steps[3].nbytes)
    for made in steps:
        log.push(made)
    assert len(log) == 2
    here = chain.commits[5].digest
    assert log.steps_back(here, chain.commits[3]) is not None
    assert log.steps_back(here, chain.commits[2]) is None


def test_without_a_budget_nothing_is_kept(chain: ToyChain) -> None:
    log = UndoLog(0)
    log.push(step(chain, 2))
    assert len(log) == 0
    with pytest.raises(ValueError, match="undo_bytes"):
        UndoLog(-1)


def test_there_is_a_most_number_of_steps(chain: ToyChain) -> None:
    log = UndoLog(1 << 30)
    for _ in range(MOST_STEPS + 5):
        log.push(UpdateStep(chain.commits[1], chain.commits[2], PreparedUpdate(threads=1)))
    assert len(log) == MOST_STEPS


def test_a_subscriber_without_undo_goes_back_by_the_store(chain: ToyChain) -> None:
    with Subscriber(chain.store, undo_bytes=0) as subscriber:
        for seq in (5, 2, 4):
            subscriber.sync(seq=seq)
            assert bits_of(subscriber.state) == bits_of(chain.states[seq] or {})

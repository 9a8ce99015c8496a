"""A gate that is killed or cut off at any call of its store: evidence comes before the move, and the move is made exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from gated_chain import GatedChain

from deltawire.errors import DeltawireError
from deltawire.store import keys, live_keys
from deltawire.testing import After, Before, FaultyStore, ProcessDied


def outcomes(chain: GatedChain) -> list[str]:
    return [record.outcome for record in chain.records()]


def check(chain: GatedChain, channel: str, moves: list[tuple[str, int]], decision: str) -> None:
    """Check what a gate has left, and that the next one finishes it and makes no second move."""
    if chain.moves(channel) == moves:
        assert outcomes(chain)[-1] == decision
    for _ in range(2):
        chain.gate().look()
    assert chain.moves(channel) == moves
    assert [outcome for outcome in outcomes(chain) if outcome != "continue"] == [decision]


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["crash", "unavailable", "unknown"])
@pytest.mark.parametrize(
    ("canary", "stable", "channel", "moves", "decision"),
    [
        (0.9, 0.4, "stable", [("promote", 2), ("promote", 3)], "promote"),
        (0.2, 0.8, "canary", [("promote", 3), ("rollback", 2)], "rollback"),
    ],
)
def test_a_gate_that_fails_at_any_call_moves_once(
    fault: Callable[..., Any], kind: str, canary: float, stable: float, channel: str, moves: list[tuple[str, int]], decision: str
) -> None:
    begun = GatedChain()
    begun.traffic(canary, stable, 120)
    for index in range(1000):
        chain = begun.copy()
        faulty = FaultyStore(chain.store, [fault(index, kind)])
        with contextlib.suppress(ProcessDied, DeltawireError):
            chain.gate(store=faulty).look()
        if len(faulty.calls) <= index:
            break
        check(chain, channel, moves, decision)
    assert index > 15


def test_evidence_is_written_before_the_move() -> None:
    chain = GatedChain()
    chain.traffic(0.9, 0.4, 120)
    before = len(chain.store.calls)
    chain.gate().look()
    created = [each.key for each in chain.store.calls[before:] if each.op == "put_if_absent"]
    assert created == [live_keys.gate_key("canary", 0, 0), keys.channel_key("stable", 1)]


def test_two_gates_between_whose_steps_the_other_runs_move_once() -> None:
    begun = GatedChain()
    begun.traffic(0.9, 0.4, 120)
    for index in range(1000):
        chain = begun.copy()
        first = Interrupted(chain.store, index, lambda chain=chain: chain.gate().look())  # type: ignore[misc]
        chain.gate(store=first).look()
        assert chain.moves("stable") == [("promote", 2), ("promote", 3)]
        assert outcomes(chain) == ["promote"]
        if len(first.calls) <= index:
            break
    assert index > 15


class Interrupted(FaultyStore):
    """Lets something else happen before a certain call."""

    def __init__(self, inner: Any, index: int, between: Callable[[], object]) -> None:
        super().__init__(inner)
        self._index = index
        self._between = between

    def _calling(self, op: str, key: str) -> Any:
        if len(self.calls) == self._index:
            self._between()
        return super()._calling(op, key)


def with_old_evidence() -> GatedChain:
    """A chain with a canary that a gate rolled back 31 days ago, and another one that is watched now."""
    chain = GatedChain()
    chain.gate().look()
    chain.traffic(0.2, 0.8, 120)
    chain.gate().look()
    chain.pass_time(31 * 86400)
    chain.promote(4, "canary")
    return chain


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["crash", "unavailable", "unknown"])
def test_a_gate_that_fails_at_any_call_keeps_the_evidence_that_counts(fault: Callable[..., Any], kind: str) -> None:
    begun = with_old_evidence()
    old = begun.records(move=0)
    assert [record.outcome for record in old] == ["continue", "rollback"]
    begun.traffic(0.9, 0.4, 120, version=4)
    for index in range(1000):
        chain = begun.copy()
        faulty = FaultyStore(chain.store, [fault(index, kind)])
        with contextlib.suppress(ProcessDied, DeltawireError):
            chain.gate(store=faulty).look()
        if len(faulty.calls) <= index:
            break
        assert chain.records(move=0) in (old, old[1:], [])
        for _ in range(2):
            chain.gate().look()
        assert [record.outcome for record in chain.records(move=2)] == ["promote"]
        assert chain.moves("stable") == [("promote", 2), ("promote", 4)]
        chain.promote(5, "canary")
        chain.gate().look()
        assert chain.records(move=0) == []
        assert len(chain.records(move=2)) == 1, "it is not old enough"
    assert index > 15

"""A gate's evidence is refused as a whole if a part of it breaks a rule."""

from __future__ import annotations

import dataclasses

import pytest
from record_samples import GATE

from deltawire.errors import CorruptRecord
from deltawire.format.records.gate_records import MOST_LIMITS, ChannelPosition, EvaluationResult


@pytest.mark.parametrize(
    "wrong",
    [
        {"outcome": "maybe"},
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"number": 10**10},
        {"why": "a\nb"},
        {"why": "x" * 1501},
        {"stable": GATE.canary},
        {"canary": ChannelPosition("can/ary", 4, GATE.canary.target)},
        {"canary": ChannelPosition("canary", 4, dataclasses.replace(GATE.canary.target, digest=None))},
        {"limits": GATE.limits * (MOST_LIMITS + 1)},
        {"limits": (dataclasses.replace(GATE.limits[0], verdict="perhaps"),)},
        {"limits": (dataclasses.replace(GATE.limits[0], low=float("nan")),)},
        {"limits": (dataclasses.replace(GATE.limits[0], must_hold=2),)},
        {"evaluation": EvaluationResult(True, 1, "", {"accuracy": float("inf")})},
        {"evaluation": EvaluationResult(True, 1, "", {str(number): 1.0 for number in range(65)})},
        {"evaluation": EvaluationResult(True, 1, "", {"x" * 101: 1.0})},
        {"evaluation": EvaluationResult(True, 1, "", {}, "ab")},
    ],
)
def test_a_wrong_part_spoils_the_record(wrong):
    with pytest.raises(CorruptRecord):
        dataclasses.replace(GATE, **wrong).to_bytes()


def test_a_record_without_an_evaluation_and_limits_is_sound():
    record = dataclasses.replace(GATE, evaluation=None, limits=(), outcome="continue")
    assert type(GATE).parse(record.to_bytes()) == record


def test_an_evaluation_of_an_older_gate_has_no_terms():
    data = GATE.to_bytes()
    assert b'"terms"' not in data
    assert type(GATE).parse(data) == GATE
    assert GATE.evaluation is not None
    newer = dataclasses.replace(GATE, evaluation=dataclasses.replace(GATE.evaluation, terms="ab" * 32))
    assert type(GATE).parse(newer.to_bytes()) == newer

"""The rules of the gate: limits, verdicts and decisions."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.errors import UnusableGate
from deltawire.format.records.gate_records import EvaluationResult, GroupMean, LimitFinding
from deltawire.live.gate_rules import GatePolicy, Limit, Range, decide, judge, parse_score
from deltawire.live.sequential_test import Sample

BETTER = Limit.parse("solved", must_hold=True)
LENGTH = Limit.parse("length:+20%", must_hold=False)
POLICY = GatePolicy((BETTER, LENGTH), min_answers=50)
UNIT = Range(0.0, 1.0)


def finding(limit=BETTER, verdict="open", canary=100, stable=100):
    return LimitFinding(limit.text, limit.must_hold, GroupMean(canary, 0.5), GroupMean(stable, 0.5), 40, -0.2, 0.2, verdict)


def samples(canary, stable, count=2000, seed=5):
    random = np.random.default_rng(seed)
    groups = random.random(count) < 0.5
    return [Sample(bool(group), float(random.random() < (canary if group else stable))) for group in groups]


def test_a_limit_says_on_which_side_the_canary_must_stay():
    assert Limit.parse("length:+20%", must_hold=False) == Limit("length:+20%", "length", True, 1.2, 0.0, False)
    assert Limit.parse("solved:-0.01", must_hold=True) == Limit("solved:-0.01", "solved", False, 1.0, -0.01, True)
    assert Limit.parse("solved", must_hold=True) == Limit("solved:-0", "solved", False, 1.0, -0.0, True)
    assert Limit.parse("app: time to edit:+0", must_hold=True).name == "app: time to edit"


@pytest.mark.parametrize("text", ["", ":+5%", "length", "length:-100%", "length:+10001%", "a\nb:+1", "x" * 101 + ":+1"])
def test_a_monitor_needs_a_limit_that_can_be_broken(text):
    with pytest.raises(UnusableGate):
        Limit.parse(text, must_hold=False)


@pytest.mark.parametrize("must_hold", [False, True])
@pytest.mark.parametrize("size", ["20%", "0.05", "0"])
def test_a_limit_without_a_sign_is_told_which_signs_there_are(size, must_hold):
    with pytest.raises(UnusableGate, match="has no sign") as raised:
        Limit.parse(f"length:{size}", must_hold=must_hold)
    assert f"length:+{size}" in raised.value.hint
    assert f"length:-{size}" in raised.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"limits": ()},
        {"limits": (LENGTH,)},
        {"limits": (BETTER, BETTER)},
        {"limits": tuple(Limit.parse(f"m{number}", must_hold=True) for number in range(33))},
        {"alpha": 0.0},
        {"alpha": 0.6},
        {"alpha": float("nan")},
        {"min_answers": 0},
        {"attempts": 0},
        {"min_seconds": 10.0, "max_seconds": 5.0},
        {"max_seconds": float("inf")},
    ],
)
def test_a_gate_that_cannot_decide_is_refused(wrong):
    with pytest.raises(UnusableGate):
        GatePolicy(**{"limits": (BETTER,), **wrong})


@pytest.mark.parametrize(("canary", "stable", "verdict"), [(0.7, 0.5, "holds"), (0.5, 0.5, "open"), (0.3, 0.5, "broken")])
def test_a_metric_holds_is_open_or_is_broken(canary, stable, verdict):
    found = judge(BETTER, samples(canary, stable), UNIT, POLICY)
    assert found.verdict == verdict
    assert found.canary.count + found.stable.count == 2000
    assert found.low < found.canary.mean - found.stable.mean < found.high


def test_an_upper_limit_is_broken_from_above():
    limit = Limit.parse("refusal:+0.1", must_hold=False)
    assert judge(limit, samples(0.4, 0.1), UNIT, GatePolicy((BETTER, limit))).verdict == "broken"
    assert judge(limit, samples(0.1, 0.1), UNIT, GatePolicy((BETTER, limit))).verdict == "holds"


@pytest.mark.parametrize(("canary", "verdict"), [(1.0, "holds"), (1.19, "open"), (1.8, "broken")])
def test_a_relative_limit_is_a_multiple_of_stable(canary, verdict):
    random = np.random.default_rng(6)
    groups = random.random(2000) < 0.5
    values = random.uniform(50, 150, 2000) * np.where(groups, canary, 1.0)
    lengths = [Sample(bool(group), float(value)) for group, value in zip(groups, values, strict=True)]
    assert judge(LENGTH, lengths, Range(0.0, 300.0), POLICY).verdict == verdict


def test_a_relative_limit_needs_values_that_are_not_negative():
    with pytest.raises(UnusableGate, match="negative"):
        judge(LENGTH, [], Range(-1.0, 1.0), POLICY)


def test_nothing_is_judged_before_there_are_enough_answers():
    assert judge(BETTER, samples(1.0, 0.0, 90), UNIT, GatePolicy((BETTER,), min_answers=60)).verdict == "open"
    assert judge(BETTER, samples(1.0, 0.0, 150), UNIT, GatePolicy((BETTER,), min_answers=60)).verdict == "holds"


def test_values_outside_of_the_range_count_as_its_nearest_end():
    wild = [Sample(each.is_canary, 1e9 if each.value else -1e9) for each in samples(0.7, 0.5)]
    tame = samples(0.7, 0.5)
    assert judge(BETTER, wild, UNIT, POLICY) == judge(BETTER, tame, UNIT, POLICY)


@pytest.mark.parametrize("values", [(1.0, 1.0), (2.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_has_two_ends(values):
    with pytest.raises(UnusableGate):
        Range(*values)


PASSED = EvaluationResult(True, 1, "it exited with 0", {"accuracy": 0.9})
REFUSED = EvaluationResult(False, 1, "it exited with 1")
UNFINISHED = EvaluationResult(None, 1, "it took more than 60 seconds")
WITH_EVALUATION = GatePolicy((BETTER, LENGTH), evaluate=True, max_seconds=1000.0, min_seconds=10.0)
HOLDS = [finding(verdict="holds"), finding(LENGTH)]


@pytest.mark.parametrize(
    ("findings", "evaluation", "answers", "age", "outcome"),
    [
        (HOLDS, PASSED, 100, 20.0, "promote"),
        ([finding(verdict="holds"), finding(LENGTH, "holds")], PASSED, 100, 20.0, "promote"),
        (HOLDS, None, 100, 20.0, "continue"),
        (HOLDS, UNFINISHED, 100, 20.0, "continue"),
        (HOLDS, PASSED, 99, 20.0, "continue"),
        (HOLDS, PASSED, 100, 9.0, "continue"),
        ([finding(), finding(LENGTH)], PASSED, 100, 20.0, "continue"),
        ([finding(), finding(LENGTH)], PASSED, 100, 1000.0, "rollback"),
        (HOLDS, PASSED, 100, 1000.0, "promote"),
        (HOLDS, REFUSED, 100, 20.0, "rollback"),
        (HOLDS, EvaluationResult(None, 3, "SIGKILL"), 100, 20.0, "rollback"),
        ([finding(verdict="holds"), finding(LENGTH, "broken")], PASSED, 100, 20.0, "rollback"),
        ([finding(verdict="broken"), finding(LENGTH)], None, 0, 0.0, "rollback"),
    ],
)
def test_a_decision_follows_from_the_evidence(findings, evaluation, answers, age, outcome):
    decision = decide(WITH_EVALUATION, findings, evaluation, answers, age)
    assert decision.outcome == outcome
    assert decision.why


def test_a_gate_with_an_evaluation_alone_needs_no_answers():
    assert decide(GatePolicy(evaluate=True), [], PASSED, 0, 0.0).outcome == "promote"


def test_a_monitor_needs_answers_before_the_evaluation_promotes():
    policy = GatePolicy((LENGTH,), evaluate=True)
    early = decide(policy, [finding(LENGTH)], PASSED, 99, 0.0)
    assert (early.outcome, early.why) == ("continue", "the canary has given 99 of 100 answers")
    assert decide(policy, [finding(LENGTH)], PASSED, 100, 0.0).outcome == "promote"


@pytest.mark.parametrize("must_hold", [False, True])
@pytest.mark.parametrize(("canary", "stable"), [(100, 99), (0, 100), (100, 0)])
def test_a_promotion_needs_answers_of_each_channel_for_each_limit(must_hold, canary, stable):
    limit = Limit.parse("bad_tool_calls:+0.1", must_hold=must_hold)
    found = [finding(limit, "holds", canary, stable)]
    policy = GatePolicy((limit,), evaluate=True)
    early = decide(policy, found, PASSED, 100, 0.0)
    told = f"bad_tool_calls:+0.1 needs 100 answers of each channel, and has {canary} of the canary and {stable} of stable"
    assert (early.outcome, early.why) == ("continue", told)
    assert decide(policy, found, PASSED, 100, 0.0, may_stay_empty=[limit.text]).outcome == "promote"


def test_an_evaluation_that_was_not_asked_for_decides_nothing():
    assert decide(POLICY, HOLDS, REFUSED, 60, 0.0).outcome == "promote"


def test_the_least_value_of_a_score():
    assert parse_score("pass@1:0.25") == ("pass@1", 0.25)
    assert parse_score("loss:-2") == ("loss", -2.0)
    for wrong in ("pass@1", ":1", "a:b", "a:1e5", "a\n:1"):
        with pytest.raises(UnusableGate):
            parse_score(wrong)


def test_a_reason_tells_means_apart_from_counts():
    found = LimitFinding(BETTER.text, True, GroupMean(30, 1.0), GroupMean(19, 0.125), 40, 0.1, 0.9, "holds")
    decision = decide(GatePolicy((BETTER,), min_answers=19), [found], None, 30, 0.0)
    assert decision.why == "solved:-0 holds: canary mean 1 (30 answers), stable mean 0.125 (19 answers)"

"""The mismatch of tokens, against numbers computed by hand, and the rule by which a member stands out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from deltawire.rl.mismatch import TokenMismatch, mismatch_groups
from deltawire.rl.mismatch_alarm import AlarmRule, MismatchAlarm, StandingOut, standing_out


def tokens(ratios: list[float], lags: list[int], rows: list[int], truncated: list[int] | None = None) -> TokenMismatch:
    return TokenMismatch(
        np.log(np.array(ratios)), np.array(truncated or [0] * len(ratios), bool), np.array(lags, np.int64), np.array(rows, np.int64)
    )


def test_the_numbers_are_those_of_the_formulas():
    found = tokens([0.5, 1.0, 2.0, 4.0], [0, 0, 1, 3], [0, 0, 1, 1], [0, 0, 0, 1]).measure()
    assert found is not None
    log2 = math.log(2)
    assert found.tokens == 4
    assert found.kl == pytest.approx(((0.5 + log2 - 1) + 0 + (2 - log2 - 1) + (4 - 2 * log2 - 1)) / 4)
    assert found.logp_difference_mean == pytest.approx((log2 + 0 + log2 + 2 * log2) / 4)
    assert found.logp_difference_max == pytest.approx(2 * log2)
    assert (found.ratio_min, found.ratio_mean, found.ratio_max) == pytest.approx((0.5, 7.5 / 4, 4.0))
    assert found.truncated_ratio == 0.25
    assert found.ess == pytest.approx(7.5**2 / (4 * (0.25 + 1 + 4 + 16)))
    assert found.lag == 1.0


def test_equal_policies_have_no_mismatch_and_a_full_sample():
    found = tokens([1.0, 1.0], [0, 0], [0, 0]).measure()
    assert found is not None
    assert (found.kl, found.logp_difference_max, found.ess) == (0, 0, 1)
    assert tokens([], [], []).measure() is None
    assert list(mismatch_groups(tokens([], [], []), (), {})) == []


def test_groups_hold_their_own_tokens():
    every = tokens([1.0, 2.0, 4.0, 8.0], [0, 1, 0, 1], [0, 0, 1, 2])
    members = ("far", "near", "near")
    groups = {(group.by, group.name): group.mismatch for group in mismatch_groups(every, members, {"near": "vllm"})}
    assert list(groups) == [("all", None), ("lag", "0"), ("lag", "1"), ("member", "far"), ("member", "near"), ("engine", "vllm")]
    assert groups["all", None].tokens == 4
    assert groups["lag", "0"].ratio_mean == pytest.approx(2.5)
    assert groups["lag", "1"].lag == 1
    assert groups["member", "far"].ratio_mean == pytest.approx(1.5)
    assert groups["member", "near"].ratio_max == pytest.approx(8)
    assert groups["engine", "vllm"] == groups["member", "near"]


RULE = AlarmRule(factor=10, least_kl=0.01, least_tokens=100, least_others=2)


def sums(**members: dict[int, tuple[int, float]]) -> Any:
    """Return tokens and KL per token, by member and lag."""
    return {(member, lag): (count, count * kl) for member, lags in members.items() for lag, (count, kl) in lags.items()}


def test_a_member_stands_out_from_the_median_of_the_others():
    found = standing_out(sums(a={0: (500, 0.001)}, b={0: (500, 0.002)}, bad={0: (500, 0.5)}, worse={0: (500, 0.9)}), RULE)
    assert [(one.member, one.tokens) for one in found] == [("bad", 500), ("worse", 500)]
    assert found[0].kl == pytest.approx(0.5)
    assert found[0].others == pytest.approx(0.002)  # the median of a, b and worse


@pytest.mark.parametrize(
    "harmless",
    [
        sums(a={0: (500, 0.0001)}, b={0: (500, 0.0001)}, c={0: (500, 0.009)}),  # less than the least KL
        sums(a={0: (500, 0.1)}, b={0: (500, 0.1)}, c={0: (500, 0.9)}),  # less than the factor
        sums(a={0: (500, 0.001)}, c={0: (500, 0.9)}),  # which of the two is broken?
        sums(a={0: (500, 0.001)}, b={0: (500, 0.001)}, c={0: (99, 0.9)}),  # too few tokens
        sums(a={0: (500, 0.001)}, b={0: (99, 0.001)}, c={0: (500, 0.9)}),  # too few tokens of the others
        sums(a={0: (500, 0.001)}, b={0: (500, 0.001)}, c={3: (500, 0.9)}),  # nobody else is as far behind
        sums(a={0: (500, 0.001), 3: (100, 0.5)}, b={0: (500, 0.001), 3: (100, 0.6)}, c={3: (500, 0.9)}),  # as others at that lag
        {},
    ],
)
def test_a_member_that_cannot_be_judged_or_is_like_the_others_does_not_stand_out(harmless: Any):
    assert standing_out(harmless, RULE) == []


def test_a_broken_member_stands_out_at_its_own_lag():
    found = standing_out(
        sums(a={0: (500, 0.001), 3: (100, 0.02)}, b={0: (500, 0.001), 3: (100, 0.03)}, c={0: (100, 0.001), 3: (300, 0.9)}), RULE
    )
    assert [one.member for one in found] == ["c"]
    assert found[0].kl == pytest.approx((100 * 0.001 + 300 * 0.9) / 400)
    assert found[0].others == pytest.approx((100 * 0.001 + 300 * 0.025) / 400)


def test_an_alarm_is_told_once_until_the_member_is_well_again():
    good, bad = [1.0] * 100, [3.0] * 100
    rows = [0] * 100 + [1] * 100 + [2] * 100
    members = ("a", "b", "c")
    alarm = MismatchAlarm(AlarmRule(least_tokens=50, steps=2))
    well, ill = tokens(good * 3, [0] * 300, rows), tokens(good * 2 + bad, [0] * 300, rows)
    assert alarm.note(well, members) == []
    assert alarm.note(ill, members) == [StandingOut("c", pytest.approx((2 - math.log(3)) / 2), 0.0, 200)]
    assert alarm.note(ill, members) == []
    assert alarm.note(well, members) == []  # the steps that count still include an ill one
    assert alarm.note(well, members) == []
    assert [one.member for one in alarm.note(ill, members)] == ["c"]
    alarm.forget("c")
    assert alarm.note(tokens(good * 2, [0] * 200, rows[:200]), members[:2]) == []


@pytest.mark.parametrize("bad", [{"factor": 1.0}, {"least_kl": math.nan}, {"least_tokens": 0}, {"least_others": 0}, {"steps": 0}])
def test_rules_that_make_no_sense_are_refused(bad: Any):
    with pytest.raises(ValueError, match=r"must be|at least"):
        AlarmRule(**bad)


def test_tiny_ratios_have_finite_numbers():
    many = np.array([-400.0, -400.0, -1000.0])
    found = TokenMismatch(many, np.zeros(3, bool), np.zeros(3, np.int64), np.zeros(3, np.int64)).measure()
    assert found is not None
    assert found.ess == pytest.approx(2 / 3)
    assert all(math.isfinite(each) for each in found.fields.values())

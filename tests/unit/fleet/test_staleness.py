"""One staleness budget decides what members may start, what is accepted, and how far ahead rounds are open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.fleet.rules.staleness import StalenessBudget

STEPS = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("budget", "for_step", "oldest"),
    [(0, 1, 0), (0, 7, 6), (1, 1, 0), (1, 7, 5), (3, 2, 0), (3, 10, 6)],
)
def test_a_step_may_use_versions_up_to_the_budget_behind_the_newest_before_it(budget: int, for_step: int, oldest: int) -> None:
    staleness = StalenessBudget(budget)
    assert staleness.oldest_step(for_step) == oldest
    assert staleness.admits(for_step, oldest)
    assert staleness.admits(for_step, for_step - 1)
    assert not staleness.admits(for_step, oldest - 1)
    assert not staleness.admits(for_step, for_step)


@pytest.mark.parametrize(("budget", "published", "newest"), [(0, 0, 1), (0, 5, 6), (1, 5, 7), (4, 0, 5)])
def test_rounds_are_open_only_for_steps_that_the_newest_version_can_serve(budget: int, published: int, newest: int) -> None:
    assert StalenessBudget(budget).newest_open(published) == newest


@given(st.integers(0, 20), STEPS)
def test_what_may_be_opened_can_be_accepted_if_it_is_made_now_and_nothing_beyond(budget: int, published: int) -> None:
    staleness = StalenessBudget(budget)
    newest = staleness.newest_open(published)
    assert staleness.admits(newest, published)
    assert not staleness.admits(newest + 1, published)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="below 0"):
        StalenessBudget(-1)

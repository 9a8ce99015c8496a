"""Live traffic in virtual time keeps its rules, and the judge notices when one of them is broken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltawire.fleet.rules import live_owners
from deltawire.fleet.steps import live_steps
from deltawire.live.rules import join as join_rules
from deltawire.live.rules import join_table
from deltawire.live.steps import joiner_steps
from deltawire.testing.live_simulation import simulate

SEEDS = range(24)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Trainers report faults as warnings, of which there are many."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_every_interaction_is_trained_on_once_with_its_reward() -> None:
    outcomes = [simulate(seed) for seed in SEEDS]
    assert [(one.seed, one.violation) for one in outcomes if one.violation is not None] == []
    assert sum(one.trained for one in outcomes) > 5 * len(outcomes)
    assert sum(one.trainers for one in outcomes) > len(outcomes)


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(5) == simulate(5)


def forget_what_was_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live_owners.LiveOwners, "owner", lambda self, item, inference, choice: None)
    patch.setattr(live_owners.LiveOwners, "allows", lambda self, row, step: True)


def sweep_rounds_without_a_list(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: Any, first_kept: int) -> Any:
        return
        yield

    patch.setattr(live_steps.LiveTasks, "before_sweep", nothing)


def ignore_consent(patch: pytest.MonkeyPatch) -> None:
    honest, make = joiner_steps.Interactions.parse, live_steps.live_rollouts

    def agreed(file: Any) -> Any:
        return replace(file, interactions=tuple(replace(one, train=True) for one in file.interactions))

    patch.setattr(joiner_steps.Interactions, "parse", classmethod(lambda cls, data: agreed(honest(data))))
    patch.setattr(live_steps, "live_rollouts", lambda row, file, record, task: make(row, agreed(file), record, task))


def end_windows_early(patch: pytest.MonkeyPatch) -> None:
    honest = join_rules.join
    patch.setattr(join_table, "join", lambda pending, metrics, given, now: honest(pending, metrics, given, now + 30.0))


def take_the_lowest_revision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(join_rules.StoredFeedback, "rank", property(lambda self: tuple(-part for part in self_rank(self))))


def self_rank(given: Any) -> tuple[int, float, int]:
    return given.feedback.revision, given.stored, given.index[1]


def trust_the_clocks_of_gateways(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(join_rules.StoredFeedback, "rank", property(lambda self: (self.feedback.revision, self.feedback.time, self.index)))


def count_late_feedback(patch: pytest.MonkeyPatch) -> None:
    honest = join_rules.counts
    patch.setattr(join_rules, "counts", lambda metric, pending, given: honest(metric, pending, replace(given, stored=0.0)))


def count_feedback_of_other_callers(patch: pytest.MonkeyPatch) -> None:
    honest = join_rules.counts

    def anybody(metric: Any, pending: Any, given: Any) -> bool:
        return honest(metric, pending, replace(given, feedback=replace(given.feedback, caller=None)))

    patch.setattr(join_rules, "counts", anybody)


def take_the_place_of_another_answer(patch: pytest.MonkeyPatch) -> None:
    honest = live_steps.live_rollouts

    def mixed_up(row: Any, file: Any, record: Any, task: int) -> Any:
        made = honest(row, file, record, task)
        if made is None or len(file.interactions) < 2:
            return made
        other = file.rollouts.completions[(row.index + 1) % len(file.interactions)]
        return replace(made, completions=(replace(made.completions[0], tokens=other.tokens),))

    patch.setattr(live_steps, "live_rollouts", mixed_up)


BREAKAGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "interactions are used again": (forget_what_was_used, "as step", 1),
    "nothing remembers what swept rounds used": (sweep_rounds_without_a_list, "as step", 48),
    "consent does not count": (ignore_consent, "without consent", 0),
    "windows end early": (end_windows_early, "instead of", 107),
    "an old revision counts": (take_the_lowest_revision, "instead of", 17),
    "the clock of a gateway counts": (trust_the_clocks_of_gateways, "instead of", 29),
    "late feedback counts": (count_late_feedback, "instead of", 0),
    "feedback of other callers counts": (count_feedback_of_other_callers, "instead of", 0),
    "an answer gets the tokens of another": (take_the_place_of_another_answer, "another answer", 0),
}
"""A function that breaks a rule, the violation, and a seed that has shown it. Other seeds are tried only if that one no longer does."""


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_simulation_finds_every_broken_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, expected, first = BREAKAGES[name]
    breaks(monkeypatch)
    found = next((outcome.violation for seed in (first, *range(60)) if (outcome := simulate(seed)).violation is not None), None)
    assert found is not None
    assert expected in found

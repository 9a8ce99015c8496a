"""The sequential test: its errors stay below alpha however often the gate looks, and it finds differences. All draws are seeded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deltawire.live.sequential_test import Sample, confidence_interval, log_wealth, make_blocks

ALPHA = 0.1
RUNS = 200


def answers(random, count, canary, stable, share=0.5):
    """Return answers that are right with the probability of their group."""
    groups = random.random(count) < share
    right = random.random(count) < np.where(groups, canary, stable)
    return [Sample(bool(group), float(value)) for group, value in zip(groups, right, strict=True)]


def ever(differences, reaches, every=4):
    """Tell whether a test that looks after every few blocks is ever passed."""
    return any(reaches(differences[:end]) for end in range(8, len(differences) + 1, every))


def refuted(differences):
    """Tell whether "the canary is not better" is refuted."""
    return log_wealth(differences, 0.0, 2.0) >= math.log(1 / ALPHA)


def naively_refuted(differences):
    """Tell whether a t-test for one look, with the quantile of the normal distribution, refutes the same."""
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return bool(differences.mean() > 1.2816 * error)


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("chance", [0.5, 0.05])
def test_equal_canaries_are_seldom_called_better(share, chance):
    random = np.random.default_rng(19)
    runs = [make_blocks(answers(random, 600, chance, chance, share)).differences for _ in range(RUNS)]
    found = sum(ever(run, refuted) for run in runs)
    naive = sum(ever(run, naively_refuted) for run in runs)
    assert found <= ALPHA * RUNS
    assert naive > 1.5 * ALPHA * RUNS, "the same looks at a test for one look have far more errors"


def test_a_drift_that_both_groups_have_is_no_difference():
    random = np.random.default_rng(20)
    found = 0
    for _ in range(RUNS):
        groups = random.random(600) < 0.2
        right = random.random(600) < np.linspace(0.2, 0.8, 600)
        samples = [Sample(bool(group), float(value)) for group, value in zip(groups, right, strict=True)]
        found += ever(make_blocks(samples).differences, refuted)
    assert found <= ALPHA * RUNS


@pytest.mark.parametrize(("share", "count"), [(0.5, 1000), (0.1, 2600)])
def test_a_better_canary_is_found(share, count):
    random = np.random.default_rng(21)
    runs = [make_blocks(answers(random, count, 0.65, 0.5, share)).differences for _ in range(50)]
    assert sum(ever(run, refuted, 20) for run in runs) >= 45


def test_the_interval_holds_the_difference_and_shrinks():
    random = np.random.default_rng(22)
    blocks = make_blocks(answers(random, 20_000, 0.6, 0.5))
    sizes = []
    for count in (50, 500, 5000):
        interval = confidence_interval(blocks.differences[:count], -1.0, 1.0, 0.05)
        assert -1.0 <= interval.low < 0.1 < interval.high <= 1.0
        sizes.append(interval.high - interval.low)
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]


def test_no_answers_refute_nothing():
    interval = confidence_interval(np.array([]), -1.2, 1.0, 0.05)
    assert interval.low == -1.2
    assert interval.high == 1.0


def test_the_most_extreme_differences_ruin_nobody():
    for value in (-1.0, 1.0):
        interval = confidence_interval(np.full(5000, value), -1.0, 1.0, 0.05)
        assert interval.low <= value <= interval.high
        assert interval.high - interval.low < 0.01


def test_a_block_ends_with_its_first_answer_of_the_other_group():
    canary, stable = True, False
    samples = [(stable, 0.0), (stable, 1.0), (canary, 1.0), (canary, 0.5), (stable, 0.25), (stable, 0.75)]
    blocks = make_blocks([Sample(*each) for each in samples], factor=2.0)
    assert blocks.differences.tolist() == [1.0 - 2 * 0.5, 0.5 - 2 * 0.25]
    assert (blocks.canary.count, blocks.stable.count) == (2, 4)
    assert (blocks.canary.mean, blocks.stable.mean) == (0.75, 0.5)

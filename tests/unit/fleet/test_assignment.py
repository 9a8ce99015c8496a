"""Test how work is divided by weight and rounded to whole tasks: sums, levels and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.fleet.rules.assignment import divide_work, largest_remainders

WEIGHTS = st.floats(1e-3, 1e3)
MEMBERS = st.lists(st.tuples(WEIGHTS, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("total", "weights", "held", "rooms", "shares"),
    [
        (10, [1, 1], [0, 0], [9, 9], [5, 5]),
        (10, [4, 1], [0, 0], [99, 99], [8, 2]),
        (6, [1, 1], [4, 0], [99, 99], [1, 5]),
        (3, [1, 1], [4, 0], [99, 99], [0, 3]),
        (10, [1, 1, 1], [0, 0, 0], [1, 99, 99], [1, 4.5, 4.5]),
        (10, [1, 1], [0, 0], [2, 3], [2, 3]),
        (5, [1, 1], [0, 0], [0, 9], [0, 5]),
        (5, [1], [0], [0], [0]),
    ],
)
def test_work_is_divided_by_weight(total: int, weights: list[float], held: list[float], rooms: list[float], shares: list[float]) -> None:
    assert divide_work(total, weights, held, rooms) == pytest.approx(shares)


@given(st.integers(0, 200), MEMBERS)
def test_all_work_that_fits_is_given_out_and_no_other_member_has_less_per_weight(total: int, members: list[tuple[float, int, int]]) -> None:
    weights, held, rooms = ([float(one[i]) for one in members] for i in range(3))
    shares = divide_work(total, weights, held, rooms)
    assert sum(shares) == pytest.approx(min(total, sum(rooms)), abs=1e-6)
    assert all(0 <= x <= room for x, room in zip(shares, rooms, strict=True))
    heights = [(h + x) / w for w, h, x in zip(weights, held, shares, strict=True)]
    highest = max((height for height, x in zip(heights, shares, strict=True) if x > 1e-6), default=0.0)
    for height, x, room in zip(heights, shares, rooms, strict=True):
        assert x > room - 1e-6 or height >= highest - 1e-6 * max(1.0, highest)


@given(st.integers(0, 500), st.lists(WEIGHTS, min_size=1, max_size=12))
def test_whole_shares_sum_up_and_are_within_one_task_of_the_exact_ones(total: int, weights: list[float]) -> None:
    wanted = [total * weight / sum(weights) for weight in weights]
    counts = largest_remainders(total, wanted)
    assert sum(counts) == total
    assert all(abs(count - exact) < 1 + 1e-6 for count, exact in zip(counts, wanted, strict=True))


def test_leftover_tasks_go_to_the_largest_remainders() -> None:
    assert largest_remainders(10, [3.2, 3.9, 2.9]) == [3, 4, 3]
    assert largest_remainders(2, [0.5, 0.5, 1.0]) == [1, 0, 1]

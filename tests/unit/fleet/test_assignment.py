"""Test how work is divided by weight and rounded to whole tasks: sums, levels and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.fleet.rules.assignment import divide_tasks, divide_work

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


@given(st.integers(0, 200), MEMBERS)
def test_whole_tasks_are_divided_so_that_the_last_is_done_as_early_as_possible(total: int, members: list[tuple[float, int, int]]) -> None:
    weights, held, rooms = ([float(one[i]) for one in members] for i in range(3))
    counts = divide_tasks(total, weights, held, rooms)
    assert sum(counts) == min(total, sum(rooms))
    assert all(0 <= count <= room for count, room in zip(counts, rooms, strict=True))
    last = max(((h + x) / w for w, h, x in zip(weights, held, counts, strict=True) if x), default=0.0)
    for weight, before, count, room in zip(weights, held, counts, rooms, strict=True):
        assert count == room or (before + count + 1) / weight >= last * (1 - 1e-9)  # it could not have done the last task earlier


def test_ties_go_to_the_first_member() -> None:
    assert divide_tasks(5, [1, 1], [0, 0], [9, 9]) == [3, 2]
    assert divide_tasks(3, [1, 4], [0, 0], [9, 9]) == [0, 3]

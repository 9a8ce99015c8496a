"""The fleet in virtual time, which calls the real scheduler, agrees with the formula of `step_seconds`."""

from __future__ import annotations

import pytest

from deltawire.planning.fleet_model import SimulatedFleet, simulate
from deltawire.planning.fleet_shape import FleetShape, step_seconds
from deltawire.planning.link_model import Link
from deltawire.planning.network import Arrival, Region

LINK = Link(1e9, 0.08)


def arrival(behind: float, link_seconds: float = 1.0, members: int = 8) -> Arrival:
    return Arrival(Region(f"r{behind}", LINK, members), behind, link_seconds, 1e6)


@pytest.mark.parametrize(
    ("staleness", "train", "behind"),
    [(1, 30, 5), (1, 30, 60), (1, 10, 200), (0, 30, 5), (0, 30, 100), (2, 30, 100), (2, 100, 5), (3, 0, 300)],
)
def test_it_agrees_with_the_formula(staleness: int, train: float, behind: float) -> None:
    shape = FleetShape(generate_seconds=60, train_seconds=train, staleness=staleness)
    arriving = [arrival(behind)]
    assert simulate(shape, arriving).step_seconds == pytest.approx(step_seconds(shape, arriving), rel=0.1)


@pytest.mark.parametrize(("staleness", "seconds"), [(1, 8000), (2, 8000 * 2 / 3), (4, 8000 * 2 / 5)])
def test_two_versions_cross_a_slow_link_for_each_burst_of_steps(staleness: int, seconds: float) -> None:
    shape = FleetShape(generate_seconds=60, train_seconds=30, staleness=staleness)
    arriving = [arrival(8002, link_seconds=8000)]
    assert simulate(shape, arriving).step_seconds == pytest.approx(seconds, rel=0.02)
    assert step_seconds(shape, arriving) == pytest.approx(seconds, rel=0.02)


def test_it_is_the_same_for_the_same_seed() -> None:
    shape = FleetShape()
    assert simulate(shape, [arrival(5)], seed=3) == simulate(shape, [arrival(5)], seed=3) != simulate(shape, [arrival(5)], seed=4)


def test_members_work_nearly_all_the_time_if_versions_come_in_time() -> None:
    found = simulate(FleetShape(generate_seconds=60, train_seconds=20, staleness=1), [arrival(2), arrival(5)])
    assert found.idle_share < 0.1
    assert isinstance(found, SimulatedFleet)


def test_nobody_waits_for_a_region_that_is_late() -> None:
    shape = FleetShape(generate_seconds=60, train_seconds=0, staleness=1)
    near, far = arrival(1), arrival(1e6, 1e6)
    assert simulate(shape, [near, far]).step_seconds == pytest.approx(120, rel=0.1)


def test_large_fleets_are_modelled_by_fewer_members() -> None:
    shape = FleetShape()
    found = simulate(shape, [arrival(5, members=9_000), arrival(6, members=1_000)])
    assert found.members == 32
    assert found.step_seconds == pytest.approx(simulate(shape, [arrival(5, members=29), arrival(6, members=3)]).step_seconds, rel=0.05)

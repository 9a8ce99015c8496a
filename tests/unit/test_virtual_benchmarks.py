"""The benchmarks of fleets in virtual time run, and no fleet is faster than is possible."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fleet_compare
import fleet_coordination
import fleet_links
import rl_profile

from deltawire.store.memory import MemoryStore
from deltawire.testing.fleet_simulation.profile import GENERATING


@pytest.mark.parametrize(("staleness", "result_bytes", "speed"), [(0, 1e6, 1.0), (1, 1e6, 1.0), (1, 40e6, 1.0), (2, 1e6, 0.5)])
def test_no_fleet_behind_a_slow_link_is_faster_than_any_scheduler_can_be(staleness: int, result_bytes: float, speed: float) -> None:
    settings = {"staleness": staleness, "result_bytes": result_bytes, "speed": speed, "steps": 5}
    least = fleet_links.least_seconds(**settings)
    taken = fleet_links.seconds_per_step(0, fleet_links.WAYS["speed and links"], **settings)
    assert least < taken < 2 * least


def test_a_version_that_arrives_late_leaves_less_time_than_a_fleet_that_never_waits() -> None:
    """By hand: 12 P + 4 (2 P − 34) = 480 for a long run with staleness 1, if tasks could be divided; they cannot, which costs more."""
    divided = (480 + 4 * 34) / 20
    assert divided < fleet_links.least_seconds(1, 1e6, 1.0, steps=1000) < divided + 1


def test_the_profiles_of_rl_runs_and_the_costs_of_fleets_can_be_computed() -> None:
    assert 0.5 < rl_profile.run((600, 600), 6, steps=10).share < 1
    world, profile = fleet_coordination.over_a_wan(2)
    assert world.oracle.accepted == 2 * fleet_coordination.TASKS_EACH * fleet_coordination.STEPS
    assert 0.8 < profile.shares()[GENERATING] < 1
    for round_trip in (0.1, 0):
        requests, at_work = fleet_compare.compare(2, 2, 0, fleet_compare.engine_of(None), round_trip)
        assert requests > 10
        assert 0.5 < at_work < 1


def test_a_fleet_in_one_thread_over_a_real_store_ends() -> None:
    """Members read the board with `Watch`, which the benchmark must answer itself: there is nothing to wait for in one thread."""
    assert fleet_coordination.leases_per_second(2, MemoryStore()) > 0

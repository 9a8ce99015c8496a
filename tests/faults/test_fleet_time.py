"""Clocks in a fleet: the store's clock is set forward or back, and objects have wrong times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from small_fleet import LEASE, Fleet, assert_one_line_of_training, make_rollouts, place_lease, rows_for, upload_result
from test_fleet_members import LAST, claimed, offers, poll

from deltawire.fleet.rules.fleet_clock import FleetClock
from deltawire.fleet.steps.member_state import write_heartbeat
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.format.records.member_records import Lease
from deltawire.format.records.trainer_records import Round
from deltawire.store import fleet_keys
from deltawire.testing import FaultyStore

YEAR = 3.2e7
STEPS = [-YEAR, -3600.0, -30.0, 30.0, 3600.0, YEAR]


class Stepped(Fleet):
    """A fleet whose store has a clock that is `ahead` seconds wrong. `time` is the true time, which the trainer's own clock measures."""

    ahead = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.store = FaultyStore(self.inner, clock=lambda: datetime.fromtimestamp(self.time + self.ahead, timezone.utc))

    def misdated(self, seconds: float, write: Callable[[], object]) -> None:
        """Write an object with a wrong date, as any process can if it may write to the directory."""
        self.ahead += seconds
        write()
        self.ahead -= seconds


@pytest.mark.parametrize("seconds", [YEAR, -YEAR, 50 * YEAR])
def test_heartbeats_with_wrong_dates_do_not_stop_a_fleet(seconds: float) -> None:
    fleet = Stepped()
    member = fleet.join("honest", "dead")[1]
    fleet.members.remove(member)
    fleet.misdated(seconds, lambda: fleet.store.put(fleet_keys.member_key("junk"), b"{}"))
    fleet.misdated(seconds, lambda: member.perform_all(write_heartbeat(member.state)))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(LAST)
        trainer.open(LAST + 1)
        for _ in range(10):
            fleet.sleep(LEASE / 8)
            poll(fleet, trainer)
        alive = [one.member for one in trainer.steps.members() if one.alive]
    assert_one_line_of_training(fleet.inner, LAST)
    assert alive == ["honest"]


def test_a_lease_with_a_date_in_the_future_expires_like_any_other() -> None:
    fleet = Stepped()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        made: list[Round] = [trainer.open(1, tasks=1)]
        poll(fleet, trainer)
        fleet.misdated(YEAR, lambda: place_lease(fleet, made[0], member="silent"))
        other = fleet.join("other")[0]
        fleet.members.clear()
        for _ in range(10):
            other.perform_all(write_heartbeat(other.state))
            poll(fleet, trainer, LEASE / 8)
        assert offers(fleet) == {"other": [(0, 1)]}


@pytest.mark.parametrize("seconds", STEPS)
def test_a_fleet_continues_when_the_store_s_clock_is_set(seconds: float) -> None:
    """The clock is set once in each run, during a different sleep of the trainer each time."""
    moment = 0
    while True:
        fleet = Stepped()
        fleet.join("a", "b")
        left = [moment]

        def meanwhile(fleet: Stepped = fleet, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                fleet.ahead += seconds

        fleet.meanwhile = meanwhile
        with fleet.publisher() as publisher:
            fleet.trainer(publisher).run_to(LAST)
        assert_one_line_of_training(fleet.inner, LAST)
        if left[0] >= 0:  # the run has fewer sleeps than this
            break
        moment += 1
    assert moment >= 1


@pytest.mark.parametrize("seconds", STEPS)
def test_a_silent_member_loses_its_lease_and_a_heard_one_keeps_it_when_the_store_s_clock_is_set(seconds: float) -> None:
    fleet = Stepped()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1, tasks=2)
        silent, heard = claimed(fleet, trainer, "silent", 0), claimed(fleet, trainer, "heard", 1)
        other = fleet.join("other")[0]
        fleet.members.clear()
        poll(fleet, trainer)
        fleet.ahead += seconds
        for turn in range(8):
            for member in (heard, other):
                member.perform_all(write_heartbeat(member.state))
            poll(fleet, trainer, LEASE / 8 + 0.1)
            assert offers(fleet) == ({} if turn < 7 else {"other": [(0, 1)]}), turn
        assert silent.state.working


@pytest.mark.parametrize("seconds", STEPS)
def test_a_trainer_that_finds_leases_with_wrong_dates_still_offers_the_task_of_a_late_member_to_others(seconds: float) -> None:
    """The clock is set while members hold leases, and another trainer takes over. One member delivers, and the other one never does."""
    fleet = Stepped()
    with fleet.publisher() as publisher:
        first = fleet.trainer(publisher)
        record = first.open(1, tasks=3)
        hog, other = claimed(fleet, first, "hog", 0), claimed(fleet, first, "other", 1)
        leases = [place_lease(fleet, record, 2, member="other"), claimed_lease(fleet, record, 1)]
    fleet.ahead += seconds
    with fleet.publisher() as publisher:
        second = fleet.trainer(publisher)
        second.go(second.steps.resume())
        poll(fleet, second, 5)
        for lease in leases:
            fleet.time += 5
            made = make_rollouts(record, lease, rows_for(1)[0], second.steps.newest)
            upload_result(fleet, record, lease, made)
        other.state.working.clear()
        offered: list[dict[str, list[tuple[int, int]]]] = []
        for _ in range(30):
            for member in (hog, other):
                member.perform_all(write_heartbeat(member.state))
            poll(fleet, second, 5)
            offered.append(offers(fleet))
        assert {"other": [(0, 1)]} in offered
        assert [task.accepted is not None for task in second.steps.rounds[1].tasks] == [False, True, True]
        assert second.steps.scheduler.expected_seconds("other") is None  # the trainer did not see how long its tasks took


def claimed_lease(fleet: Fleet, record: Round, task: int) -> Lease:
    return Lease.parse(fleet.inner.get(fleet_keys.lease_key(AttemptId(record.round, task, 0)), limit=9999))


def test_the_age_of_an_object_is_bounded_by_what_the_trainer_saw() -> None:
    time = [100.0]
    clock = FleetClock(lambda: time[0])
    clock.looked(clock.begin())
    assert clock.since(5e9) == clock.since(-5e9) == 100.0  # the trainer knows nothing about the store's clock yet
    clock.wrote(5000.0, 100.0)
    assert clock.since(4990.0) == 90.0  # an object that is seen for the first time is as old as the store says
    assert clock.since(5010.0) == 100.0
    time[0] = 110.0
    began = clock.begin()
    time[0] = 111.0
    clock.looked(began)
    assert [clock.since(each) for each in (0.0, 4990.0, 5005.0, 5011.0, 9e9)] == [100.0, 100.0, 105.0, 111.0, 111.0]
    clock.wrote(0.0, 111.0)  # the store's clock was set back
    time[0] = 120.0
    clock.looked(clock.begin())
    assert [clock.since(each) for each in (0.0, 5.0, 5020.0, -9e9)] == [111.0, 116.0, 120.0, 110.0]

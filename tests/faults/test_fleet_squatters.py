"""Members take leases that they were not offered. They may waste work, but they must not end a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_fleet import LEASE, Fleet, assert_one_line_of_training, make_rollouts, nonce, place_lease, rows_for, upload_result
from test_fleet_members import LAST, offers, poll

from deltawire.fleet import FleetOptions
from deltawire.fleet.rules.board import _MOST_OFFERS, _Offers
from deltawire.format.records.fleet_parts import MOST_ATTEMPTS, AttemptId
from deltawire.format.records.member_records import Heartbeat, Lease
from deltawire.format.records.trainer_records import MAX_BOARD_BYTES, Board, Round
from deltawire.store import fleet_keys
from deltawire.store.fleet_keys import FIRST_FREE_ATTEMPT

SQUATTERS: dict[str, Callable[[Round, int, int], bytes]] = {
    "junk": lambda record, task, attempt: b"{}",
    "a stranger": lambda record, task, attempt: Lease(record.id, record.round, task, attempt, "stranger", nonce(), 0, 0).to_bytes(),
    "in another's name": lambda record, task, attempt: Lease(record.id, record.round, task, attempt, "a", nonce(), 0, 0).to_bytes(),
}


def squat(fleet: Fleet, record: Round, make: Callable[[Round, int, int], bytes]) -> None:
    """Take every possible lease."""
    for task in range(record.tasks):
        for attempt in range(MOST_ATTEMPTS):
            data = make(record, task, attempt) if attempt < FIRST_FREE_ATTEMPT + 2 else b"{}"
            fleet.inner.put_if_absent(fleet_keys.lease_key(AttemptId(record.round, task, attempt)), data)


@pytest.mark.parametrize("make", SQUATTERS.values(), ids=SQUATTERS.keys())
def test_a_run_continues_when_every_lease_of_a_round_is_taken(make: Callable[[Round, int, int], bytes]) -> None:
    fleet = Fleet(options=FleetOptions(LEASE, poll_seconds=10, keep_steps=2))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        squat(fleet, trainer.open(1), make)
        fleet.join("a", "b")
        batch = trainer.collect(1)
        assert {one.attempt >= FIRST_FREE_ATTEMPT for one in batch.rollouts} == {True}
        trainer.train(batch)
        squat(fleet, trainer.open(2), make)
        poll(fleet, trainer)
    with fleet.publisher() as publisher:  # the trainer that takes over continues too
        fleet.trainer(publisher).run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)
    assert not fleet.reasons()


def test_the_trainer_does_not_wait_for_a_lease_that_it_did_not_offer() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)
        fleet.join("honest")
        fleet.members.clear()
        poll(fleet, trainer)
        assert offers(fleet) == {"honest": [(0, 0)]}
        lease = place_lease(fleet, record, member="stranger")
        poll(fleet, trainer)
        assert offers(fleet) == {"honest": [(0, 1)]}
        place_lease(fleet, record, attempt=1, member="honest")
        poll(fleet, trainer)
        assert offers(fleet) == {}  # the trainer waits for this lease
        upload_result(fleet, record, lease, make_rollouts(record, lease, rows_for(1)[0], trainer.steps.newest))
        assert [one.member for one in trainer.collect(1).rollouts] == ["stranger"]  # its result was the first, and it is valid


def test_a_result_without_a_lease_needs_an_attempt_that_the_trainer_offered_without_one() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)

        def deliver(member: str, attempt: int) -> None:
            lease = Lease(record.id, record.round, 0, attempt, member, nonce(), 0, 0)
            upload_result(fleet, record, lease, make_rollouts(record, lease, rows_for(1)[0], trainer.steps.newest))
            poll(fleet, trainer)

        deliver("stranger", FIRST_FREE_ATTEMPT)
        assert fleet.reasons() == ["unleased"]
        squat(fleet, record, SQUATTERS["junk"])
        fleet.join("honest")
        fleet.members.clear()
        poll(fleet, trainer)
        attempt = offers(fleet)["honest"][0][1]
        assert attempt >= FIRST_FREE_ATTEMPT
        deliver("stranger", attempt)
        assert fleet.reasons() == ["unleased"] * 2
        deliver("honest", attempt)
        assert [one.member for one in trainer.collect(1).rollouts] == ["honest"]


def test_names_without_members_do_not_keep_work_from_real_members() -> None:
    """A hundred names write heartbeats and take no offers. Every minute there are a hundred different names."""
    fleet = Fleet(options=FleetOptions(LEASE, poll_seconds=10, keep_steps=2))
    run = fleet.log.run.id

    def crowd() -> None:
        for number in range(100):
            name = f"a{int(fleet.time) // 60}-{number}"
            beat = Heartbeat(run, name, nonce(), "idle", 1, 2, 0, 0, 0, (), 0)
            fleet.store.put(fleet_keys.member_key(name), beat.to_bytes())

    fleet.meanwhile = crowd
    crowd()
    fleet.join("honest")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        for step in (1, 2):
            trainer.open(step, tasks=1)
            batch = trainer.collect(step, timeout=1800)
            assert {one.member for one in batch.rollouts} == {"honest"}
            trainer.train(batch)


def test_a_board_for_any_number_of_members_has_a_bounded_size() -> None:
    offers = _Offers()
    for number in range(20_000):
        name = f"{number:064}"
        for task in range(3):
            offers.add(name, AttemptId(10**9, 99_999 - task, 999))
    assert not offers.add("one more", AttemptId(0, 0, 0))
    shown = offers.by_member()
    assert sum(map(len, shown.values())) == _MOST_OFFERS
    alone = {f"{number:064}": (AttemptId(10**9, 99_999, 999),) for number in range(_MOST_OFFERS)}
    for each in (shown, alone):
        assert len(Board("ab" * 16, 10**9, 2**62, 10**9, 10**9, each, False, 2**62).to_bytes()) < MAX_BOARD_BYTES

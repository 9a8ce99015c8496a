"""Acknowledged results that fail in training are excluded permanently, and the run continues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from small_fleet import Fleet, Trainer, blake3_of, hashes_of, live_versions, make_rollouts, place_lease, rows_for, upload_result

from deltawire.errors import Fenced
from deltawire.fleet import Batch, FleetOptions, StalenessBudget, TrainingLimits
from deltawire.format.records.trainer_records import Rejection
from deltawire.store import fleet_keys
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied, call

WHY = "its loss is not finite"


def small_fleet() -> Fleet:
    fleet = Fleet(budget=StalenessBudget(0), options=FleetOptions(60, keep_steps=4))
    fleet.join("a", "b")
    return fleet


def begin(trainer: Trainer, step: int = 1) -> Batch:
    trainer.go(trainer.steps.resume())
    trainer.open(step)
    return trainer.collect(step)


def reject_first(trainer: Trainer, batch: Batch) -> Batch:
    made = trainer.go(trainer.steps.reject(batch, [0], WHY))
    assert isinstance(made, Batch)
    return made


def rejected_in(fleet: Fleet) -> set[str]:
    records = [Rejection.parse(fleet.inner.get(info.key, limit=1 << 16)) for info in fleet.inner.list(fleet_keys.REJECTED)]
    return {result[2] for record in records for result in record.results}


def trained(fleet: Fleet) -> dict[int, list[str]]:
    return {version.step or 0: json.loads(version.meta["trained"]) for version in live_versions(fleet.inner)[1:]}


def test_a_result_that_is_rejected_after_its_acknowledgement_is_left_out_for_good() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        whole = begin(trainer)
        spoiled, good = map(blake3_of, whole.rollouts)
        rest = reject_first(trainer, whole)
        assert hashes_of(rest) == [good]
        assert rest.rejected == {"untrainable": 1}
        trainer.train(rest)
        trainer.run_to(2)
    told = [event.fields for event in fleet.events if event.name == "rollout-rejected"]
    assert [(one["reason"], one["why"], one["task"], one["member"]) for one in told] == [("untrainable", WHY, 0, whole.results[0].member)]
    assert rejected_in(fleet) == {spoiled}
    with fleet.publisher(resume_from_seq=1) as publisher:  # from step 0 on, so both steps are trained again
        fleet.trainer(publisher).run_to(2)
    again = trained(fleet)
    assert good in again[1]
    assert len(again[1]) == 2
    assert spoiled not in again[1]


def test_a_step_whose_results_are_all_rejected_is_trained_on_nothing_and_the_run_continues() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        empty = trainer.go(trainer.steps.reject(begin(trainer), [0, 1], WHY))
        assert empty.rollouts == empty.rows == empty.results == ()
        trainer.train(empty)
        trainer.run_to(2)
    assert trained(fleet)[1] == []
    assert len(trained(fleet)[2]) == 2


def calls_of_a_rejection() -> list[Call]:
    fleet = small_fleet()
    store = FaultyStore(fleet.store)
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher, store)
        batch = begin(trainer)
        before = len(store.calls)
        reject_first(trainer, batch)
    made = store.calls[before:]
    assert [each.op for each in made] == ["get", "put"]  # it checks for another trainer, then writes the record
    return made


def fleets_with(fault: type[Before] | type[After], kind: str) -> Iterator[tuple[Fleet, FaultyStore]]:
    for each in calls_of_a_rejection():
        print(each)  # if the test fails, the last printed call is the one that failed
        fleet = small_fleet()
        yield fleet, FaultyStore(fleet.store, [fault(each.index, kind)])


@pytest.mark.parametrize("fault", [Before, After])
def test_a_trainer_killed_at_any_call_of_a_rejection_is_followed_by_one_that_continues(fault: type[Before] | type[After]) -> None:
    for fleet, store in fleets_with(fault, "crash"):
        with contextlib.suppress(ProcessDied), fleet.publisher() as publisher:
            trainer = fleet.trainer(publisher, store)
            batch = begin(trainer)
            reject_first(trainer, batch)
        assert store.died
        spoiled, good = map(blake3_of, batch.rollouts)
        is_written = rejected_in(fleet) == {spoiled}
        with fleet.publisher() as publisher:
            fleet.trainer(publisher).run_to(2)
        assert good in trained(fleet)[1]
        assert (spoiled in trained(fleet)[1]) is not is_written
        assert [len(hashes) for hashes in trained(fleet).values()] == [2, 2]


@pytest.mark.parametrize("fault", [Before, After])
def test_a_rejection_sits_out_a_loss_of_the_store(fault: type[Before] | type[After]) -> None:
    for fleet, store in fleets_with(fault, "unavailable"):
        with fleet.publisher() as publisher:
            trainer = fleet.trainer(publisher, store)
            batch = begin(trainer)
            trainer.train(reject_first(trainer, batch))
        assert rejected_in(fleet) == {blake3_of(batch.rollouts[0])}
        assert trained(fleet)[1] == [blake3_of(batch.rollouts[1])]


def test_a_trainer_that_was_taken_over_rejects_nothing() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        batch = begin(trainer)
        with fleet.publisher() as other:
            with pytest.raises(Fenced):
                reject_first(trainer, batch)
            assert rejected_in(fleet) == set()
            fleet.trainer(other).run_to(1)
    assert trained(fleet)[1] == hashes_of(batch)


def test_a_coordinator_that_starts_again_in_its_own_epoch_keeps_to_what_it_acknowledged_and_rejected() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        first = fleet.trainer(publisher)
        batch = begin(first)
        rest = reject_first(first, batch)
        second = fleet.trainer(publisher)
        second.go(second.steps.resume())
        assert hashes_of(second.collect(1)) == hashes_of(rest)
        # Now no result passes the checks. The acknowledgement stays, without the results that it listed.
        fleet.training = TrainingLimits(vocabulary=1)
        third = fleet.trainer(publisher)
        third.go(third.steps.resume())
        assert third.collect(1).rollouts == ()
        assert rejected_in(fleet) == set(hashes_of(batch))


def test_an_acknowledged_result_that_does_not_pass_todays_checks_is_made_again() -> None:
    """A trainer without limits acknowledged an invalid token. The next trainer has limits."""
    fleet = small_fleet()
    helpers = list(fleet.members)
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        fleet.members.clear()
        record = trainer.open(1)
        lease = place_lease(fleet, record)
        honest = make_rollouts(record, lease, rows_for(1)[0], trainer.steps.newest)
        first = replace(honest.completions[0], tokens=np.full(3, 2**31 - 1, np.int32))
        poison = replace(honest, completions=(first, *honest.completions[1:]))
        upload_result(fleet, record, lease, poison)
        fleet.members += helpers
        assert blake3_of(poison) in hashes_of(trainer.collect(1))
    fleet.training = TrainingLimits(vocabulary=50_000)
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(2)
    assert blake3_of(poison) not in trained(fleet)[1]
    assert [len(hashes) for hashes in trained(fleet).values()] == [2, 2]
    assert set(fleet.reasons()) <= {"untrainable", "late", "duplicate"}


def test_rejections_are_swept_with_the_acknowledgements_that_they_belong_to() -> None:
    fleet = small_fleet()
    fleet.options = FleetOptions(60, keep_steps=1)
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.train(reject_first(trainer, begin(trainer)))
        trainer.run_to(4)
    assert rejected_in(fleet) == set()


def test_a_rejection_that_cannot_be_read_back_is_read_again() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        batch = begin(trainer)
        reject_first(trainer, batch)
    store = FaultyStore(fleet.store, [Before(call("get", fleet_keys.REJECTED), "unavailable")])
    with fleet.publisher() as publisher:
        fleet.trainer(publisher, store).run_to(1, tries=2)
    assert blake3_of(batch.rollouts[0]) not in trained(fleet)[1]

"""Invalid results are each refused for a specific reason and counted, and their tasks are done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from small_fleet import Fleet, Trainer, make_rollouts, nonce, other_digest, place_lease, rows_for, upload_result

from deltawire.fleet import FleetOptions, Rollouts, StalenessBudget
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.fleet.steps import intake_steps
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.format.records.member_records import Lease
from deltawire.format.records.trainer_records import Round
from deltawire.format.rollouts import ClaimedVersion
from deltawire.store import fleet_keys
from deltawire.testing import FaultyStore, Reading, call

Make = Callable[[Fleet, Trainer, Round, Lease], Rollouts | bytes]


def honest(trainer: Trainer, record: Round, lease: Lease, **changes: object) -> Rollouts:
    return make_rollouts(record, lease, rows_for(record.for_step)[lease.task], trainer.steps.newest, **changes)


def by_version(trainer: Trainer, record: Round, lease: Lease, version: KnownVersion) -> Rollouts:
    return make_rollouts(record, lease, rows_for(record.for_step)[lease.task], version)


def assert_refused(reason: str, make: Make, *, steps: int = 0) -> None:
    """Upload a result under its own lease, check that it is refused for this reason, and let an honest member repeat the task."""
    fleet = Fleet(budget=StalenessBudget(0))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        helper = fleet.join("helper")[0]
        trainer.run_to(steps)
        fleet.members.clear()
        record = trainer.open(steps + 1)
        lease = place_lease(fleet, record)
        made = make(fleet, trainer, record, lease)
        data = made if isinstance(made, bytes) else made.to_bytes()
        upload_result(fleet, record, lease, honest(trainer, record, lease), data=data)
        trainer.go(trainer.steps.poll())
        assert fleet.reasons() == [reason]
        assert trainer.steps.rejected == {reason: 1}
        fleet.members.append(helper)
        batch = trainer.collect(steps + 1)
        assert batch.rejected == {reason: 1}
        assert {one.member for one in batch.rollouts} == {"helper"}
        assert [one.attempt for one in batch.rollouts] == [1, 0]  # the task of the refused result got another attempt


def test_a_result_of_another_run_is_refused() -> None:
    assert_refused("wrong-run", lambda fleet, trainer, record, lease: honest(trainer, record, lease, run="00" * 16))


def test_a_result_that_is_damaged_is_refused() -> None:
    assert_refused("malformed", lambda fleet, trainer, record, lease: honest(trainer, record, lease).to_bytes()[:-1])


def test_a_result_under_the_key_of_another_attempt_is_refused() -> None:
    assert_refused("malformed", lambda fleet, trainer, record, lease: honest(trainer, record, lease, task=1))


def test_a_result_with_fewer_completions_than_were_asked_for_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        whole = honest(trainer, record, lease)
        return replace(whole, completions=whole.completions[1:])

    assert_refused("malformed", make)


def test_a_result_with_longer_completions_than_are_allowed_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        whole = honest(trainer, record, lease)
        first = whole.completions[0]
        length = record.sampling.max_tokens + 1
        long = replace(
            first,
            tokens=np.ones(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            mask=np.ones(length, np.uint8),
            spans=(replace(first.spans[0], end=length),),
        )
        return replace(whole, completions=(long, *whole.completions[1:]))

    assert_refused("malformed", make)


def test_a_result_of_a_member_without_the_lease_is_refused() -> None:
    assert_refused("unleased", lambda fleet, trainer, record, lease: honest(trainer, record, lease, nonce=nonce()))
    assert_refused("unleased", lambda fleet, trainer, record, lease: honest(trainer, record, lease, member="y"))


def test_a_result_of_an_excluded_member_is_refused_and_others_get_its_tasks() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        trainer.steps.exclude("x", "its mismatch stands out")
        trainer.steps.exclude("x", "again")
        return honest(trainer, record, lease)

    assert_refused("excluded", make)
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        fleet.join("broken", "healthy")
        trainer.steps.exclude("broken", "its mismatch stands out")
        batch = trainer.collect(1)
    assert {one.member for one in batch.results} == {"healthy"}
    assert [event.fields for event in fleet.events if event.name == "member-excluded"] == [
        {"member": "broken", "why": "its mismatch stands out"}
    ]


def test_a_result_by_a_version_that_does_not_exist_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        newest = trainer.steps.newest
        return by_version(trainer, record, lease, replace(newest, seq=newest.seq + 1))

    assert_refused("future", make)


def test_a_result_by_other_weights_than_the_chain_has_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        newest = trainer.steps.newest
        return by_version(trainer, record, lease, replace(newest, digest=other_digest(newest.digest)))

    assert_refused("wrong-digest", make)


def test_a_result_by_too_old_a_version_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        old = next(known for seq in range(9) if (known := trainer.chain.find(seq)) is not None)
        assert old.step == 0
        return by_version(trainer, record, lease, old)

    assert_refused("stale", make, steps=1)


def test_a_result_some_of_which_was_made_by_too_old_a_version_is_refused() -> None:
    def make(fleet: Fleet, trainer: Trainer, record: Round, lease: Lease) -> Rollouts:
        old = next(known for seq in range(9) if (known := trainer.chain.find(seq)) is not None)
        whole = honest(trainer, record, lease)
        first = whole.completions[0]
        spans = (replace(first.spans[0], end=1, seq=old.seq), replace(first.spans[0], start=1))
        versions = {old.seq: ClaimedVersion(old.step, old.digest), **whole.versions}
        return replace(whole, completions=(replace(first, spans=spans), *whole.completions[1:]), versions=versions)

    assert_refused("stale", make, steps=1)


def test_a_result_by_a_version_that_a_rewind_abandoned_is_refused() -> None:
    fleet = Fleet(budget=StalenessBudget(1))
    fleet.join("a")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(1)
        abandoned = trainer.steps.newest
    fleet.members.clear()
    with fleet.publisher(resume_from_seq=1) as publisher:
        trainer = fleet.trainer(publisher)
        assert trainer.steps.newest.step == 0
        record = trainer.open(1)  # this trainer did not look for existing rounds, so it opens a new one
        lease = place_lease(fleet, record)
        upload_result(fleet, record, lease, by_version(trainer, record, lease, abandoned))
        trainer.go(trainer.steps.poll())
        assert fleet.reasons() == ["abandoned"]


def test_a_second_result_of_one_attempt_is_a_duplicate_and_of_another_late() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        first, second = place_lease(fleet, record), place_lease(fleet, record, attempt=1, member="y")
        upload_result(fleet, record, first, honest(trainer, record, first))
        fleet.time += 1
        upload_result(fleet, record, first, honest(trainer, record, first))
        upload_result(fleet, record, second, honest(trainer, record, second))
        trainer.go(trainer.steps.poll())
        assert sorted(fleet.reasons()) == ["duplicate", "late"]
        fleet.join("helper")
        batch = trainer.collect(1)
        assert [(one.member, one.attempt) for one in batch.rollouts] == [("x", 0), ("helper", 0)]
        trainer.train(batch)
        third = place_lease(fleet, record, task=1, attempt=1, member="z")
        upload_result(fleet, record, third, honest(trainer, record, third))
        trainer.go(trainer.steps.poll())
        assert fleet.reasons()[-1] == "late"  # the step of this result is already trained


def test_the_same_result_uploaded_twice_counts_once() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        lease = place_lease(fleet, record)
        made = honest(trainer, record, lease)
        for _ in range(2):
            upload_result(fleet, record, lease, made)
            trainer.go(trainer.steps.poll())
        assert [event.name for event in fleet.events].count("rollout-accepted") == 1
        assert not fleet.reasons()


def test_junk_under_another_members_lease_does_not_cost_it_its_result() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        lease = place_lease(fleet, record)
        upload_result(fleet, record, lease, honest(trainer, record, lease), data=b"junk")
        trainer.go(trainer.steps.poll())
        assert fleet.reasons() == ["malformed"]
        upload_result(fleet, record, lease, honest(trainer, record, lease))
        trainer.go(trainer.steps.poll())
        assert trainer.steps.rounds[1].tasks[0].accepted is not None


def test_a_result_that_is_damaged_on_the_way_to_the_trainer_is_read_again() -> None:
    fleet = Fleet()
    fleet.join("a")
    store = FaultyStore(fleet.store, [Reading(call("get", fleet_keys.ROLLOUTS), "flip")])
    with fleet.publisher() as publisher:
        fleet.trainer(publisher, store).run_to(1)
    assert not fleet.reasons()


def test_objects_that_are_not_leases_heartbeats_or_results_are_ignored() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        fleet.store.put(fleet_keys.lease_key(AttemptId(record.round, 0, 0)), b"{}")
        fleet.store.put(fleet_keys.lease_key(AttemptId(record.round, 1, 0)), b"x" * 100_000)
        fleet.store.put(fleet_keys.lease_key(AttemptId(record.round, 99, 0)), b"{}")
        fleet.store.put(fleet_keys.rollout_key(fleet_keys.RolloutKey(record.round, 99, 0, "00" * 32)), b"{}")
        fleet.store.put(f"{fleet_keys.ROLLOUTS}whatever", b"{}")
        fleet.store.put(f"{fleet_keys.MEMBERS}liar.json", b"{}")
        fleet.store.put(f"{fleet_keys.ROUNDS}whatever.json", b"{}")
        fleet.store.put(f"{fleet_keys.BATCHES}whatever.json", b"{}")
        fleet.join("a")
        batch = trainer.collect(1)
    assert [one.attempt for one in batch.rollouts] == [1, 1]
    assert batch.rejected == {"malformed": 1}


@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_a_round_settles_with_its_quorum_and_no_result_after_that_is_taken(quorum: float) -> None:
    fleet = Fleet(options=FleetOptions(60, quorum=quorum))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        for task in range(2):
            lease = place_lease(fleet, record, task=task)
            upload_result(fleet, record, lease, honest(trainer, record, lease))
            if quorum == 0.5:
                break
        assert len(trainer.collect(1).rollouts) == round(2 * quorum)
        if quorum == 0.5:
            lease = place_lease(fleet, record, task=1)
            upload_result(fleet, record, lease, honest(trainer, record, lease))
            trainer.go(trainer.steps.poll())
            assert fleet.reasons() == ["late"]


def test_results_in_masses_do_not_keep_the_trainer_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member uploads very many invalid results under its lease.

    The trainer still reads the results of other members, and reads none without a lease.
    """
    monkeypatch.setattr(intake_steps, "_FILES_PER_LOOK", 8)
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        lease = place_lease(fleet, record, task=0, member="spammer")
        for number in range(200):
            upload_result(fleet, record, lease, honest(trainer, record, lease), data=b"junk %d" % number)
            key = fleet_keys.RolloutKey(record.round, 1, 7, f"{number:064x}")
            fleet.store.put(fleet_keys.rollout_key(key), b"no lease")
        fleet.time += 1
        other = place_lease(fleet, record, task=1, member="other")
        upload_result(fleet, record, other, honest(trainer, record, other))
        before = len(fleet.store.calls)
        trainer.go(trainer.steps.poll())
        read = [call.key for call in fleet.store.calls[before:] if call.op == "get" and call.key.startswith(fleet_keys.ROLLOUTS)]
        assert len([key for key in read if f"/{1:05}/" in key]) == 1
        assert len(read) <= 24  # results are read in groups of eight
        assert trainer.steps.rounds[1].tasks[1].accepted is not None
        fleet.join("helper")
        assert {one.member for one in trainer.collect(1).rollouts} == {"helper", "other"}

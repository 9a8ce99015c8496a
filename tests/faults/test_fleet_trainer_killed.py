"""A trainer dies, or gets no answer, at every single call that it makes for its fleet. Another trainer takes over."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from publications import state_at
from small_fleet import (
    Fleet,
    acknowledged,
    assert_one_line_of_training,
    hashes_of,
    live_versions,
    make_rollouts,
    place_decoys,
    place_lease,
    rows_for,
    upload_result,
)

from deltawire.errors import Fenced, FleetTimeout
from deltawire.fleet import FleetOptions, StalenessBudget
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.fleet.steps.coordinator_steps import CoordinatorSteps
from deltawire.fleet.steps.record_steps import sweep
from deltawire.fleet.steps.requests import run_steps
from deltawire.format.records.trainer_records import Board
from deltawire.store import fleet_keys
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied, call
from deltawire.testing.faulty_store import Failure

LAST = 3
Fault = type[Before] | type[After]


def small_fleet(staleness: int = 1) -> Fleet:
    fleet = Fleet(budget=StalenessBudget(staleness), options=FleetOptions(60, keep_steps=1))
    fleet.join("a", "b")
    return fleet


def calls_of_a_trainer() -> list[Call]:
    """Return the calls that a trainer makes to a store without faults."""
    fleet = small_fleet()
    store = FaultyStore(fleet.store)
    with fleet.publisher() as publisher:
        fleet.trainer(publisher, store).run_to(LAST)
    made = {each.key.split("/")[1] for each in store.calls if each.key.startswith("fleet/")}
    # these are all kinds of objects
    assert made == {"round", "tasks", "lease", "rollout", "accepted", "batch", "rejected", "member", "board.json"}
    assert {each.op for each in store.calls} >= {"get", "put", "put_if_absent", "list", "head", "delete"}
    return store.calls


def fleets_with(fault: Fault, kind: Failure) -> Iterator[tuple[Fleet, FaultyStore]]:
    """Yield one fleet for each call of a trainer. The trainer's connection to the store fails at that call."""
    for each in calls_of_a_trainer():
        print(each)  # if the test fails, the last printed call is the one that failed
        unanswered = kind == "unknown" and each.op != "put_if_absent"  # for other calls a store reports "unavailable" instead
        fleet = small_fleet()
        yield fleet, FaultyStore(fleet.store, [fault(each.index, "unavailable" if unanswered else kind)])


def assert_death_loses_nothing(fault: Fault) -> None:
    for fleet, store in fleets_with(fault, "crash"):
        with contextlib.suppress(ProcessDied), fleet.publisher() as publisher:
            epoch = publisher.epoch
            fleet.trainer(publisher, store).run_to(LAST)
        assert store.died
        trained = {version.step for version in live_versions(fleet.inner)}
        owed = {step: found for step in range(1, LAST + 1) if (found := acknowledged(fleet.inner, epoch, step)) and step not in trained}
        returned = {batch.step: hashes_of(batch) for _, batch in fleet.collected if batch.step not in trained}
        assert returned.items() <= owed.items()  # no trainer trains on results that were not recorded
        place_decoys(fleet)
        with fleet.publisher() as publisher:
            fleet.trainer(publisher).run_to(LAST)
        assert_one_line_of_training(fleet.inner, LAST)
        used = {version.step: json.loads(version.meta["trained"]) for version in live_versions(fleet.inner)[1:]}
        for step, hashes in owed.items():
            assert used[step] == hashes


def assert_errors_lose_nothing(fault: Fault, kind: Failure) -> None:
    for fleet, store in fleets_with(fault, kind):
        with fleet.publisher() as publisher:
            fleet.trainer(publisher, store).run_to(LAST, tries=2)
        assert_one_line_of_training(fleet.inner, LAST)
        assert not fleet.reasons()


def test_a_trainer_killed_before_any_call_loses_no_acknowledged_rollout_and_trains_on_none_twice() -> None:
    assert_death_loses_nothing(Before)


def test_a_trainer_killed_after_any_call_loses_no_acknowledged_rollout_and_trains_on_none_twice() -> None:
    assert_death_loses_nothing(After)


def test_a_fleet_continues_when_a_call_of_its_trainer_was_done_but_not_answered() -> None:
    assert_errors_lose_nothing(After, "unknown")


def test_a_fleet_continues_when_a_call_of_its_trainer_was_neither_done_nor_answered() -> None:
    assert_errors_lose_nothing(Before, "unknown")


def test_a_collecting_trainer_waits_while_the_store_is_unavailable() -> None:
    fleet = small_fleet()
    store = FaultyStore(fleet.store, [Before(call("list", fleet_keys.ROLLOUTS), "unavailable", times=20)])
    with fleet.publisher() as publisher:
        fleet.trainer(publisher, store).run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)
    assert [event.name for event in fleet.events].count("fleet-retrying") == 20


def test_a_trainer_that_was_taken_over_halts_wherever_the_other_comes_in() -> None:
    """At each call of the first trainer, the second one takes over and trains to the end. The first one can then change nothing."""
    for each in calls_of_a_trainer():
        print(each)
        fleet = small_fleet()
        store = FaultyStore(fleet.store, [Before(_takeover(fleet, each.index), "unavailable")])
        first = fleet.publisher()
        with contextlib.suppress(Fenced):
            fleet.trainer(first, store).run_to(LAST, tries=2)
        with contextlib.suppress(Fenced):
            first.close()
        assert_one_line_of_training(fleet.inner, LAST)


def _takeover(fleet: Fleet, index: int) -> Callable[[Call], bool]:
    def strikes(each: Call) -> bool:
        if each.index == index:
            with fleet.publisher() as publisher:
                fleet.trainer(publisher).run_to(LAST)
        return False

    return strikes


def test_a_trainer_that_was_taken_over_writes_no_board() -> None:
    fleet = small_fleet()
    first = fleet.publisher()
    old = fleet.trainer(first)
    old.open(1)
    with fleet.publisher() as publisher:
        new = fleet.trainer(publisher)
        new.go(new.steps.resume())
        new.go(new.steps.poll())
        for steps in (old.steps.poll(), old.steps.stop(), old.steps.collect(1)):
            with pytest.raises(Fenced):
                old.go(steps)
        with pytest.raises(Fenced):
            old.open(2)
    board = Board.parse(fleet.inner.get(fleet_keys.BOARD, limit=1 << 20))
    assert (board.epoch, board.stop) == (new.steps.epoch, False)


def test_a_round_of_a_later_trainer_under_our_number_is_a_takeover() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        rows = replace(record.rows, key=fleet_keys.tasks_key(1, record.rows.blake3))
        later = replace(record, round=1, epoch=record.epoch + 1, rows=rows)
        fleet.store.put_if_absent(fleet_keys.round_key(1), later.to_bytes())
        for _ in range(2):
            with pytest.raises(Fenced):
                trainer.open(2)


def test_a_round_of_an_earlier_trainer_only_uses_up_its_number() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).open(1)
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.steps.open_rounds.next_number = 0  # an outdated listing has this effect
        assert trainer.open(1).round == 1


def test_results_by_versions_that_a_rewind_abandoned_are_not_trained_on_and_older_ones_are_used_again() -> None:
    fleet = Fleet(budget=StalenessBudget(1), options=FleetOptions(60, keep_steps=8))
    fleet.join("a")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(2)
        first = {version.step: version for version in live_versions(fleet.inner)}
        trainer.open(3)
        lost = trainer.collect(3)  # this batch is acknowledged, and was made by versions 1 or 2
    made_by = {seq for rollouts in lost.rollouts for seq in rollouts.versions}
    assert made_by == {first[2].seq}
    with fleet.publisher(resume_from_seq=first[1].seq) as publisher:
        trainer = fleet.trainer(publisher)
        adopted = trainer.go(trainer.steps.resume())
        assert [record.for_step for record in adopted] == [2, 3]
        assert trainer.steps.rejected == {"abandoned": 2}
        # Step 2 was made by version 0 or 1, which are both still valid. It is used again as it was acknowledged.
        assert trainer.steps.rounds[2].settled
        assert not trainer.steps.rounds[3].settled
        trainer.run_to(4)
    assert_one_line_of_training(fleet.inner, 4)
    again = {version.step: version.meta.get("trained") for version in live_versions(fleet.inner)}
    assert again[2] == first[2].meta["trained"]
    assert again[3] != json.dumps(hashes_of(lost))


def test_a_trainer_finds_what_was_acknowledged_as_far_back_as_keep_steps_and_opens_new_rounds_for_the_rest() -> None:
    fleet = Fleet(budget=StalenessBudget(5), options=FleetOptions(60, keep_steps=2))
    fleet.join("a", "b")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(4)
        trainer.go(trainer.steps.poll())  # sweeps steps 1 and 2
    first = {version.step: version for version in live_versions(fleet.inner)}
    with fleet.publisher(resume_from_seq=first[2].seq) as publisher:
        trainer = fleet.trainer(publisher)
        assert [record.for_step for record in trainer.go(trainer.steps.resume())] == [3, 4]
        assert trainer.steps.rounds[3].settled
        assert trainer.steps.rounds[4].settled
        trainer.run_to(4)
        trainer.go(trainer.steps.poll())
    assert_one_line_of_training(fleet.inner, 4)
    again = {version.step: version.meta.get("trained") for version in live_versions(fleet.inner)}
    assert [again[step] for step in (3, 4)] == [first[step].meta["trained"] for step in (3, 4)]
    with fleet.publisher(resume_from_seq=first[0].seq) as publisher:
        trainer = fleet.trainer(publisher)
        assert [record.for_step for record in trainer.go(trainer.steps.resume())] == [3, 4]
        trainer.run_to(4)
    assert_one_line_of_training(fleet.inner, 4)
    third = {version.step: version.meta.get("trained") for version in live_versions(fleet.inner)}
    assert [third[step] == first[step].meta["trained"] for step in (1, 2, 3, 4)] == [False, False, True, True]


def test_an_acknowledged_round_is_preferred_to_a_later_one_for_its_step() -> None:
    fleet = small_fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        first = trainer.collect(1)
    with fleet.publisher() as publisher:
        assert fleet.trainer(publisher).open(1).round == 1  # this trainer did not look for existing rounds
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(1)
    assert json.loads(live_versions(fleet.inner)[-1].meta["trained"]) == hashes_of(first)


def test_results_that_arrive_while_an_acknowledgement_is_in_doubt_are_refused() -> None:
    fleet = Fleet(options=FleetOptions(60, quorum=0.5))
    unanswered = [After(call("put_if_absent", fleet_keys.BATCHES), "unknown", 5), Before(call("get", fleet_keys.BATCHES), "unavailable", 5)]
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher, FaultyStore(fleet.store, unanswered))
        record = trainer.open(1)
        for task in (0, 1):
            lease = place_lease(fleet, record, task)
            upload_result(fleet, record, lease, make_rollouts(record, lease, rows_for(1)[task], trainer.steps.newest))
            if task == 0:
                with pytest.raises(FleetTimeout):
                    trainer.collect(1, stop=lambda: True)
                assert acknowledged(fleet.inner, publisher.epoch, 1) is not None  # the trainer could not see this acknowledgement
        trainer.go(trainer.steps.poll())
        batch = trainer.collect(1)
    assert [one.task for one in batch.rollouts] == [0]
    assert hashes_of(batch) == acknowledged(fleet.inner, publisher.epoch, 1)
    assert fleet.reasons() == ["late"]


def test_a_trainer_that_wakes_up_while_it_sweeps_leaves_later_acknowledgements_alone() -> None:
    fleet = small_fleet()
    for epoch in (1, 2, 3):
        for step in (5, 6):
            fleet.store.put_if_absent(fleet_keys.batch_key(epoch, step), b"{}")
    run_steps(sweep(0, 2, 5, []), fleet.store)
    left = [fleet_keys.parse_batch_key(info.key) for info in fleet.inner.list(fleet_keys.BATCHES)]
    assert left == [(1, 6), (2, 6), (3, 5), (3, 6)]


def test_a_round_beyond_the_budget_is_offered_as_soon_as_its_version_is_published() -> None:
    fleet = Fleet(budget=StalenessBudget(0))
    fleet.join("a")
    published: list[KnownVersion] = []
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.steps = CoordinatorSteps(
            trainer.steps.trainer,
            newest=trainer.chain.newest(),
            ticks=lambda: fleet.time,
            ask_newest=lambda: published[-1] if published else None,
        )
        trainer.open(1)
        early = trainer.open(2)
        with pytest.raises(ValueError, match="1 to 2"):
            trainer.open(3)
        batch = trainer.collect(1)
        for _ in range(3):
            trainer.go(trainer.steps.poll())
            fleet.sleep(1)
        assert offered_rounds(fleet) == set()
        assert not list(fleet.inner.list(f"{fleet_keys.LEASES}{early.round:010}/"))
        version = publisher.publish(state_at(batch.step), step=batch.step)
        published.append(KnownVersion(version.seq, 1, version.digest))
        trainer.go(trainer.steps.poll())  # it learns by itself that the version is published
        assert trainer.steps.newest.step == 1
        fleet.sleep(1)
        trainer.go(trainer.steps.poll())
        assert offered_rounds(fleet) == {early.round}
        trainer.steps.published(published[-1])  # the trainer says it, too, and later
        assert trainer.collect(2).round == early


def offered_rounds(fleet: Fleet) -> set[int]:
    board = Board.parse(fleet.inner.get(fleet_keys.BOARD, limit=1 << 20))
    return {attempt.round for attempts in board.offers.values() for attempt in attempts}


def test_a_settled_round_is_acknowledged_before_the_board_is_written() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        store = FaultyStore(fleet.store)
        trainer = fleet.trainer(publisher, store)
        trainer.open(1)
        trainer.open(2)
        fleet.join("a")
        trainer.collect(1)
        written = [each.key for each in store.calls if each.op in ("put", "put_if_absent")]
        acknowledged = written.index(fleet_keys.batch_key(publisher.epoch, 1))
        assert written[acknowledged:] == [fleet_keys.batch_key(publisher.epoch, 1)]
        assert written[acknowledged - 1].startswith(fleet_keys.ACCEPTED)
        seen = len(store.calls)
        trainer.go(trainer.steps.poll())  # the next look writes the board
        assert ("put", fleet_keys.BOARD) in [(each.op, each.key) for each in store.calls[seen:]]


def test_a_trainer_that_is_told_to_stop_waiting_can_wait_on() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1)
        with pytest.raises(FleetTimeout):
            trainer.collect(1, timeout=5)
        with pytest.raises(FleetTimeout):
            trainer.collect(1, stop=lambda: True)
        fleet.join("a")
        assert trainer.collect(1).round == record
        assert trainer.collect(1).round == record  # an acknowledged batch does not change

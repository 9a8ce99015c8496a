"""Members die, freeze, leave, lose the store or lose a race. Other members do their tasks, and no task is trained on twice."""

from __future__ import annotations

import contextlib
import math

import pytest
from small_fleet import LEASE, Fleet, Member, Trainer, assert_one_line_of_training, make_rollouts, place_lease, rows_for, upload_result

from deltawire.errors import EngineError, FleetDeserted, FleetTimeout, RewardError, StoreDenied
from deltawire.fleet import FleetOptions, StalenessBudget
from deltawire.fleet.steps.member_state import write_heartbeat
from deltawire.fleet.steps.requests import Generate, Sync
from deltawire.format.records.fleet_parts import AttemptId
from deltawire.format.records.member_records import Heartbeat
from deltawire.format.records.trainer_records import Board
from deltawire.store import Store, fleet_keys
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied, Reading, call
from deltawire.testing.faulty_store import Failure

LAST = 2


def board_of(fleet: Fleet) -> Board:
    return Board.parse(fleet.inner.get(fleet_keys.BOARD, limit=1 << 20))


def offers(fleet: Fleet) -> dict[str, list[tuple[int, int]]]:
    """Return the task and attempt of each member's offers."""
    return {member: [attempt[1:] for attempt in attempts] for member, attempts in board_of(fleet).offers.items()}


def poll(fleet: Fleet, trainer: Trainer, seconds: float = 0.0) -> None:
    """Let this many seconds pass, then let the trainer poll twice."""
    fleet.time += seconds
    trainer.go(trainer.steps.poll())
    trainer.go(trainer.steps.poll())


def claimed(fleet: Fleet, trainer: Trainer, name: str, task: int = 0) -> Member:
    """Return a live member that holds the first lease of the task that it was offered."""
    member = fleet.join(name)[0]
    fleet.members.remove(member)
    record = trainer.steps.rounds[1].record
    trainer.steps.rounds[1].tasks[task].offer_to(name, fleet.time, LEASE)
    place_lease(fleet, record, task, member=name)
    member.state.working.add((record.round, task, 0))
    member.perform_all(write_heartbeat(member.state))
    return member


def test_a_task_of_a_silent_member_goes_to_another_after_the_lease() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)
        claimed(fleet, trainer, "frozen")
        other = fleet.join("other")[0]
        fleet.members.clear()
        poll(fleet, trainer)
        assert offers(fleet) == {}
        poll(fleet, trainer, LEASE - 1)
        assert offers(fleet) == {}
        other.perform_all(write_heartbeat(other.state))
        poll(fleet, trainer, 2)
        assert offers(fleet) == {"other": [(0, 1)]}
        fleet.members.append(other)
        assert [one.attempt for one in trainer.collect(1).rollouts] == [1]
        assert record.tasks == 1


def test_heartbeats_that_name_a_lease_keep_it_and_others_do_not() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1, tasks=2)
        busy, idle = claimed(fleet, trainer, "busy", 0), claimed(fleet, trainer, "idle", 1)
        idle.state.working.clear()
        for _ in range(4):
            for member in (busy, idle):
                member.perform_all(write_heartbeat(member.state))
            poll(fleet, trainer, LEASE / 2)
        assert list(offers(fleet).values()) == [[(1, 1)]]


def test_a_member_that_wakes_up_after_its_lease_may_still_be_first() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)
        lease = place_lease(fleet, record, member="frozen")
        fleet.join("other")
        fleet.members.clear()
        poll(fleet, trainer, 2 * LEASE)
        second = place_lease(fleet, record, attempt=1, member="other")
        rows = rows_for(1)[0]
        upload_result(fleet, record, lease, make_rollouts(record, lease, rows, trainer.steps.newest))
        poll(fleet, trainer)
        fleet.time += 1
        upload_result(fleet, record, second, make_rollouts(record, second, rows, trainer.steps.newest))
        poll(fleet, trainer)
        assert [one.member for one in trainer.collect(1).rollouts] == ["frozen"]
        assert fleet.reasons() == ["late"]


def test_tasks_of_a_member_that_leaves_are_offered_again_at_once() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1, tasks=1)
        member = claimed(fleet, trainer, "leaver")
        fleet.join("other")
        fleet.members.clear()
        poll(fleet, trainer, 1)
        assert offers(fleet) == {}
        member.leave()
        poll(fleet, trainer)
        assert offers(fleet) == {"other": [(0, 1)]}
        assert Heartbeat.parse(fleet.inner.get(fleet_keys.member_key("leaver"), limit=9999)).state == "left"


def test_clocks_of_members_and_trainer_decide_nothing() -> None:
    fleet = Fleet()
    wrong = [member.state for member in fleet.join("past", "future")]
    wrong[0].clock, wrong[1].clock = lambda: 0, lambda: 10**15
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.steps.trainer.clock = lambda: 10**14
        trainer.run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)
    assert not fleet.reasons()
    assert {member.state.tokens > 0 for member in fleet.members} == {True}


def test_the_task_of_a_straggler_goes_to_another_member_and_the_first_result_wins() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=3)
        slow = claimed(fleet, trainer, "slow")
        fast = fleet.join("fast")[0]
        for _ in range(3):
            poll(fleet, trainer, 1)
            slow.perform_all(write_heartbeat(slow.state))
        assert (0, 1) not in offers(fleet).get("fast", [])
        for _ in range(20):
            fleet.time += 5
            for member in (slow, fast):
                member.perform_all(write_heartbeat(member.state))
            fast.move()
            poll(fleet, trainer)
        assert trainer.steps.rounds[1].settled
        lease = trainer.steps.rounds[1].tasks[0].leases[0].lease
        assert lease is not None
        upload_result(fleet, record, lease, make_rollouts(record, lease, rows_for(1)[0], trainer.steps.newest))
        poll(fleet, trainer)
        assert [one.member for one in trainer.collect(1).rollouts] == ["fast"] * 3
        assert fleet.reasons() == ["late"]


def test_a_member_behind_the_budget_is_offered_nothing_and_takes_nothing() -> None:
    fleet = Fleet(budget=StalenessBudget(0))
    fleet.join("a")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(1)
        old = fleet.join("old")[0]
        old.version = trainer.chain.find(1)
        assert old.version is not None
        assert old.version.step == 0
        trainer.open(2)
        fleet.members.remove(fleet.members[0])
        for _ in range(3):
            fleet.sleep(1)
            poll(fleet, trainer)
        assert offers(fleet).get("old") is None
        # The member takes nothing even if the board offers it a task.
        board = board_of(fleet)
        lie = Board(board.id, board.epoch, board.seq, board.step, board.lease_seconds, {"old": ((1, 0, 0), (1, 1, 0), (7, 0, 0))}, False)
        fleet.store.put(fleet_keys.BOARD, lie.to_bytes())
        old.move()
        assert not list(fleet.inner.list(f"{fleet_keys.LEASES}{1:010}/"))
        old.version = None
        old.move()
        assert list(fleet.inner.list(f"{fleet_keys.LEASES}{1:010}/"))


class Mortal(Member):
    """Return a member with its own connection to the store."""

    def __init__(self, fleet: Fleet, name: str, store: Store) -> None:
        super().__init__(store, name, fleet.log)


def calls_of_a_member() -> list[Call]:
    fleet = Fleet()
    store = FaultyStore(fleet.store)
    fleet.members.append(Mortal(fleet, "a", store))
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(LAST)
    assert {each.op for each in store.calls} == {"get", "put", "put_if_absent"}
    return store.calls


def assert_member_faults_lose_nothing(fault: type[Before] | type[After], kind: Failure) -> None:
    for each in calls_of_a_member():
        print(each)
        unanswered = kind == "unknown" and each.op != "put_if_absent"
        fleet = Fleet()
        store = FaultyStore(fleet.store, [fault(each.index, "unavailable" if unanswered else kind)])
        mortal = Mortal(fleet, "a", store)
        moves: list[int] = []

        def live(mortal: Mortal = mortal, fleet: Fleet = fleet, moves: list[int] = moves) -> None:
            """Move the member until it dies or fails. If it died, let another member join."""
            if not mortal.ended:
                try:
                    mortal.move()
                except ProcessDied:
                    mortal.has_left = True
                    fleet.join("heir")
                except Exception:
                    mortal.has_left = True
                    raise
            moves.append(1)
            assert len(moves) < 2000
            if len(moves) > 20:
                fleet.time += LEASE  # nothing more happens until a lease ends

        fleet.meanwhile = live
        with fleet.publisher() as publisher:
            fleet.trainer(publisher).run_to(LAST)
        assert_one_line_of_training(fleet.inner, LAST)
        assert not fleet.reasons()


def test_a_member_killed_before_any_call_costs_its_lease_and_nothing_else() -> None:
    assert_member_faults_lose_nothing(Before, "crash")


def test_a_member_killed_after_any_call_costs_its_lease_and_nothing_else() -> None:
    assert_member_faults_lose_nothing(After, "crash")


def test_a_member_whose_call_was_done_but_not_answered_continues() -> None:
    assert_member_faults_lose_nothing(After, "unknown")


def test_a_member_whose_call_was_neither_done_nor_answered_continues() -> None:
    assert_member_faults_lose_nothing(Before, "unknown")


def test_a_member_waits_while_the_store_is_unavailable_and_then_uploads_its_result() -> None:
    fleet = Fleet()
    store = FaultyStore(fleet.store, [Before(call("put", fleet_keys.ROLLOUTS), "unavailable", times=12)])
    member = Mortal(fleet, "a", store)
    pauses: list[float] = []
    member.state.on_event = lambda event: pauses.append(member.state.pause(int(event.fields.get("failures") or 0)))
    fleet.members.append(member)
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(1)
    assert_one_line_of_training(fleet.inner, 1)
    assert len(pauses) >= 12
    assert max(pauses) <= member.state.longest_pause


def test_a_member_that_may_not_write_says_so_and_ends() -> None:
    fleet = Fleet()

    class Denied(Mortal):
        def answer(self, request: object) -> object:
            if isinstance(request, (Sync, Generate)) or not hasattr(request, "data"):
                return super().answer(request)
            if getattr(request, "key", "").startswith(fleet_keys.LEASES):
                raise StoreDenied("no.")
            return super().answer(request)

    fleet.members.append(Denied(fleet, "a", fleet.store))
    with fleet.publisher() as publisher, pytest.raises(StoreDenied):
        fleet.trainer(publisher).run_to(1)


def test_a_412_for_ones_own_lease_is_a_success() -> None:
    fleet = Fleet()

    class Retried(Mortal):
        """A member whose requests to create objects arrive twice. The second request finds the object of the first."""

        def answer(self, request: object) -> object:
            if type(request).__name__ == "Create":
                super().answer(request)
            return super().answer(request)

    fleet.members.append(Retried(fleet, "a", fleet.store))
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(1)
    assert [info.key[-8:] for info in fleet.inner.list(fleet_keys.LEASES)] == ["000.json"] * 2


def test_a_lease_whose_creation_was_in_doubt_is_recognised_when_it_is_offered_again() -> None:
    fleet = Fleet()
    lost = [After(call("put_if_absent"), "unknown", 5), Before(call("get", fleet_keys.LEASES), "unavailable", 5)]
    member = Mortal(fleet, "a", FaultyStore(fleet.store, lost))
    member.move()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)
        trainer.go(trainer.steps.poll())
        for _ in range(9):
            member.move()
        assert [info.key for info in fleet.inner.list(fleet_keys.LEASES)] == [fleet_keys.lease_key(AttemptId(record.round, 0, 0))]
        assert [one.attempt for one in trainer.collect(1, timeout=5).rollouts] == [0]


def test_exactly_one_of_two_members_takes_a_task_that_both_are_offered() -> None:
    fleet = Fleet()
    first, second = fleet.join("a", "b")
    fleet.members.clear()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        record = trainer.open(1, tasks=1)
        board = Board(record.id, publisher.epoch, 1, 0, LEASE, {"a": ((0, 0, 0),), "b": ((0, 0, 0),)}, False)
        fleet.store.put(fleet_keys.BOARD, board.to_bytes())
        first.move()
        second.move()
        assert (first.state.tokens > 0, second.state.tokens) == (True, 0)
        assert not second.state.working
        trainer.collect(1)


def test_a_wrong_or_hostile_board_wastes_nothing_but_requests() -> None:
    fleet = Fleet()
    member = fleet.join("a")[0]
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        fleet.members.clear()
        good = Board(fleet.log.run.id, 1, 1, 0, LEASE, {}, False)
        for data in (b"", b"{}", b"x" * (2 << 20), good.to_bytes()[:-1], Board("00" * 16, 1, 1, 0, LEASE, {}, True).to_bytes()):
            fleet.store.put(fleet_keys.BOARD, data)
            member.move()
            assert not member.ended
        fleet.members.append(member)
        trainer.collect(1)
    assert not fleet.reasons()


def test_rows_that_are_damaged_on_the_way_are_read_again() -> None:
    fleet = Fleet()
    store = FaultyStore(fleet.store, [Reading(call("get", fleet_keys.TASKS), "flip"), Reading(call("get", fleet_keys.ROUNDS), "truncate")])
    fleet.members.append(Mortal(fleet, "a", store))
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(1)
    assert not fleet.reasons()


def test_members_leave_when_the_trainer_stops_the_fleet() -> None:
    fleet = Fleet()
    fleet.join("a", "b")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(1)
        trainer.go(trainer.steps.stop())
        with contextlib.suppress(StopIteration):
            fleet.sleep(1)
    assert [member.ended for member in fleet.members] == [True, True]


def test_objects_of_old_rounds_are_deleted_and_numbers_are_never_used_again() -> None:
    fleet = Fleet()
    fleet.join("a")
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.run_to(8)
        fleet.time += 10**6
        fleet.join("young")
        poll(fleet, trainer)
        trainer.steps._swept = None
        poll(fleet, trainer)
    objects = [info.key for info in fleet.inner.list("fleet/")]
    kept = sorted({parsed for key in objects if (parsed := fleet_keys.parse_round_key(key)) is not None})
    assert kept == [6, 7]  # they are for steps 7 and 8, because keep_steps is 2
    assert {key.split("/")[2] for key in objects if key.count("/") > 2 and "/batch/" not in key} == {"0000000006", "0000000007"}
    assert fleet_keys.member_key("a") not in objects
    assert fleet_keys.member_key("young") in objects
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        assert trainer.go(trainer.steps.resume()) == []
        assert trainer.open(9).round == 8


def quits(fleet: Fleet, member: Member, error: Exception) -> None:
    """Let the member leave because of an error, and report that error."""
    member.state.leave_because(error)
    member.leave()
    fleet.members[:] = [one for one in fleet.members if one is not member]


def test_a_trainer_whose_members_all_left_because_of_errors_says_so_and_stops() -> None:
    fleet = Fleet(options=FleetOptions(LEASE, poll_seconds=1.0, patience_seconds=30.0))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        first, second = fleet.join("a", "b")
        fleet.members.clear()  # from here on the members only report why they leave
        trainer.open(1)
        poll(fleet, trainer)
        quits(fleet, first, RewardError("the reward 'right' needs the column 'answer'."))
        with pytest.raises(FleetTimeout):
            trainer.collect(1, timeout=LEASE / 2)  # the other member is alive, and may still be working
        quits(fleet, second, EngineError("\x1b[2Jno tokenizer."))
        looked = fleet.time
        with pytest.raises(
            FleetDeserted, match=r"2 members have left .* a: RewardError: .*'answer'.*; b: EngineError: \ufffd\[2Jno tokenizer\."
        ):
            trainer.collect(1)
        assert fleet.time - looked == 29.0  # these are the trainer's own pauses between polls
    left = [(event.fields["member"], event.fields["why"]) for event in fleet.events if event.name == "member-left"]
    assert [member for member, _ in left] == ["a", "b"]
    assert all(why.startswith(("RewardError: ", "EngineError: ")) for _, why in left)
    assert {one.member: one.why for one in trainer.steps.members()} == dict(left)
    with fleet.publisher() as publisher:  # the reported errors do not count for a trainer that starts later
        fleet.time += 60.0
        again = fleet.trainer(publisher)
        again.go(again.steps.resume())
        with pytest.raises(FleetTimeout):
            again.collect(1, timeout=300.0)
        fleet.join("c")
        again.run_to(2)
    assert [event.fields["step"] for event in fleet.events if event.name == "waiting-for-members"] == [1, 1]


def test_a_trainer_waits_on_while_members_come_back_and_work() -> None:
    fleet = Fleet(options=FleetOptions(LEASE, poll_seconds=1.0, patience_seconds=5.0))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        with pytest.raises(FleetTimeout):
            trainer.collect(1, timeout=1000.0)  # no member ever joined, and none reported an error
        for number in range(3):
            quits(fleet, *fleet.join(f"a{number}"), EngineError("it broke."))
            with pytest.raises(FleetTimeout):
                trainer.collect(trainer.steps.newest.step + 1, timeout=3.0)
            helper = fleet.join(f"b{number}")
            trainer.run_to(trainer.steps.newest.step + 1)
            for member in helper:
                member.leave()
                fleet.members.remove(member)
            trainer.open(trainer.steps.newest.step + 1)


def test_a_false_reason_for_leaving_costs_a_waiting_trainer_a_restart_at_most() -> None:
    def lie(fleet: Fleet, trainer: Trainer) -> None:
        beat = Heartbeat(trainer.steps.trainer.run, "evil", "0" * 32, "left", None, None, 0, 0, 0, (), 0, reason="bye")
        fleet.inner.put(fleet_keys.member_key("evil"), beat.to_bytes())

    fleet = Fleet(options=FleetOptions(LEASE, poll_seconds=1.0, patience_seconds=30.0))
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        lie(fleet, trainer)
        for _ in range(2):  # the second call waits as long as the first
            began = fleet.time
            with pytest.raises(FleetDeserted, match="evil: bye"):
                trainer.collect(1)
            assert fleet.time - began == 29.0
        fleet.join("a")
        trainer.run_to(2)
        lie(fleet, trainer)  # the false report has no effect while other members are alive
        trainer.run_to(3)
    assert_one_line_of_training(fleet.inner, 3)

    patient = Fleet(options=FleetOptions(LEASE, poll_seconds=1.0, patience_seconds=math.inf))
    with patient.publisher() as publisher:
        trainer = patient.trainer(publisher)
        trainer.open(1)
        lie(patient, trainer)
        with pytest.raises(FleetTimeout):
            trainer.collect(1, timeout=1000.0)


def test_an_error_that_a_member_cannot_put_into_words_is_cut() -> None:
    fleet = Fleet()
    (member,) = fleet.join("a")
    member.state.leave_because(ValueError("\ud800 line\n" * 1000))
    member.leave()
    beat = Heartbeat.parse(fleet.inner.get(fleet_keys.member_key("a"), limit=1 << 16))
    assert beat.reason is not None
    assert len(beat.reason) == 500
    assert beat.reason.startswith("ValueError: ? line ? line")

"""The queue of a member: the next task is leased while one is worked on, checked again before it begins, and delivered beside it."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.events import Event
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.fleet.steps.member_state import Claim, Made, MemberState
from deltawire.fleet.steps.requests import Generate, Sync, Wait, Watch, run_steps
from deltawire.fleet.steps.signal import Signal
from deltawire.fleet.steps.work_steps import upload_steps, work_steps
from deltawire.format.digest import Digest
from deltawire.format.records.fleet_parts import AttemptId, ObjectRef
from deltawire.format.records.member_records import Lease
from deltawire.format.records.trainer_records import Round, Sampling
from deltawire.store.base import Store
from deltawire.store.memory import MemoryStore
from deltawire.store.requests import Put

RUN, NONCE, HASH = "ab" * 16, "cd" * 16, "ef" * 32
ROWS = ObjectRef(f"fleet/tasks/0000000000/{HASH}.json", 9, HASH)
ROUND = Round(RUN, 0, 1, NONCE, 2, 0, 4, ROWS, 60, Sampling(samples=1, max_tokens=8), 0)


def version(step: int) -> KnownVersion:
    return KnownVersion(step, step, Digest.from_hex("0" * 32))


def claim(task: int) -> Claim:
    attempt = AttemptId(0, task, 0)
    return Claim(attempt, ROUND, Lease(RUN, *attempt, "m", NONCE, 0, 0), ({"prompt": "a"},))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def member(*claims: Claim, clock: Clock | None = None, **changes: Any) -> MemberState:
    made = MemberState(RUN, "m", NONCE, lambda: NONCE, lambda: 0, lambda: 0.5, clock or Clock(), **changes)
    made.policy = version(0)
    made.reported = ("idle", ())
    for one in claims:
        made.queue.append(one)
        made.working.add(one.attempt)
    return made


class Result:
    """Takes the place of the rollouts of a task."""

    tokens = 5

    def to_bytes(self) -> bytes:
        return b"result"


def advance(steps: Any, answer: Any = None) -> Any:
    return steps.send(answer)


def test_a_member_holds_one_task_more_than_its_engine_works_on() -> None:
    me = member(tasks_at_a_time=2)
    rooms = []
    for number in range(3):
        rooms.append((me.has_room, me.is_busy))
        me.queue.append(claim(number))
        if number < 2:
            assert me.begin_task() is not None
    assert rooms == [(True, False), (True, False), (True, True)]
    assert not me.has_room


def test_a_busy_member_leases_the_next_task_when_half_of_the_present_one_is_over() -> None:
    clock = Clock()
    me = member(claim(0), clock=clock)
    assert me.seconds_to_spare <= 0  # the engine has nothing to do
    me.note_duration(20.0)
    assert me.begin_task() == (claim(0), 0.0)
    assert me.seconds_to_spare == pytest.approx(8.0)
    clock.now = 9.0
    assert me.seconds_to_spare < 0
    me.typical_seconds = 1.0
    clock.now = 0.0
    assert me.seconds_to_spare < 0  # short tasks are leased at once


def test_a_member_without_a_task_never_looks_busy_to_its_other_threads() -> None:
    """A thread that looks for a task in vain must not make the one that claims tasks wait for half a task."""
    looks: list[bool] = []
    me = member()
    me.typical_seconds = 600.0
    me.ticks = lambda: looks.append(me.is_busy) or 0.0  # type: ignore[func-returns-value]

    class Begun(list[float]):
        def append(self, began: float) -> None:
            super().append(began)
            looks.append(me.seconds_to_spare > 0)

    me.begun = Begun()
    assert me.begin_task() is None
    assert not any(looks)


def test_a_queued_task_is_dropped_if_the_version_has_changed_meanwhile() -> None:
    events: list[Event] = []
    me = member(claim(0), claim(1), on_event=events.append)
    steps = work_steps(me)
    assert advance(steps) == Sync(0)
    request = advance(steps, version(2))  # the version of the training step itself
    while isinstance(request, Put):
        request = advance(steps)
    assert request == Sync(0)  # it continues with the next task
    assert [event.name for event in events] == ["task-dropped"]
    assert me.working == {claim(1).attempt}
    assert isinstance(advance(steps, version(1)), Put)  # the version has changed again
    assert isinstance(advance(steps), Generate)


def test_a_lease_is_named_until_its_result_is_in_the_store() -> None:
    me = member(claim(0), claim(1))
    works, uploads = work_steps(me), upload_steps(me)
    assert isinstance(advance(uploads), Wait)
    assert advance(works) == Sync(0)
    assert isinstance(advance(works, version(0)), Generate)
    assert advance(works, Result()) == Sync(0)  # the next task begins before the upload
    put = advance(uploads)
    assert isinstance(put, Put)
    assert me.working == {claim(0).attempt, claim(1).attempt}
    assert isinstance(advance(uploads), Wait)
    assert me.working == {claim(1).attempt}
    assert me.tokens == 5


def test_work_waits_while_results_cannot_be_uploaded() -> None:
    me = member(claim(0))
    me.made.extend([Made(AttemptId(0, 2, 0), Result(), 1), Made(AttemptId(0, 3, 0), Result(), 1)])  # type: ignore[arg-type]
    steps = work_steps(me)
    assert isinstance(advance(steps), Wait)
    me.made.popleft()
    assert advance(steps) == Sync(0)


def test_a_member_that_leaves_delivers_what_it_has_made_and_begins_nothing() -> None:
    me = member(claim(0))
    me.made.append(Made(AttemptId(0, 2, 0), Result(), 1))  # type: ignore[arg-type]
    me.leave()
    with pytest.raises(StopIteration):
        advance(work_steps(me))
    uploads = upload_steps(me)
    assert isinstance(advance(uploads), Put)
    with pytest.raises(StopIteration):
        advance(uploads)


def test_a_signal_ends_waits_that_began_before_it_and_no_later_ones() -> None:
    signal, called = Signal(), []
    signal.give()
    signal.wait(0, 1e6)  # it was given since the count was read
    signal.call_once(0, lambda: called.append("at once"))
    signal.call_once(1, lambda: called.append("later"))
    assert called == ["at once"]
    signal.give()
    signal.give()
    assert called == ["at once", "later"]


def test_watching_waits_for_a_change_or_looks_once_after_a_pause_if_the_store_cannot_wait() -> None:
    def look(store: Store, tag: str | None, seconds: float) -> tuple[Any, list[float]]:
        def steps() -> Any:
            return (yield Watch("board", 10, tag, seconds))

        slept: list[float] = []
        return run_steps(steps(), store, sleep=slept.append), slept

    class CannotWait(MemoryStore):
        can_wait = False

        def wait_for_change(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("it cannot wait")

    for store, pause in ((MemoryStore(), []), (CannotWait(), [3600.0])):
        store.put("board", b"one")
        (data, tag), slept = look(store, None, 3600.0)
        assert (data, slept) == (b"one", pause)
        assert look(store, tag, 0.0) == (None, [])
        store.put("board", b"two")
        assert look(store, tag, 3600.0)[0][0] == b"two"
    (_, tag), _ = look(store, None, 0.0)
    assert look(store, tag, 3600.0) == (None, [3600.0])

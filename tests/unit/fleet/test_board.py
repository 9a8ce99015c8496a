"""The board: no step waits for a member that is late, and members that get versions late work ahead."""

from __future__ import annotations

from deltawire.fleet.rules.board import build_board
from deltawire.fleet.rules.roster import Roster
from deltawire.fleet.rules.round_state import RoundState
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.fleet.rules.staleness import KnownVersion
from deltawire.format.digest import Digest
from deltawire.format.records.fleet_parts import AttemptId, ObjectRef
from deltawire.format.records.member_records import Heartbeat, Lease, LinkReport
from deltawire.format.records.trainer_records import Board, Round, Sampling

RUN, NONCE, HASH = "ab" * 16, "cd" * 16, "ef" * 32
NOW = 1000.0
NEWEST = KnownVersion(10, 10, Digest.from_hex("0" * 32))


def round_of(number: int, for_step: int, tasks: int, oldest_step: int) -> RoundState:
    rows = ObjectRef(f"fleet/tasks/{number:010d}/{HASH}.json", 9, HASH)
    record = Round(RUN, number, 1, NONCE, for_step, oldest_step, tasks, rows, 60, Sampling(samples=1, max_tokens=8), 0)
    return RoundState(record, (({},),) * tasks, 1.0)


def hear(roster: Roster, member: str, step: int, at: float, *, working: tuple[AttemptId, ...] = (), goodput: int | None = None) -> None:
    link = None if goodput is None else LinkReport(goodput, 100, 0)
    beat = Heartbeat(RUN, member, NONCE, "idle", step, step, 0, 0, 0, working, 0, link=link)
    roster.heard(member, beat, at, at, at)


def fleet(**seconds: float) -> tuple[Roster, Scheduler]:
    """Return members that have version 10, and take so many seconds for a task."""
    roster, scheduler = Roster(RUN), Scheduler()
    scheduler.note_alive(list(seconds), NOW - 1000)
    for name, each in seconds.items():
        hear(roster, name, 10, NOW - 1)
        for number in range(5):
            at = NOW - each * (4 - number)
            scheduler.delivered(name, tokens=1000, offered=at - each, leased=at - each, finished=at)
    return roster, scheduler


def board(rounds: list[RoundState], roster: Roster, scheduler: Scheduler, now: float = NOW) -> Board:
    return build_board(
        rounds, roster, scheduler, run=RUN, epoch=1, newest=NEWEST, newest_open=12, lease_seconds=60, now=now, stop=False
    )  # fmt: skip


def lease(state: RoundState, task: int, member: str, at: float) -> None:
    """Let a member lease the task that it is offered."""
    attempt = AttemptId(state.record.round, task, state.tasks[task].next_attempt())
    state.tasks[task].invited.setdefault(attempt.attempt, set()).add(member)
    state.leased(attempt, Lease(RUN, *attempt, member, NONCE, 10, 0), at)


def test_an_idle_member_is_offered_the_task_that_a_slower_one_holds() -> None:
    roster, scheduler = fleet(far=50.0, near=10.0)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    assert board([state], roster, scheduler).offers == {"near": (AttemptId(0, 0, 1),)}
    assert board([state], roster, scheduler, NOW + 45).offers == {}  # it should be done any moment


def test_a_slower_member_gets_no_copies() -> None:
    roster, scheduler = fleet(far=50.0, near=10.0)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "near", NOW)
    assert board([state], roster, scheduler).offers == {}


def test_no_task_is_copied_while_there_is_other_work() -> None:
    roster, scheduler = fleet(far=50.0, near=10.0)
    state, later = round_of(0, 11, 1, 9), round_of(1, 12, 3, 10)
    lease(state, 0, "far", NOW)
    offers = board([state, later], roster, scheduler).offers
    assert {attempt.round for attempts in offers.values() for attempt in attempts} == {1}


def test_a_copy_goes_to_the_fastest_idle_member_that_has_delivered() -> None:
    roster, scheduler = fleet(far=50.0, near=10.0, nearer=8.0)
    hear(roster, "a-stranger", 10, NOW - 1)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    assert board([state], roster, scheduler).offers == {"nearer": (AttemptId(0, 0, 1),)}


def test_while_nothing_is_known_an_idle_member_gets_a_copy_before_patience_ends() -> None:
    roster, scheduler = Roster(RUN), Scheduler(patience=120)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    for later, expected in ((59, {}), (61, {"near": (AttemptId(0, 0, 1),)})):
        for name in ("far", "near"):
            hear(roster, name, 10, NOW + later, working=(AttemptId(0, 0, 0),) if name == "far" else ())
        assert board([state], roster, scheduler, now=NOW + later).offers == expected


def test_members_of_unknown_speed_get_copies_of_a_long_task_one_after_the_other_and_those_with_faster_links_first() -> None:
    roster, scheduler = Roster(RUN), Scheduler(patience=120)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    links = {"far": 100, "far-too": 100, "near": 9000, "unmeasured": None}
    held: dict[str, AttemptId] = {"far": AttemptId(0, 0, 0)}
    for number, (later, chosen) in enumerate(((61, "near"), (122, "far-too"), (183, "unmeasured")), start=1):
        for at, expected in ((later - 2, {}), (later, {chosen: (AttemptId(0, 0, number),)})):
            for name, goodput in links.items():
                hear(roster, name, 10, NOW + at, working=(held[name],) if name in held else (), goodput=goodput)
            assert board([state], roster, scheduler, now=NOW + at).offers == expected
        lease(state, 0, chosen, NOW + later)
        held[chosen] = AttemptId(0, 0, number)


def test_members_of_unknown_speed_get_copies_if_all_that_have_delivered_are_slow() -> None:
    roster, scheduler = fleet(far=234.0, farther=434.0)
    hear(roster, "unknown", 10, NOW - 1)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    for later, expected in ((59, {}), (61, {"unknown": (AttemptId(0, 0, 1),)}), (62, {"unknown": (AttemptId(0, 0, 1),)})):
        for name in ("far", "farther", "unknown"):
            hear(roster, name, 10, NOW + later, working=(AttemptId(0, 0, 0),) if name == "far" else ())
        assert board([state], roster, scheduler, now=NOW + later).offers == expected


def test_a_member_that_lost_its_copy_gets_the_next_one_after_a_rest() -> None:
    roster, scheduler = fleet(far=500.0)
    scheduler.note_alive(["far", "unlucky"], NOW)
    scheduler.delivered("unlucky", tokens=0, offered=NOW, leased=NOW, finished=NOW + 10)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    copy = {"unlucky": (AttemptId(0, 0, 1),)}
    for later, expected in ((65, {}), (71, copy), (73, copy)):  # it keeps an offer that it has not taken yet
        for name in ("far", "unlucky"):
            hear(roster, name, 10, NOW + later, working=(AttemptId(0, 0, 0),) if name == "far" else ())
        assert board([state], roster, scheduler, now=NOW + later).offers == expected


def test_only_as_many_tasks_are_copied_as_members_are_idle_and_the_latest_first() -> None:
    roster, scheduler = fleet(far=50.0, near=10.0)
    state = round_of(0, 11, 3, 9)
    for task, at in ((0, NOW - 3), (1, NOW), (2, NOW - 2)):
        lease(state, task, "far", at)
    assert board([state], roster, scheduler).offers == {"near": (AttemptId(0, 1, 1),)}


def test_a_task_that_two_slow_members_hold_is_offered_to_a_fast_one_once_the_newest_lease_is_long() -> None:
    roster, scheduler = fleet(far=500.0, farther=600.0, near=10.0)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    lease(state, 0, "farther", NOW + 10)
    for later, expected in ((69, {}), (71, {"near": (AttemptId(0, 0, 2),)})):  # half of patience after the newest lease
        for name, attempt in (("far", 0), ("farther", 1), ("near", None)):
            hear(roster, name, 10, NOW + later, working=() if attempt is None else (AttemptId(0, 0, attempt),))
        assert board([state], roster, scheduler, now=NOW + later).offers == expected


def test_a_task_of_two_holders_gets_no_copy_while_one_of_them_is_about_to_deliver() -> None:
    roster, scheduler = fleet(far=500.0, farther=75.0, near=10.0)
    state = round_of(0, 11, 1, 9)
    lease(state, 0, "far", NOW)
    lease(state, 0, "farther", NOW)
    for name, attempt in (("far", 0), ("farther", 1), ("near", None)):
        hear(roster, name, 10, NOW + 70, working=() if attempt is None else (AttemptId(0, 0, attempt),))
    assert board([state], roster, scheduler, now=NOW + 70).offers == {}


def test_a_member_that_gets_versions_late_works_on_the_last_round_that_its_version_admits() -> None:
    roster, scheduler = fleet(late=10.0, prompt=10.0)
    for step, at in ((8, 800.0), (9, 850.0), (10, 900.0)):
        roster.delays.published(step, at)
    for step, at in ((8, 980.0), (10, NOW - 1)):  # it takes about 100 seconds, and there is a version every 50
        hear(roster, "late", step, at)
    rounds = [round_of(0, 11, 2, 9), round_of(1, 12, 2, 10)]
    offers = board(rounds, roster, scheduler).offers
    assert {attempt.round for attempt in offers["late"]} == {1}
    assert {attempt.round for attempt in offers["prompt"]} == {0}
    alone = Roster(RUN)
    alone.delays = roster.delays
    hear(alone, "late", 10, NOW - 1)
    only = board([round_of(0, 11, 2, 9), round_of(1, 12, 2, 10)], alone, scheduler).offers
    assert {attempt.round for attempt in only["late"]} == {0, 1}  # no other member can do the first round


def test_a_member_that_gets_versions_early_is_offered_work_while_it_fetches_one() -> None:
    state = round_of(0, 12, 1, 10)
    for seconds, offers in ((5.0, {"near": (AttemptId(0, 0, 0),)}), (40.0, {})):
        roster, scheduler = Roster(RUN), Scheduler()
        for step in range(7, 11):
            published = NOW - 60.0 * (10 - step)
            roster.delays.published(step, published)
            if step < 10:
                hear(roster, "near", step, published + seconds)
        hear(roster, "near", 9, NOW)
        assert board([state], roster, scheduler).offers == offers

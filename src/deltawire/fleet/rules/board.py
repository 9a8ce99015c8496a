"""Makes the board: which task is offered to which member, given leases, results, heartbeats and shares of the work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Heartbeat
from ...format.records.trainer_records import Board
from .assignment import OpenTask
from .roster import Roster
from .round_state import HeldLease, RoundState
from .scheduler import Candidate, Scheduler
from .staleness import KnownVersion

_MOST_PER_MEMBER = 16
"""Largest number of offers to one member. More would only make the board larger: it is written again long before they are done."""

_MOST_OFFERS = 8_000
"""Largest number of offers on a board. Even if each goes to another member with the longest name, it stays below `MAX_BOARD_BYTES`."""

_MOST_LAPSES = 2
"""After this many members ignored an offer, or left with it, a task is offered to all: most names may have no process behind them."""


def build_board(
    rounds: Sequence[RoundState],
    roster: Roster,
    scheduler: Scheduler,
    *,
    run: str,
    epoch: int,
    newest: KnownVersion,
    newest_open: int,
    lease_seconds: int,
    now: float,
    stop: bool,
    excluded: Collection[str] = (),
) -> Board:
    """Return the board as it should be now. The rounds remember to which members their tasks are offered.

    Rounds for earlier steps come first. Rounds for steps beyond `newest_open` wait, because no member has a version that may work on them.

    Parameters
    ----------
    rounds
        The trainer's rounds.
    roster
        The members, by their heartbeats.
    scheduler
        Decides how many tasks each member is offered.
    run
        The run's id.
    epoch
        The trainer's epoch.
    newest
        The newest published version.
    newest_open
        The last training step whose rounds are offered.
    lease_seconds
        How long a member may be silent before its tasks go to others.
    now
        The time of the fleet clock.
    stop
        Tells all members to leave.
    excluded
        Members that are offered nothing.
    """
    alive = {member: beat for member, beat in roster.alive(now, lease_seconds).items() if member not in excluded}
    alive = _with_expected_versions(alive, roster, scheduler, newest, lease_seconds, now)
    scheduler.note_alive(alive.keys(), now)
    unsettled = sorted((one for one in rounds if one.is_accepting and not one.settled), key=lambda one: one.record.for_step)
    surveys = [(one, *one.survey(roster, scheduler, now)) for one in unsettled]
    holding: dict[str, int] = defaultdict(int)
    since: dict[str, float] = {}
    latest: dict[str, float] = {}
    for _, _, held in surveys:
        for one in held:
            assert one.lease is not None
            holding[one.lease.member] += 1
            since[one.lease.member] = min(one.since, since.get(one.lease.member, one.since))
            latest[one.lease.member] = max(one.since, latest.get(one.lease.member, one.since))
    if surveys and not stop:
        _offer_late_tasks(surveys, roster, scheduler, alive, holding, newest_open, now)
    offers = _Offers()
    later = sum(len(opened) for state, opened, _ in surveys if state.record.for_step <= newest_open)
    for state, opened, _ in surveys:
        if stop or state.record.for_step > newest_open:
            state.offer({}, now)
            continue
        ready = _without_members_for_later(state, surveys, roster, scheduler, alive, newest_open, lease_seconds, now)
        members = [Candidate(name, beat.step, holding[name], since.get(name), latest.get(name)) for name, beat in sorted(ready.items())]
        later -= len(opened)
        chosen = scheduler.offers(opened, members, oldest_step=state.record.oldest_step, now=now, later=later)
        for open_task in opened:
            before = open_task.offered_to
            state.tasks[open_task.task].lapses += before is not None and (before in scheduler.unresponsive or before not in alive)
        state.offer(chosen, now)
        for task, member in sorted(chosen.items()):
            holding[member] += 1
            offers.add(member, AttemptId(state.record.round, task, state.tasks[task].next_attempt()))
    for state, opened, _ in surveys:
        if not stop and state.record.for_step <= newest_open:
            able = [name for name, beat in alive.items() if beat.step is not None and beat.step >= state.record.oldest_step]
            _offer_to_all(state, opened, sorted(able, key=lambda name: (-scheduler.proven(name), _changing_order(name, now))), offers)
    return Board(run, epoch, newest.seq, newest.step, lease_seconds, offers.by_member(), stop)


def _with_expected_versions(
    alive: Mapping[str, Heartbeat], roster: Roster, scheduler: Scheduler, newest: KnownVersion, lease_seconds: int, now: float
) -> dict[str, Heartbeat]:
    """Return the heartbeats of these members as they will be in a moment: members that get versions early will have the newest one.

    So they are offered tasks that need it while they fetch it, and begin them as soon as they have it.
    """
    period = roster.delays.period
    if period is None:
        return dict(alive)
    expected = {}
    for name, beat in alive.items():
        if beat.step is not None and beat.step < newest.step:
            slack = lease_seconds / 4 + (scheduler.expected_seconds(name) or 0.0)
            delay = roster.delays.delay(name, now, slack)
            if delay is not None and delay <= period / 2:
                beat = replace(beat, step=newest.step, seq=newest.seq)
        expected[name] = beat
    return expected


def _without_members_for_later(
    state: RoundState,
    surveys: Sequence[tuple[RoundState, list[OpenTask], list[HeldLease]]],
    roster: Roster,
    scheduler: Scheduler,
    alive: Mapping[str, Heartbeat],
    newest_open: int,
    lease_seconds: int,
    now: float,
) -> Mapping[str, Heartbeat]:
    """Return the members that should be offered work of this round.

    A member that gets versions later than they follow each other does better to work ahead: on the last open round that its version
    admits, whose results are needed last. It is left out here if such a round has open tasks, and if other members can do this round.
    """
    later = [one.record for one, opened, _ in surveys if opened and state.record.for_step < one.record.for_step <= newest_open]
    period = roster.delays.period
    if not later or period is None:
        return alive
    ready = {}
    for name, beat in alive.items():
        slack = lease_seconds / 4 + (scheduler.expected_seconds(name) or 0.0)
        delay = roster.delays.delay(name, now, slack)
        works_ahead = delay is not None and delay > period and any((beat.step or 0) >= record.oldest_step for record in later)
        if not works_ahead:
            ready[name] = beat
    return ready if any(beat.step is not None and beat.step >= state.record.oldest_step for beat in ready.values()) else alive


def _offer_late_tasks(
    surveys: Sequence[tuple[RoundState, list[OpenTask], list[HeldLease]]],
    roster: Roster,
    scheduler: Scheduler,
    alive: Mapping[str, Heartbeat],
    holding: Mapping[str, int],
    newest_open: int,
    now: float,
) -> None:
    """Add tasks that late members hold to the open tasks of the first round, each for one member that would be idle otherwise.

    The fastest members that have delivered come first. All members that have delivered may be slow, so tasks that take long also go to
    members of unknown speed, one after the other. Those that report a faster link come first: if a member behind a slow link holds the
    task, a copy for another one behind the same link would not help.
    """
    state, opened, _ = surveys[0]
    idle = [
        name for name, beat in alive.items() if beat.step is not None and beat.step >= state.record.oldest_step and not holding.get(name)
    ]
    waiting = sum(len(each) for one, each, _ in surveys if one.record.for_step <= newest_open)
    proven = [name for name in idle if scheduler.proven(name)]
    fastest = sorted(proven, key=lambda name: (scheduler.expected_seconds(name) or 0.0, name))
    if len(fastest) > waiting:
        late = state.late_tasks(roster, scheduler, scheduler.expected_seconds(fastest[0]), now)
        _offer_copies(opened, late, fastest, len(fastest) - waiting)
    offered = {task.offered_to for task in state.tasks}
    unknown = [name for name in idle if not scheduler.proven(name) and (name in offered or scheduler.may_be_tried(name, now))]
    nearest = sorted(unknown, key=lambda name: (-_reported_goodput(alive[name]), name))
    _offer_copies(opened, state.long_tasks(roster, scheduler, now), nearest, len(unknown) - max(0, waiting - len(proven)))


def _offer_copies(opened: list[OpenTask], tasks: Sequence[OpenTask], members: list[str], most: int) -> None:
    """Add the first tasks that are not open yet, at most so many, each for the first of these members that has not failed at it."""
    known = {one.task for one in opened}
    for one in [each for each in tasks if each.task not in known][: max(0, most)]:
        name = next((each for each in members if each not in one.failed), members[0])
        members.remove(name)
        opened.append(replace(one, wanted=name))


def _reported_goodput(beat: Heartbeat) -> int:
    return 0 if beat.link is None or beat.link.goodput is None else beat.link.goodput


class _Offers:
    """The offers to each member, within the bounds of a board."""

    def __init__(self) -> None:
        self._offers: dict[str, list[AttemptId]] = defaultdict(list)
        self._left = _MOST_OFFERS

    def add(self, member: str, attempt: AttemptId) -> bool:
        """Offer the attempt to the member. Return whether the board shows the offer."""
        offers = self._offers[member]
        if attempt in offers:
            return True
        if len(offers) >= _MOST_PER_MEMBER or not self._left:
            return False
        offers.append(attempt)
        self._left -= 1
        return True

    def by_member(self) -> dict[str, tuple[AttemptId, ...]]:
        return {member: tuple(offers) for member, offers in self._offers.items() if offers}


def _offer_to_all(state: RoundState, opened: Sequence[OpenTask], members: Sequence[str], offers: _Offers) -> None:
    """Offer tasks that several members ignored to all other members too, in this order. A member that works will take them."""
    for one in opened:
        task = state.tasks[one.task]
        if task.lapses < _MOST_LAPSES or task.offered_to is None:
            continue
        attempt = task.next_attempt()
        for member in members:
            if member not in one.busy and offers.add(member, AttemptId(state.record.round, one.task, attempt)):
                task.invited.setdefault(attempt, set()).add(member)


def _changing_order(name: str, now: float) -> int:
    """Return a number to sort by that changes every second, so that every member comes first now and then."""
    return crc32(f"{int(now)} {name}".encode())

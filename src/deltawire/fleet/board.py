"""What the board says: which task is offered to whom, given leases, results, heartbeats and shares. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..format.fleet_records import Board, Place
from .roster import Roster
from .round_state import RoundState
from .scheduler import Candidate, Scheduler
from .steps import KnownVersion

_AHEAD = 16
"""So many offers a member is shown at most. More would only make the board larger: it is written anew long before they are done."""


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
) -> Board:
    """Returns the board as it should be at this time of the fleet clock. The rounds remember what they were offered as.

    Rounds for earlier steps come first. Rounds for steps beyond `newest_open` wait: nobody has a version yet that they could be done by.
    """
    alive = roster.alive(now, lease_seconds)
    scheduler.seen(alive.keys(), now)
    live = sorted((one for one in rounds if one.taking and not one.settled), key=lambda one: one.record.for_step)
    surveys = [(one, *one.survey(roster, scheduler, now)) for one in live]
    holding: dict[str, int] = defaultdict(int)
    since: dict[str, float] = {}
    latest: dict[str, float] = {}
    for _, _, held in surveys:
        for one in held:
            assert one.lease is not None
            holding[one.lease.member] += 1
            since[one.lease.member] = min(one.since, since.get(one.lease.member, one.since))
            latest[one.lease.member] = max(one.since, latest.get(one.lease.member, one.since))
    offers: dict[str, list[Place]] = defaultdict(list)
    for state, opened, _ in surveys:
        if stop or state.record.for_step > newest_open:
            state.offer({}, now)
            continue
        members = [Candidate(name, beat.step, holding[name], since.get(name), latest.get(name)) for name, beat in sorted(alive.items())]
        placed = scheduler.offers(opened, members, oldest_step=state.record.oldest_step, now=now)
        state.offer(placed, now)
        for task, member in sorted(placed.items()):
            holding[member] += 1
            if len(offers[member]) < _AHEAD:
                offers[member].append((state.record.round, task, state.tasks[task].next_attempt()))
    shown = {member: tuple(places) for member, places in offers.items()}
    return Board(run, epoch, newest.seq, newest.step, lease_seconds, shown, stop)

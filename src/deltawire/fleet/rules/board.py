"""What the board says: which task is offered to whom, given leases, results, heartbeats and shares. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

from ...format.records.fleet_parts import AttemptId
from ...format.records.trainer_records import Board
from .roster import Roster
from .round_state import RoundState
from .scheduler import Candidate, OpenTask, Scheduler
from .staleness import KnownVersion

_AHEAD = 16
"""So many offers a member is shown at most. More would only make the board larger: it is written anew long before they are done."""

_MOST_OFFERS = 8_000
"""A board with so many offers, each to a member of its own with the longest of names, still has less than `MAX_BOARD_BYTES`."""

_LAPSES = 2
"""A task that so many members let lie, or left with, is offered to everybody: most of the fleet may be names without a member."""


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
    offers = _Offers()
    for state, opened, _ in surveys:
        if stop or state.record.for_step > newest_open:
            state.offer({}, now)
            continue
        members = [Candidate(name, beat.step, holding[name], since.get(name), latest.get(name)) for name, beat in sorted(alive.items())]
        placed = scheduler.offers(opened, members, oldest_step=state.record.oldest_step, now=now)
        for open_task in opened:
            before = open_task.offered_to
            state.tasks[open_task.task].lapses += before is not None and (before in scheduler.deaf or before not in alive)
        state.offer(placed, now)
        for task, member in sorted(placed.items()):
            holding[member] += 1
            offers.add(member, AttemptId(state.record.round, task, state.tasks[task].next_attempt()))
    for state, opened, _ in surveys:
        if not stop and state.record.for_step <= newest_open:
            able = [name for name, beat in alive.items() if beat.step is not None and beat.step >= state.record.oldest_step]
            _offer_to_everybody(state, opened, sorted(able, key=lambda name: (-scheduler.proven(name), _lot(name, now))), offers)
    return Board(run, epoch, newest.seq, newest.step, lease_seconds, offers.shown(), stop)


class _Offers:
    """What each member is offered, within bounds."""

    def __init__(self) -> None:
        self._places: dict[str, list[AttemptId]] = defaultdict(list)
        self._left = _MOST_OFFERS

    def add(self, member: str, place: AttemptId) -> bool:
        """Returns whether the member is shown this place."""
        places = self._places[member]
        if place in places:
            return True
        if len(places) >= _AHEAD or not self._left:
            return False
        places.append(place)
        self._left -= 1
        return True

    def shown(self) -> dict[str, tuple[AttemptId, ...]]:
        return {member: tuple(places) for member, places in self._places.items() if places}


def _offer_to_everybody(state: RoundState, opened: Sequence[OpenTask], members: Sequence[str], offers: _Offers) -> None:
    """Offer tasks that several members let lie to all others as well, in this order: whoever is really there takes them."""
    for one in opened:
        task = state.tasks[one.task]
        if task.lapses < _LAPSES or task.offered_to is None:
            continue
        attempt = task.next_attempt()
        for member in members:
            if member not in one.busy and offers.add(member, AttemptId(state.record.round, one.task, attempt)):
                task.invited.setdefault(attempt, set()).add(member)


def _lot(name: str, now: float) -> int:
    """A number that changes every second, so that everybody comes first now and then."""
    return crc32(f"{int(now)} {name}".encode())

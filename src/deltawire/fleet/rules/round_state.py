"""One round as the trainer knows it: which member holds which task, which results came in, and which tasks should be offered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...format.records.fleet_files import AcceptedResult, Row
from ...format.records.fleet_parts import MOST_ATTEMPTS, AttemptId
from ...format.records.member_records import Lease
from ...format.records.trainer_records import Round
from ...format.rollouts import Rollouts
from ...store.fleet_keys import FIRST_FREE_ATTEMPT, RolloutKey
from .admission import Reason
from .assignment import OpenTask
from .live_tasks import live_rows
from .roster import Roster
from .scheduler import Scheduler

_MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The object under the key of a lease.

    Parameters
    ----------
    lease
        The lease; None for an object that is not a lease. It takes up the number of the attempt.
    since
        When the lease was taken, by the fleet clock.
    offered
        When the attempt was offered to the member.
    invited
        Whether the trainer offered this attempt to this member. The trainer never waits for other leases.
    is_timed
        Whether the trainer saw when the lease began. Otherwise `since` rests on the store's clock alone, or is later than the beginning.
    """

    lease: Lease | None
    since: float
    offered: float
    invited: bool = True
    is_timed: bool = True


@dataclass(slots=True)
class TaskState:
    """One task of a round, by the numbers of its attempts.

    Parameters
    ----------
    leases
        The leases that were read.
    invited
        The members to which this trainer has offered an attempt.
    ended
        Attempts whose results were refused.
    lost
        Attempts that were found to have no result in time.
    accepted
        The accepted result.
    rollouts
        The completions of the accepted result.
    offered_to
        The member that the task is offered to.
    offered_at
        When that offer was first made.
    lapses
        How often a member ignored an offer of the task, or disappeared before it took the offer.
    free
        The free attempt that is offered while all attempts that need a lease are taken.
    numbered_at
        When that free attempt got its number.
    """

    leases: dict[int, HeldLease] = field(default_factory=dict)
    invited: dict[int, set[str]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    accepted: AcceptedResult | None = None
    rollouts: Rollouts | None = None
    offered_to: str | None = None
    offered_at: float = 0.0
    lapses: int = 0
    free: int = MOST_ATTEMPTS - 1
    numbered_at: float = float("-inf")

    @property
    def is_free(self) -> bool:
        """True if all attempts that need a lease are taken."""
        return all(attempt in self.leases for attempt in range(FIRST_FREE_ATTEMPT))

    def next_attempt(self) -> int:
        """Return the lowest attempt that no member has taken; once all that need a lease are taken, the free attempt that is offered."""
        return self.free if self.is_free else next(attempt for attempt in range(FIRST_FREE_ATTEMPT) if attempt not in self.leases)

    def offer_to(self, member: str | None, now: float, patience: float) -> None:
        """Note that the task is offered to this member from now on, or to no member.

        Every offer of a free attempt gets the next number, and so does an offer that was ignored for longer than `patience` seconds,
        because a member takes each number only once.
        """
        is_new = member != self.offered_to
        if is_new:
            self.offered_to, self.offered_at = member, now
        if member is None:
            return
        if self.is_free and (is_new or self.free in self.leases or self.free in self.ended or now - self.numbered_at > patience):
            self.free = self.free + 1 if self.free + 1 < MOST_ATTEMPTS else FIRST_FREE_ATTEMPT
            self.numbered_at = now
            self.leases.pop(self.free, None)
            self.invited.pop(self.free, None)
            self.ended.discard(self.free)
            self.lost.discard(self.free)
        self.invited.setdefault(self.next_attempt(), set()).add(member)


class RoundState:
    """A round that is open, or that was acknowledged (`closed`).

    `acknowledgement` holds the bytes of the acknowledgement as soon as they may have been written.

    Parameters
    ----------
    record
        The record of the round.
    rows
        The rows of each task.
    quorum
        The part of the tasks that must have a result before the step is trained.
    prompts
        The token ids of each task's prompts; None if the trainer has no tokenizer.
    adopted
        Whether an earlier trainer opened the round. Attempts that members had begun when this trainer first looked were offered by it.
    """

    def __init__(
        self,
        record: Round,
        rows: tuple[tuple[Row, ...], ...],
        quorum: float,
        prompts: Sequence[Sequence[Sequence[int]]] | None = None,
        *,
        adopted: bool = False,
    ) -> None:
        self.record = record
        self.rows = rows
        self.prompts = prompts
        self.tasks = [TaskState() for _ in range(record.tasks)]
        self.live = live_rows(rows)
        """The live tasks, by number. They are never offered; the trainer does them itself."""
        self.open_live = set(self.live)
        """The live tasks that are neither accepted nor given up."""
        offered = record.tasks - len(self.live)
        self.needed = max(1, math.ceil(quorum * offered - 1e-9)) if offered else 0
        self.rejected: Counter[Reason] = Counter()
        self.seen: set[RolloutKey] = set()
        self.adopted = adopted
        self.looked = False
        self.closed = False
        self.acknowledgement: bytes | None = None
        self._accepted = 0

    @property
    def settled(self) -> bool:
        """True if enough results are accepted to train on, or if the round was already acknowledged."""
        return self.acknowledgement is not None or (self._accepted >= self.needed and not self.open_live)

    @property
    def is_accepting(self) -> bool:
        """True while results are accepted. An acknowledged round accepts no more."""
        return not self.closed and self.acknowledgement is None

    def unknown_leases(self, listed: Iterable[AttemptId]) -> list[AttemptId]:
        """Return the attempts, of those listed, that belong to a task, need a lease, and have no known lease yet."""
        return [
            attempt
            for attempt in listed
            if attempt.task < len(self.tasks)
            and attempt.attempt < FIRST_FREE_ATTEMPT
            and attempt.attempt not in self.tasks[attempt.task].leases
        ]

    def leased(self, attempt: AttemptId, lease: Lease | None, since: float, *, is_timed: bool = True) -> None:
        """Note a lease that was read; None for an object that is not a lease."""
        task = self.tasks[attempt.task]
        offered = task.offered_at if lease is not None and lease.member == task.offered_to else since
        invited = lease is not None and (lease.member in task.invited.get(attempt.attempt, ()) or (self.adopted and not self.looked))
        task.leases[attempt.attempt] = HeldLease(lease, since, min(offered, since), invited, is_timed)

    def note_free_attempts(self, roster: Roster, now: float) -> None:
        """Count free attempts as leased by the members that work on them, as their heartbeats say. This ends the first look."""
        for member, attempts in roster.working_on(self.record.round).items():
            for task, attempt in attempts:
                if task >= len(self.tasks) or attempt < FIRST_FREE_ATTEMPT or not self.tasks[task].is_free:
                    continue
                state = self.tasks[task]
                invited = member in state.invited.get(attempt, ()) or (self.adopted and not self.looked)
                if invited and attempt not in state.leases:
                    self.hold_free_attempt(AttemptId(self.record.round, task, attempt), member, now, is_timed=self.looked)
        self.looked = True

    def hold_free_attempt(self, attempt: AttemptId, member: str, now: float, *, is_timed: bool) -> None:
        """Note that a member works on a free attempt, as if it had a lease."""
        task = self.tasks[attempt.task]
        lease = Lease(self.record.id, *attempt, member, "0" * 32, 0, 0)
        offered = task.offered_at if member == task.offered_to else now
        task.leases[attempt.attempt] = HeldLease(lease, now, min(offered, now), is_timed=is_timed)

    def may_be_leased(self, attempt: AttemptId) -> bool:
        """Return whether a result of this attempt is worth reading: its lease has an object, or it needs no lease."""
        task = self.tasks[attempt.task]
        return attempt.attempt in task.leases or (attempt.attempt >= FIRST_FREE_ATTEMPT and task.is_free)

    def may_deliver_freely(self, attempt: AttemptId, member: str) -> bool:
        """Return whether this trainer, or perhaps an earlier one, asked this member for this free attempt."""
        task = self.tasks[attempt.task]
        held = task.leases.get(attempt.attempt)
        known = (held.lease.member,) if held is not None and held.lease is not None else ()
        return task.is_free and (member in known or member in task.invited.get(attempt.attempt, ()) or self.adopted)

    def accept(self, key: RolloutKey, size: int, rollouts: Rollouts) -> None:
        """Note the first valid result of a task."""
        task = self.tasks[key.task]
        assert task.accepted is None
        task.accepted = AcceptedResult(key.task, key.attempt, key.blake3, size, rollouts.member)
        task.rollouts = rollouts
        self._accepted += key.task not in self.live
        self.open_live.discard(key.task)
        self.seen.add(key)

    def refuse(self, key: RolloutKey, reason: Reason) -> None:
        """Note that a result was refused. Its attempt is over, unless the result did not come from the holder of the lease."""
        self.rejected[reason] += 1
        self.seen.add(key)
        if key.task < len(self.tasks) and reason != "unleased":
            self.tasks[key.task].ended.add(key.attempt)

    def live_leases(self, task: TaskState, roster: Roster, now: float) -> list[HeldLease]:
        """Return the leases of a task that still hold."""
        return [
            held
            for attempt, held in task.leases.items()
            if held.lease is not None
            and held.invited
            and attempt not in task.ended
            and roster.is_lease_alive(held.lease, held.since, now, self.record.lease_seconds)
        ]

    def newly_lost(self, roster: Roster, now: float) -> list[HeldLease]:
        """Return the leases that were lost since the last call: they expired, or another attempt was accepted first."""
        lost = []
        for task in self.tasks:
            for attempt, held in task.leases.items():
                won = task.accepted is not None and task.accepted.attempt == attempt
                if held.lease is None or not held.invited or won or attempt in task.ended or attempt in task.lost:
                    continue
                if task.accepted is not None or not roster.is_lease_alive(held.lease, held.since, now, self.record.lease_seconds):
                    task.lost.add(attempt)
                    lost.append(held)
        return lost

    def survey(self, roster: Roster, scheduler: Scheduler, now: float) -> tuple[list[OpenTask], list[HeldLease]]:
        """Return the tasks that should be offered, and the leases that hold."""
        opened, held = [], []
        for number, task in enumerate(self.tasks):
            if task.accepted is not None or number in self.live:
                continue
            holding = self.live_leases(task, roster, now)
            held += holding
            # Each further copy waits twice as long, so that the whole fleet does not work on one task that is merely long.
            times = 2.0 ** min(len(holding) - 1, _MOST_DOUBLINGS)
            if not all(one.lease is not None and scheduler.is_straggler(one.lease.member, one.since, now, times=times) for one in holding):
                continue
            opened.append(_open_task(number, task, holding))
        return opened, held

    def late_tasks(self, roster: Roster, scheduler: Scheduler, others: float | None, now: float) -> list[OpenTask]:
        """Return the tasks that members hold and another one that is idle would finish earlier than all of them; the latest first.

        A task that several members hold gets a further copy only once its newest lease is long, so that copies come one after the other.
        `others` is how many seconds the idle member needs for a task; None if nothing is known.
        """
        late: list[tuple[float, OpenTask]] = []
        for number, task in enumerate(self.tasks):
            held = [] if task.accepted is not None else self.live_leases(task, roster, now)
            holders = [(one.lease.member, one.since) for one in held if one.lease is not None]
            if not holders or (len(holders) > 1 and not scheduler.is_long(max(since for _, since in holders), now)):
                continue
            if all(scheduler.is_worth_a_copy(member, since, now, others) for member, since in holders):
                done = min(since + (scheduler.expected_seconds(member) or 0.0) for member, since in holders)
                late.append((-done, _open_task(number, task, held)))
        return [one for _, one in sorted(late, key=lambda each: (each[0], each[1].task))]

    def long_tasks(self, roster: Roster, scheduler: Scheduler, now: float) -> list[OpenTask]:
        """Return the tasks whose newest lease has lasted long, however many members hold them; the longest first."""
        long: list[tuple[float, OpenTask]] = []
        for number, task in enumerate(self.tasks):
            held = [] if task.accepted is not None else self.live_leases(task, roster, now)
            newest = max((one.since for one in held), default=now)
            if scheduler.is_long(newest, now):
                long.append((newest, _open_task(number, task, held)))
        return [one for _, one in sorted(long, key=lambda each: (each[0], each[1].task))]

    def offer(self, offers: dict[int, str], now: float) -> None:
        """Remember which member each task is offered to from now on. `offers` maps tasks to members."""
        for number, task in enumerate(self.tasks):
            task.offer_to(offers.get(number), now, self.record.lease_seconds)


def _open_task(number: int, task: TaskState, held: Sequence[HeldLease]) -> OpenTask:
    """Return a task that should be offered, even while members hold it."""
    busy = frozenset(one.lease.member for one in held if one.lease is not None)
    tried = frozenset(one.lease.member for one in task.leases.values() if one.lease is not None and one.invited)
    return OpenTask(number, task.offered_to, task.offered_at, busy, tried - busy)

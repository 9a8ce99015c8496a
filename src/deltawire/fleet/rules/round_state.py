"""One round as the trainer knows it: who holds which task, what came in, and what should be offered. Pure."""

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
from .roster import Roster
from .scheduler import OpenTask, Scheduler

_MOST_DOUBLINGS = 4


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease and when, by the fleet clock, it was offered and taken. None for an object that is no lease: it takes up its number.

    `invited` says that the trainer offered this attempt to this member. Leases that nobody was invited to are never waited for.
    """

    lease: Lease | None
    since: float
    offered: float
    invited: bool = True


@dataclass(slots=True)
class TaskState:
    """One task. `ended` are the attempts whose results were refused, `lost` those that were found to have come to nothing.

    `invited` are the members to whom this trainer has offered an attempt. `free` is the free attempt that is offered while all attempts
    that need a lease are taken. `lapses` counts how often a member let an offer of the task lie, or was gone
    before it took it up.
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
    numbered_at: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether all attempts that need a lease are taken."""
        return all(attempt in self.leases for attempt in range(FIRST_FREE_ATTEMPT))

    def next_attempt(self) -> int:
        """Returns the lowest attempt that nobody has taken; once all that need a lease are taken, the free attempt that is offered now."""
        return self.free if self.is_free else next(attempt for attempt in range(FIRST_FREE_ATTEMPT) if attempt not in self.leases)

    def offer_to(self, member: str | None, now: float, patience: float) -> None:
        """Note which members are offered the task from now on.

        Every offer of a free attempt gets the next number, and so does one that lay there for longer than `patience`: a member takes up
        each number once.
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
    """A round that is open, or was acknowledged (`closed`). `sealed` is the acknowledgement's bytes once it may have been written.

    `prompts` are the token ids of each task's prompts; None if the trainer has no tokenizer. `adopted` says that an earlier trainer opened
    the round. What members had begun when this trainer first looked was offered by that one.
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
        self.needed = max(1, math.ceil(quorum * record.tasks - 1e-9))
        self.rejected: Counter[Reason] = Counter()
        self.seen: set[RolloutKey] = set()
        self.adopted = adopted
        self.looked = False
        self.closed = False
        self.sealed: bytes | None = None
        self._accepted = 0

    @property
    def settled(self) -> bool:
        """Whether enough results are accepted to train on, or it was acknowledged already."""
        return self.sealed is not None or self._accepted >= self.needed

    @property
    def taking(self) -> bool:
        """Whether results are still accepted: a round takes no more than it was acknowledged with."""
        return not self.closed and self.sealed is None

    def unknown_leases(self, listed: Iterable[AttemptId]) -> list[AttemptId]:
        """Those that are not known yet, of tasks that there are, and of attempts that need a lease."""
        return [
            key
            for key in listed
            if key.task < len(self.tasks) and key.attempt < FIRST_FREE_ATTEMPT and key.attempt not in self.tasks[key.task].leases
        ]

    def leased(self, key: AttemptId, lease: Lease | None, since: float) -> None:
        """A lease was read."""
        task = self.tasks[key.task]
        offered = task.offered_at if lease is not None and lease.member == task.offered_to else since
        invited = lease is not None and (lease.member in task.invited.get(key.attempt, ()) or (self.adopted and not self.looked))
        task.leases[key.attempt] = HeldLease(lease, since, min(offered, since), invited)

    def note_free_attempts(self, roster: Roster, now: float) -> None:
        """Count free attempts as leased by the members who say in their heartbeats that they work on them. Ends the first look."""
        for member, places in roster.working_on(self.record.round).items():
            for task, attempt in places:
                if task >= len(self.tasks) or attempt < FIRST_FREE_ATTEMPT or not self.tasks[task].is_free:
                    continue
                state = self.tasks[task]
                invited = member in state.invited.get(attempt, ()) or (self.adopted and not self.looked)
                if invited and attempt not in state.leases:
                    self.hold_free_attempt(AttemptId(self.record.round, task, attempt), member, now)
        self.looked = True

    def hold_free_attempt(self, key: AttemptId, member: str, now: float) -> None:
        """A member works on a free attempt: what a lease would say is known without one."""
        lease = Lease(self.record.id, *key, member, "0" * 32, 0, 0)
        offered = self.tasks[key.task].offered_at if member == self.tasks[key.task].offered_to else now
        self.tasks[key.task].leases[key.attempt] = HeldLease(lease, now, min(offered, now))

    def may_be_leased(self, key: AttemptId) -> bool:
        """Returns whether a result of this attempt need be read at all: something lies under its lease's key, or it needs no lease."""
        return key.attempt in self.tasks[key.task].leases or (key.attempt >= FIRST_FREE_ATTEMPT and self.tasks[key.task].is_free)

    def may_deliver_freely(self, key: AttemptId, member: str) -> bool:
        """Returns whether a result of this free attempt by this member was asked for, by this trainer or perhaps by an earlier one."""
        task = self.tasks[key.task]
        held = task.leases.get(key.attempt)
        known = (held.lease.member,) if held is not None and held.lease is not None else ()
        return task.is_free and (member in known or member in task.invited.get(key.attempt, ()) or self.adopted)

    def accept(self, place: RolloutKey, size: int, rollouts: Rollouts) -> None:
        """A result was found valid, the first of its task."""
        task = self.tasks[place.task]
        assert task.accepted is None
        task.accepted = AcceptedResult(place.task, place.attempt, place.blake3, size, rollouts.member)
        task.rollouts = rollouts
        self._accepted += 1
        self.seen.add(place)

    def refuse(self, place: RolloutKey, reason: Reason) -> None:
        """A result was refused: its task is open again, unless it was not the lease holder's."""
        self.rejected[reason] += 1
        self.seen.add(place)
        if place.task < len(self.tasks) and reason != "unleased":
            self.tasks[place.task].ended.add(place.attempt)

    def holders(self, task: TaskState, roster: Roster, now: float) -> list[HeldLease]:
        """The leases of a task that hold."""
        return [
            held
            for attempt, held in task.leases.items()
            if held.lease is not None
            and held.invited
            and attempt not in task.ended
            and roster.lease_lives(held.lease, held.since, now, self.record.lease_seconds)
        ]

    def newly_lost(self, roster: Roster, now: float) -> list[HeldLease]:
        """Leases that came to nothing since this was asked before: they expired, or another attempt was accepted first."""
        lost = []
        for task in self.tasks:
            for attempt, held in task.leases.items():
                won = task.accepted is not None and task.accepted.attempt == attempt
                if held.lease is None or not held.invited or won or attempt in task.ended or attempt in task.lost:
                    continue
                if task.accepted is not None or not roster.lease_lives(held.lease, held.since, now, self.record.lease_seconds):
                    task.lost.add(attempt)
                    lost.append(held)
        return lost

    def survey(self, roster: Roster, scheduler: Scheduler, now: float) -> tuple[list[OpenTask], list[HeldLease]]:
        """The tasks that somebody should take, and the leases that hold."""
        opened, held = [], []
        for number, task in enumerate(self.tasks):
            if task.accepted is not None:
                continue
            holding = self.holders(task, roster, now)
            held += holding
            # Each further copy is begun only after twice as long: a task that is just long is not given to the whole fleet.
            times = 2.0 ** min(len(holding) - 1, _MOST_DOUBLINGS)
            if not all(one.lease is not None and scheduler.is_straggler(one.lease.member, one.since, now, times=times) for one in holding):
                continue
            busy = frozenset(one.lease.member for one in holding if one.lease is not None)
            tried = frozenset(one.lease.member for one in task.leases.values() if one.lease is not None and one.invited)
            opened.append(OpenTask(number, task.offered_to, task.offered_at, busy, tried - busy))
        return opened, held

    def offer(self, offers: dict[int, str], now: float) -> None:
        """Remember who is offered what from now on."""
        for number, task in enumerate(self.tasks):
            task.offer_to(offers.get(number), now, self.record.lease_seconds)

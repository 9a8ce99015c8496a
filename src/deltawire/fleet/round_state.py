"""One round as the trainer knows it: who holds which task, what came in, and what should be offered. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import TaskExhausted
from ..format.fleet_files import AcceptedResult, Row
from ..format.fleet_records import Lease, Round
from ..format.rollouts import Rollouts
from ..store.fleet_keys import MOST_ATTEMPTS, LeaseKey, RolloutKey
from .admission import Reason
from .roster import Roster
from .scheduler import OpenTask, Scheduler


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease and when, by the fleet clock, it was offered and taken. None for an object that is no lease: it takes up its number."""

    lease: Lease | None
    since: float
    offered: float


@dataclass(slots=True)
class TaskState:
    """One task. `ended` are the attempts whose results were refused, `lost` those that were found to have come to nothing."""

    leases: dict[int, HeldLease] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    accepted: AcceptedResult | None = None
    rollouts: Rollouts | None = None
    offered_to: str | None = None
    offered_at: float = 0.0

    def next_attempt(self) -> int:
        """The lowest attempt that nobody has taken. `TaskExhausted` if there is none left."""
        attempt = 0
        while attempt in self.leases:
            attempt += 1
        if attempt >= MOST_ATTEMPTS:
            raise TaskExhausted(f"{MOST_ATTEMPTS} attempts at a task gave no result that could be accepted.")
        return attempt


class RoundState:
    """A round that is open, or was acknowledged (`closed`). `sealed` is the acknowledgement's bytes once it may have been written.

    `prompts` are the token ids of each task's prompts; None if the trainer has no tokenizer.
    """

    def __init__(
        self,
        record: Round,
        rows: tuple[tuple[Row, ...], ...],
        quorum: float,
        prompts: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self.record = record
        self.rows = rows
        self.prompts = prompts
        self.tasks = [TaskState() for _ in range(record.tasks)]
        self.needed = max(1, math.ceil(quorum * record.tasks - 1e-9))
        self.rejected: Counter[Reason] = Counter()
        self.seen: set[RolloutKey] = set()
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

    def unknown_leases(self, listed: Iterable[LeaseKey]) -> list[LeaseKey]:
        """Those that are not known yet, of tasks that there are."""
        return [key for key in listed if key.task < len(self.tasks) and key.attempt not in self.tasks[key.task].leases]

    def leased(self, key: LeaseKey, lease: Lease | None, since: float) -> None:
        """A lease was read."""
        task = self.tasks[key.task]
        offered = task.offered_at if lease is not None and lease.member == task.offered_to else since
        task.leases[key.attempt] = HeldLease(lease, since, min(offered, since))

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
            and attempt not in task.ended
            and roster.lease_lives(held.lease, held.since, now, self.record.lease_seconds)
        ]

    def newly_lost(self, roster: Roster, now: float) -> list[HeldLease]:
        """Leases that came to nothing since this was asked before: they expired, or another attempt was accepted first."""
        lost = []
        for task in self.tasks:
            for attempt, held in task.leases.items():
                won = task.accepted is not None and task.accepted.attempt == attempt
                if held.lease is None or won or attempt in task.ended or attempt in task.lost:
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
            times = 2.0 ** (len(holding) - 1)
            if not all(one.lease is not None and scheduler.is_straggler(one.lease.member, one.since, now, times=times) for one in holding):
                continue
            busy = frozenset(one.lease.member for one in holding if one.lease is not None)
            tried = frozenset(one.lease.member for one in task.leases.values() if one.lease is not None)
            opened.append(OpenTask(number, task.offered_to, task.offered_at, busy, tried - busy))
        return opened, held

    def offer(self, offers: dict[int, str], now: float) -> None:
        """Remember who is offered what from now on."""
        for number, task in enumerate(self.tasks):
            member = offers.get(number)
            if member != task.offered_to:
                task.offered_to, task.offered_at = member, now

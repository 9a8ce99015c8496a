"""Who is offered how much: shares in proportion to the speed that the trainer itself has measured.

Pure: no clock, no store. Times are seconds of the fleet clock (`FleetClock`); names and versions of members are what they
say of themselves, and a lie about those wins nothing but offers that end in rejected work, which counts as speed zero. What a member says
about its speed is not even an argument here.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Candidate", "OpenTask", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member that lives, as the trainer sees it now.

    `step` is the training step of the version that it has, None while it has none. `holding` counts the tasks that it has leased and not
    delivered; `since` is when the oldest of these leases began, `latest` when the last one did.
    """

    name: str
    step: int | None
    holding: int = 0
    since: float | None = None
    latest: float | None = None


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that somebody should take. `offered_to` has had it since `offered_at`, and keeps it if that is fair: who is reading the board
    need not race.

    `busy` are members that still work on an earlier attempt of it, and are never offered it again; `failed` those whose attempts expired
    or were rejected: they get it only if nobody else can.
    """

    task: int
    offered_to: str | None = None
    offered_at: float = 0.0
    busy: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Record:
    """What the trainer has measured of one member."""

    rate: float | None = None
    tokens: int = 0
    elapsed: float = 0.0
    finished: float = float("-inf")
    seconds_per_task: float | None = None
    proven: int = 0
    live: bool = True
    rested: float = float("-inf")


@dataclass(slots=True)
class Scheduler:
    """Measures members and shares open tasks out among them.

    Speed is τ ← `beta`·τ + (1−`beta`)·tokens/elapsed: tokens that were accepted, over the time since the member's result before or since
    the work was offered, so that syncing counts. Results that come in a burst are measured together over at least `window` seconds.
    Who joins, or comes back, holds one task at first and twice as many after each accepted result, until `ramp` of them have proven it;
    until it is measured it counts as of median speed. Who got nothing for `rest_seconds`, being slow or rejected, is offered one task to
    show what it does now. A lease is a straggler after `straggler` times what such tasks take, the fleet or the member itself, or after
    `patience` seconds while nobody knows; so long too may an offer lie there while its member takes up nothing.
    """

    beta: float = 0.8
    window: float = 1.0
    ramp: int = 3
    rest_seconds: float = 60.0
    straggler: float = 3.0
    patience: float = 120.0
    _records: dict[str, _Record] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=65))
    _sorted_durations: list[float] = field(default_factory=list)
    _tokens_per_task: float | None = None
    deaf: set[str] = field(default_factory=set)
    """Members that let offers of the round lie that was asked for last."""

    def __post_init__(self) -> None:
        if not (
            0 <= self.beta < 1
            and self.window > 0
            and self.ramp >= 0
            and self.rest_seconds >= 0
            and self.straggler > 1
            and self.patience > 0
        ):
            raise ValueError(
                "beta must be in [0, 1), window positive, ramp and rest_seconds at least 0, straggler above 1, patience positive"
            )

    def seen(self, live: Collection[str], now: float) -> None:
        """Tell who lives. One that was gone begins its ramp again; what was measured of it is kept."""
        for name in live:
            record = self._records.get(name)
            if record is None:
                self._records[name] = _Record(rested=now)
            elif not record.live:
                record.live, record.proven, record.rested = True, 0, now
                record.tokens, record.elapsed = 0, 0.0
        for name, record in self._records.items():
            record.live = name in live

    def delivered(self, member: str, *, tokens: int, offered: float, leased: float, finished: float) -> None:
        """A result came in: `tokens` of it were accepted. Times are those of offer, lease and result by the fleet clock.

        0 tokens: it was rejected, or was given up at `finished` as its lease expired or somebody else was faster. Tell them of each member
        in the order in which they finished. Waiting for an offer is not held against a member; everything between that and the result
        is, also what it did before it took the lease.
        """
        record = self._records.setdefault(member, _Record(rested=finished))
        record.tokens += tokens
        record.elapsed += max(0.0, finished - max(offered, record.finished))
        record.finished = record.rested = max(record.finished, finished)
        if record.elapsed >= self.window:
            measured = record.tokens / record.elapsed
            record.rate = measured if record.rate is None else self._blend(record.rate, measured)
            record.tokens, record.elapsed = 0, 0.0
        if tokens == 0:
            record.proven = 0
            return
        record.proven += 1
        duration = max(0.0, finished - leased)
        record.seconds_per_task = duration if record.seconds_per_task is None else self._blend(record.seconds_per_task, duration)
        self._tokens_per_task = tokens if self._tokens_per_task is None else self._blend(self._tokens_per_task, tokens)
        if len(self._durations) == self._durations.maxlen:
            self._sorted_durations.remove(self._durations[0])
        self._durations.append(duration)
        insort(self._sorted_durations, duration)

    def rate(self, member: str) -> float | None:
        """Tokens per second as measured so far; None if nothing was yet."""
        record = self._records.get(member)
        return None if record is None else record.rate

    def offers(self, tasks: Sequence[OpenTask], members: Sequence[Candidate], *, oldest_step: int, now: float) -> dict[int, str]:
        """Task → member for the open tasks of one round. Every task is offered, unless nobody eligible is free to be offered it.

        Who has let an offer lie, and done nothing else meanwhile, counts as having delivered nothing, and others come first. Members
        whose version is older than `oldest_step` get nothing until they have caught up. With several open rounds ask for the oldest
        first, and count what it offers as held when asking for the next.
        """
        eligible = sorted(
            (one for one in members if one.step is not None and one.step >= oldest_step and self._record(one.name).live),
            key=lambda one: one.name,
        )
        self.deaf = set()
        if not eligible or not tasks:
            return {}
        for one in eligible:
            if one.holding:
                self._record(one.name).rested = now
        deaf = self.deaf = self._deaf(tasks, eligible, now)
        counts = self._counts(len(tasks), [one for one in eligible if one.name not in deaf] or eligible, now)
        offers = _place(tasks, counts, deaf)
        for name in offers.values():
            self._record(name).rested = now
        return offers

    def proven(self, member: str) -> int:
        """How many results of a member in a row were accepted, since it joined or one of them was refused."""
        record = self._records.get(member)
        return 0 if record is None else record.proven

    def shares(self, members: Sequence[str], now: float = float("-inf")) -> dict[str, float]:
        """Each member's part of the work if all could take it, summing up to 1: for views."""
        weights = self._weights([Candidate(name, 0) for name in members], now)
        return {name: weight / sum(weights) for name, weight in zip(members, weights, strict=True)}

    def is_straggler(self, member: str, leased: float, now: float, *, times: float = 1.0) -> bool:
        """Whether a lease has lasted so long, or `times` as long, that somebody else should be offered the task too."""
        return now - leased > times * self._too_long(member)

    def _too_long(self, member: str) -> float:
        """Seconds after which a member that should deliver a task is overdue."""
        if not self._sorted_durations:
            return self.patience
        typical = self._sorted_durations[len(self._sorted_durations) // 2]
        return self.straggler * max(typical, self._record(member).seconds_per_task or 0.0, self.window)

    def _deaf(self, tasks: Sequence[OpenTask], eligible: Sequence[Candidate], now: float) -> set[str]:
        """Members that have not taken up what they were offered, nor delivered or leased anything since."""
        offered: dict[str, float] = {}
        for task in tasks:
            if task.offered_to is not None:
                offered[task.offered_to] = min(task.offered_at, offered.get(task.offered_to, task.offered_at))
        deaf = set()
        for one in eligible:
            if one.name not in offered:
                continue
            heard = max(offered[one.name], self._record(one.name).finished, float("-inf") if one.latest is None else one.latest)
            if now - heard > self._too_long(one.name):
                deaf.add(one.name)
                self.delivered(one.name, tokens=0, offered=heard, leased=heard, finished=now)
        return deaf

    def _record(self, member: str) -> _Record:
        return self._records.setdefault(member, _Record())

    def _blend(self, old: float, new: float) -> float:
        return self.beta * old + (1 - self.beta) * new

    def _counts(self, total: int, eligible: Sequence[Candidate], now: float) -> dict[str, int]:
        """How many of `total` open tasks each member should be offered, given what it holds."""
        weights = self._weights(eligible, now)
        holding = [float(one.holding) for one in eligible]
        rooms = [self._room(one, total) for one in eligible]
        first = fill(total, weights, holding, rooms)
        beyond = total - sum(first)
        wanted = first
        if beyond > 1e-9:  # nobody proven is there to take it: better to trust newcomers than to let work lie
            held = [h + x for h, x in zip(holding, first, strict=True)]
            wanted = [x + y for x, y in zip(first, fill(beyond, weights, held, [float(total)] * len(held)), strict=True)]
        counts = largest_remainders(total, wanted)
        self._let_the_rested_try(counts, eligible, now)
        return {one.name: count for one, count in zip(eligible, counts, strict=True)}

    def _room(self, one: Candidate, total: int) -> float:
        proven = self._record(one.name).proven
        return float(total) if proven >= self.ramp else float(max(0, 2**proven - one.holding))

    def _weights(self, members: Sequence[Candidate], now: float) -> list[float]:
        """Current speeds, always positive. A member that is overdue counts as if it delivered at this moment."""
        known = sorted(record.rate for one in members if (record := self._record(one.name)).rate is not None)
        median = max(known[len(known) // 2], 1e-9) if known else 1.0
        weights = []
        for one in members:
            record = self._record(one.name)
            rate = median if record.rate is None else record.rate
            if one.since is not None and self._tokens_per_task is not None and now > one.since:
                at_most = self._tokens_per_task / (now - one.since)
                rate = min(rate, at_most if self.is_straggler(one.name, one.since, now) else self._blend(rate, at_most))
            weights.append(max(rate, 1e-6 * median))
        return weights

    def _let_the_rested_try(self, counts: list[int], eligible: Sequence[Candidate], now: float) -> None:
        """One task for who had none for longest, taken from who has most. Without this nobody would notice that it is fast again."""
        total = sum(counts)
        rested = [
            index
            for index, one in enumerate(eligible)
            if counts[index] == 0 and one.holding == 0 and now - self._record(one.name).rested > self.rest_seconds
        ]
        rested.sort(key=lambda index: self._record(eligible[index].name).rested)
        for index in rested[: 0 if total < 2 else max(1, total // 8)]:
            richest = max(range(len(counts)), key=lambda other: counts[other])
            counts[richest] -= 1
            counts[index] += 1


def _place(tasks: Sequence[OpenTask], counts: Mapping[str, int], deaf: Collection[str]) -> dict[int, str]:
    """Tasks to members, so many each; who has an offer keeps it, and nobody gets a task that it works on or failed at, if that can be."""
    left = dict(counts)
    placed: dict[int, str] = {}
    waiting: list[OpenTask] = []
    for task in tasks:
        name = task.offered_to
        if name is not None and name not in deaf and left.get(name, 0) > 0 and name not in task.busy and name not in task.failed:
            placed[task.task] = name
            left[name] -= 1
        else:
            waiting.append(task)
    # The choosy first: others can go to anybody.
    waiting.sort(key=lambda task: not (task.busy or task.failed))
    free = deque(name for name, count in left.items() for _ in range(count))
    for task in waiting:
        name = _take(free, task.busy | task.failed) or next((other for other in counts if other not in task.busy | task.failed), None)
        name = name or _take(free, task.busy) or next((other for other in counts if other not in task.busy), None)
        if name is not None:
            placed[task.task] = name
    return placed


def _take(free: deque[str], unwanted: Collection[str]) -> str | None:
    """The next free member that is wanted; the others keep their turn."""
    for position, name in enumerate(free):
        if name not in unwanted:
            del free[position]
            return name
    return None


def fill(total: float, weights: Sequence[float], held: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Pour `total` into vessels that hold some already, so that they come level, height being content over weight.

    No vessel gets more than its room; what none has room for is not poured. Weights are positive. The result is exact water-filling: nobody
    gets any while somebody with room stands lower.
    """
    edges = sorted(
        [(h / w, w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
        + [((h + room) / w, -w) for w, h, room in zip(weights, held, rooms, strict=True) if room > 0]
    )
    level, width, left = 0.0, 0.0, float(total)
    for height, change in edges:
        poured = width * (height - level)
        if poured >= left and width > 0:
            break
        left -= poured
        level, width = height, width + change
    else:
        return [max(0.0, room) for room in rooms]
    level += left / width
    return [min(max(0.0, level * w - h), max(0.0, room)) for w, h, room in zip(weights, held, rooms, strict=True)]


def largest_remainders(total: int, wanted: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to `total`, each within one of what is wanted (which sums up to about `total`). Ties go to the first."""
    counts = [math.floor(x + 1e-9) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda index: counts[index] - wanted[index])
    missing = total - sum(counts)
    for index in order[:missing] if missing >= 0 else order[missing:]:
        counts[index] += 1 if missing > 0 else -1
    return counts

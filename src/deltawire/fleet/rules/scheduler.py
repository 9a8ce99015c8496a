"""Decides how many tasks each member is offered: in proportion to the speed that the trainer itself has measured.

Times are seconds of the fleet clock (`FleetClock`). Names and versions of members are what members say about themselves. A member that
lies about its version gains only offers whose results are refused, and refused results count as no speed. What a member says about its
speed is never used.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .assignment import OpenTask, assign, divide_work, largest_remainders


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living member, as the trainer sees it now.

    Parameters
    ----------
    name
        The member's name.
    step
        The training step of the version that it has; None while it has none.
    holding
        How many tasks it has leased and not delivered.
    since
        When the oldest of these leases began.
    latest
        When the newest of these leases began.
    """

    name: str
    step: int | None
    holding: int = 0
    since: float | None = None
    latest: float | None = None


@dataclass(slots=True)
class _Record:
    """The trainer's measurements of one member."""

    rate: float | None = None
    tokens: int = 0
    elapsed: float = 0.0
    finished: float = float("-inf")
    seconds_per_task: float | None = None
    proven: int = 0
    live: bool = True
    last_busy: float = float("-inf")


@dataclass(slots=True)
class Scheduler:
    """Measures the speed of members, and divides open tasks among them.

    The speed of a member is a moving average, τ ← `beta`·τ + (1−`beta`)·tokens/elapsed. `tokens` are the accepted tokens of a result, and
    `elapsed` is the time since the member's previous result or since the offer, whichever is later, so that syncing counts too. A member
    that is not measured yet counts as having the median speed.

    Parameters
    ----------
    beta
        The weight of earlier measurements, from 0 to below 1.
    window
        Results that come in a burst are measured together, over at least this many seconds.
    ramp
        A member that joins, or comes back, may hold one task at first and twice as many after each accepted result. After this many
        accepted results there is no such limit.
    rest_seconds
        A member that got no task for this long, because it was slow or its results were refused, is offered one task to show its speed.
    straggler
        A lease is late after this many times the usual duration of a task, by the fleet or by the member itself. The task is then offered
        to another member, too.
    patience
        A lease is late after this many seconds while no duration has been measured yet. A member that ignores its offers for as long as a
        lease may last counts as unresponsive.
    """

    beta: float = 0.8
    window: float = 1.0
    ramp: int = 3
    rest_seconds: float = 60.0
    straggler: float = 3.0
    patience: float = 120.0
    _records: dict[str, _Record] = field(default_factory=dict, init=False)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=65), init=False)
    _sorted_durations: list[float] = field(default_factory=list, init=False)
    _tokens_per_task: float | None = field(default=None, init=False)
    unresponsive: set[str] = field(default_factory=set, init=False)
    """Members that ignored the offers of the round that the last call of `offers` was about."""

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

    def note_alive(self, alive: Collection[str], now: float) -> None:
        """Note which members are alive. A member that comes back begins its ramp again, and keeps its measured speed.

        Parameters
        ----------
        alive
            The names of the members that are alive.
        now
            The time of the fleet clock.
        """
        for name in alive:
            record = self._records.get(name)
            if record is None:
                self._records[name] = _Record(last_busy=now)
            elif not record.live:
                record.live, record.proven, record.last_busy = True, 0, now
                record.tokens, record.elapsed = 0, 0.0
        for name, record in self._records.items():
            record.live = name in alive

    def delivered(self, member: str, *, tokens: int, offered: float, leased: float, finished: float) -> None:
        """Note that a member delivered a result. Report the results of each member in the order in which they finished.

        The time while a member waits for an offer does not count against it. The time from the offer to the result does, also before the
        member took the lease.

        Parameters
        ----------
        member
            The member's name.
        tokens
            How many tokens were accepted. 0 means that the result was refused, or that it was lost at `finished` because the lease
            expired or another member was faster.
        offered
            When the work was offered, by the fleet clock.
        leased
            When the member took the lease.
        finished
            When the result arrived.
        """
        record = self._records.setdefault(member, _Record(last_busy=finished))
        record.tokens += tokens
        record.elapsed += max(0.0, finished - max(offered, record.finished))
        record.finished = record.last_busy = max(record.finished, finished)
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
        """Return the measured tokens per second of a member; None before the first measurement.

        Parameters
        ----------
        member
            The member's name.
        """
        record = self._records.get(member)
        return None if record is None else record.rate

    def offers(self, tasks: Sequence[OpenTask], members: Sequence[Candidate], *, oldest_step: int, now: float) -> dict[int, str]:
        """Choose a member for each open task of one round. Return task → member. A task is left out if no eligible member can take it.

        A member that ignored an offer and did nothing else meanwhile counts as having delivered nothing, and other members come first.
        With several open rounds, ask for the oldest one first, and count its offers as held when you ask for the next.

        Parameters
        ----------
        tasks
            The open tasks.
        members
            The living members.
        oldest_step
            Members whose version is of an earlier step get nothing until they have caught up.
        now
            The time of the fleet clock.
        """
        eligible = sorted(
            (one for one in members if one.step is not None and one.step >= oldest_step and self._record(one.name).live),
            key=lambda one: one.name,
        )
        self.unresponsive = set()
        if not eligible or not tasks:
            return {}
        for one in eligible:
            if one.holding:
                self._record(one.name).last_busy = now
        unresponsive = self.unresponsive = self._find_unresponsive(tasks, eligible, now)
        counts = self._counts(len(tasks), [one for one in eligible if one.name not in unresponsive] or eligible, now)
        offers = assign(tasks, counts, unresponsive)
        for name in offers.values():
            self._record(name).last_busy = now
        return offers

    def proven(self, member: str) -> int:
        """Return how many results of a member in a row were accepted since it joined or since the last one was refused.

        Parameters
        ----------
        member
            The member's name.
        """
        record = self._records.get(member)
        return 0 if record is None else record.proven

    def shares(self, members: Sequence[str], now: float = float("-inf")) -> dict[str, float]:
        """Return each member's part of the work if all could take it. The parts sum up to 1. They are for views.

        Parameters
        ----------
        members
            The names of the members.
        now
            The time of the fleet clock.
        """
        weights = self._weights([Candidate(name, 0) for name in members], now)
        return {name: weight / sum(weights) for name, weight in zip(members, weights, strict=True)}

    def is_straggler(self, member: str, leased: float, now: float, *, times: float = 1.0) -> bool:
        """Return whether a lease has lasted so long that another member should be offered the task, too.

        Parameters
        ----------
        member
            The member that holds the lease.
        leased
            When it took the lease.
        now
            The time of the fleet clock.
        times
            Multiplies the time that the lease may last.
        """
        return now - leased > times * self._longest_lease(member)

    def _longest_lease(self, member: str) -> float:
        """Return the seconds after which a member that should deliver a task is late."""
        if not self._sorted_durations:
            return self.patience
        typical = self._sorted_durations[len(self._sorted_durations) // 2]
        return self.straggler * max(typical, self._record(member).seconds_per_task or 0.0, self.window)

    def _find_unresponsive(self, tasks: Sequence[OpenTask], eligible: Sequence[Candidate], now: float) -> set[str]:
        """Return the members that have ignored their offers, and have neither delivered nor leased anything since."""
        offered: dict[str, float] = {}
        for task in tasks:
            if task.offered_to is not None:
                offered[task.offered_to] = min(task.offered_at, offered.get(task.offered_to, task.offered_at))
        unresponsive = set()
        for one in eligible:
            if one.name not in offered:
                continue
            heard = max(offered[one.name], self._record(one.name).finished, float("-inf") if one.latest is None else one.latest)
            if now - heard > self._longest_lease(one.name):
                unresponsive.add(one.name)
                self.delivered(one.name, tokens=0, offered=heard, leased=heard, finished=now)
        return unresponsive

    def _record(self, member: str) -> _Record:
        return self._records.setdefault(member, _Record())

    def _blend(self, old: float, new: float) -> float:
        return self.beta * old + (1 - self.beta) * new

    def _counts(self, total: int, eligible: Sequence[Candidate], now: float) -> dict[str, int]:
        """Return how many of `total` open tasks each member should be offered, given how many it holds."""
        weights = self._weights(eligible, now)
        holding = [float(one.holding) for one in eligible]
        rooms = [self._room(one, total) for one in eligible]
        wanted = divide_work(total, weights, holding, rooms)
        beyond = total - sum(wanted)
        if beyond > 1e-9:  # the proven members have no room left, so newcomers get more than their ramp allows
            held = [h + x for h, x in zip(holding, wanted, strict=True)]
            wanted = [x + y for x, y in zip(wanted, divide_work(beyond, weights, held, [float(total)] * len(held)), strict=True)]
        counts = largest_remainders(total, wanted)
        self._try_idle_members(counts, eligible, now)
        return {one.name: count for one, count in zip(eligible, counts, strict=True)}

    def _room(self, one: Candidate, total: int) -> float:
        """Return how many more tasks the member may hold while it is on its ramp."""
        proven = self._record(one.name).proven
        return float(total) if proven >= self.ramp else float(max(0, 2**proven - one.holding))

    def _weights(self, members: Sequence[Candidate], now: float) -> list[float]:
        """Return the current speeds, which are always positive. A late member counts as if it delivered at this moment."""
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

    def _try_idle_members(self, counts: list[int], eligible: Sequence[Candidate], now: float) -> None:
        """Give one task to each member that has been idle for long, so that the trainer notices if it is fast again.

        The tasks are taken from the members that get most. At most an eighth of all tasks is given away like this.
        """
        total = sum(counts)
        idle = [
            index
            for index, one in enumerate(eligible)
            if counts[index] == 0 and one.holding == 0 and now - self._record(one.name).last_busy > self.rest_seconds
        ]
        idle.sort(key=lambda index: self._record(eligible[index].name).last_busy)
        for index in idle[: 0 if total < 2 else max(1, total // 8)]:
            richest = max(range(len(counts)), key=lambda other: counts[other])
            counts[richest] -= 1
            counts[index] += 1

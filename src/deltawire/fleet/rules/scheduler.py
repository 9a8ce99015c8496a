"""Decides how many tasks each member is offered: in proportion to the speed that the trainer itself has measured.

Times are seconds of the fleet clock (`FleetClock`). Names and versions of members are what members say about themselves. A member that
lies about its version gains only offers whose results are refused, and refused results count as no speed. The scheduler never uses
what a member says about its speed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .assignment import OpenTask, assign, divide_tasks
from .measurements import Durations, MemberRecord, blend

_MOST_PROGRESS = 0.75
"""A task that a member holds counts as at most this far done. One that takes longer than usual counts as not begun."""
_CLEARLY = 1.5
"""A copy of a task is worth its while if the first attempt takes so many times as long as the copy."""
_LONGER_REST = 10
"""A member that would hold up the step is tried after so many times `rest_seconds`, unless it has lost only one task."""
_LONG = 0.5
"""Idle members that have delivered nothing yet get copies of tasks whose leases have lasted this share of `patience`."""


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
        A member that joins, or comes back, may hold two tasks at first (one to work on, and the next one) and twice as many after each
        accepted result. After this many accepted results there is no such limit.
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
    _records: dict[str, MemberRecord] = field(default_factory=dict, init=False)
    _durations: Durations = field(default_factory=Durations, init=False)
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
                self._records[name] = MemberRecord(last_busy=now)
            elif not record.live:
                record.rejoined(now)
        for name, record in self._records.items():
            record.live = name in alive

    def delivered(self, member: str, *, tokens: int, offered: float, leased: float, finished: float, is_timed: bool = True) -> None:
        """Note that a member delivered a result. Report the results of each member in the order in which they finished.

        The time while a member waits for an offer does not count against it. The time from the offer to the result does, even before the
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
        is_timed
            Whether the trainer saw when the lease began. Otherwise the result says nothing about speed: `leased` may be wrong by years.
        """
        record = self._records.setdefault(member, MemberRecord(last_busy=finished))
        duration = record.delivered(
            tokens, offered=offered, leased=leased, finished=finished, is_timed=is_timed, beta=self.beta, window=self.window
        )
        if duration is not None:
            self._tokens_per_task = blend(self.beta, self._tokens_per_task, tokens)
            self._durations.add(duration)

    def rate(self, member: str) -> float | None:
        """Return the measured tokens per second of a member; None before the first measurement.

        Parameters
        ----------
        member
            The member's name.
        """
        record = self._records.get(member)
        return None if record is None else record.rate

    def offers(
        self, tasks: Sequence[OpenTask], members: Sequence[Candidate], *, oldest_step: int, now: float, later: int = 0
    ) -> dict[int, str]:
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
        later
            How many tasks of later rounds are open. When all rounds together have few open tasks, at most one for two members, each task
            waits for a member that can begin it at once: a member that holds a lease gets no offer then, except of tasks that others have
            failed at.
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
        if 2 * (len(tasks) + later) <= len(eligible):
            offers = _for_free_members(tasks, offers, {one.name for one in eligible if not one.holding})
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

    def shares(self, members: Mapping[str, float], now: float = float("-inf")) -> dict[str, float]:
        """Return each member's part of the work. The parts sum up to 1, or are all 0. They are for views.

        Parameters
        ----------
        members
            The members by name, each with the share of time in which it has a version that may work (`admissible_share`).
        now
            The time of the fleet clock.
        """
        weights = self._weights([Candidate(name, 0) for name in members], now)
        useful = [weight * share for weight, share in zip(weights, members.values(), strict=True)]
        total = sum(useful)
        return {name: weight / total if total else 0.0 for name, weight in zip(members, useful, strict=True)}

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

    def expected_seconds(self, member: str) -> float | None:
        """Return how long a member usually takes from the lease to the arrival of its result; None if nothing is known.

        Parameters
        ----------
        member
            The member's name. A member that has delivered nothing yet counts as a typical one.
        """
        record = self._records.get(member)
        if record is not None and record.seconds_per_task is not None:
            return record.seconds_per_task
        return self._durations.typical

    def is_worth_a_copy(self, member: str, leased: float, now: float, others: float | None) -> bool:
        """Return whether another member that has nothing to do should be offered a task that this member holds.

        It should if the other one would be done clearly earlier, or if the lease has lasted far longer than tasks of the fleet or of this
        member usually do. While nothing is known, it should if the lease is long (`is_long`): the other one has nothing else to do.

        Parameters
        ----------
        member
            The member that holds the lease.
        leased
            When it took the lease.
        now
            The time of the fleet clock.
        others
            How many seconds the other member needs; None if nothing is known.
        """
        expected, typical = self.expected_seconds(member), self._durations.typical
        if expected is None or typical is None or others is None:
            return self.is_long(leased, now)
        left = leased + expected - now
        return left > _CLEARLY * others + self.window or now - leased > self.straggler * max(self.window, min(typical, expected))

    def is_long(self, leased: float, now: float) -> bool:
        """Return whether a lease has lasted so long that an idle member of unknown speed may be tried with a copy of the task.

        Parameters
        ----------
        leased
            When the newest lease of the task was taken.
        now
            The time of the fleet clock.
        """
        return now - leased > _LONG * self.patience

    def may_be_tried(self, member: str, now: float) -> bool:
        """Return whether an idle member of unknown speed may be tried: it never had a task, or has rested since it lost the last one.

        Parameters
        ----------
        member
            The member's name.
        now
            The time of the fleet clock.
        """
        record = self._record(member)
        return not record.proven and (not record.lost or self._has_rested(record, now, is_soon=record.lost == 1))

    def _has_rested(self, record: MemberRecord, now: float, *, is_soon: bool) -> bool:
        return now - record.last_busy > self.rest_seconds * (1 if is_soon else _LONGER_REST)

    def _longest_lease(self, member: str) -> float:
        """Return the seconds after which a member that should deliver a task is late."""
        typical = self._durations.typical
        if typical is None:
            return self.patience
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

    def _record(self, member: str) -> MemberRecord:
        return self._records.setdefault(member, MemberRecord())

    def _counts(self, total: int, eligible: Sequence[Candidate], now: float) -> dict[str, int]:
        """Return how many of `total` open tasks each member should be offered, given how much it has to do before."""
        weights = self._weights(eligible, now)
        before = [self._tasks_before(one, now) for one in eligible]
        counts = divide_tasks(total, weights, before, [self._room(one, total) for one in eligible])
        if sum(counts) < total:  # the proven members have no room left, so newcomers get more than their ramp allows
            held = [h + count for h, count in zip(before, counts, strict=True)]
            more = divide_tasks(total - sum(counts), weights, held, [float(total)] * len(held))
            counts = [count + further for count, further in zip(counts, more, strict=True)]
        finish = [(h + count) / weight for h, count, weight in zip(before, counts, weights, strict=True)]
        last = max((each for each, count in zip(finish, counts, strict=True) if count), default=0.0)
        in_time = [(h + 1) / weight <= last for h, weight in zip(before, weights, strict=True)]
        self._try_idle_members(counts, eligible, in_time, now)
        return {one.name: count for one, count in zip(eligible, counts, strict=True)}

    def _tasks_before(self, one: Candidate, now: float) -> float:
        """Return how many tasks' time passes before the member could begin one more: what it holds, and what delays its results.

        Results of a member behind a slow link arrive long after it has made them, while it already works on the next. A member whose first
        result takes longer than passes between two of its results is late by the difference.
        """
        record = self._record(one.name)
        late = done = 0.0
        if record.interval is not None and record.interval > 0:
            late = 0.0 if record.latency is None or one.holding else max(0.0, record.latency / record.interval - 1)
            done = 0.0 if one.since is None else max(0.0, now - one.since) / record.interval
            done = min(done, _MOST_PROGRESS) if done <= 1 else 0.0
        return max(0.0, one.holding - done) + late

    def _room(self, one: Candidate, total: int) -> float:
        """Return how many more tasks the member may hold while it is on its ramp."""
        proven = self._record(one.name).proven
        return float(total) if proven >= self.ramp else float(max(0, 2 ** (proven + 1) - one.holding))

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
                rate = min(rate, at_most if self.is_straggler(one.name, one.since, now) else blend(self.beta, rate, at_most))
            weights.append(max(rate, 1e-6 * median))
        return weights

    def _try_idle_members(self, counts: list[int], eligible: Sequence[Candidate], in_time: Sequence[bool], now: float) -> None:
        """Give one task to each member that has been idle for long, so that the trainer notices if it is fast again.

        The tasks are taken from the members that get most. At most an eighth of all tasks is given away like this. A member that would
        finish after all others waits longer for its turn, because the step waits for it. A member that has lost one task waits no longer:
        its engine may have been warming up.
        """
        total = sum(counts)
        idle = []
        for index, one in enumerate(eligible):
            record = self._record(one.name)
            is_idle = counts[index] == 0 and one.holding == 0
            if is_idle and self._has_rested(record, now, is_soon=in_time[index] or record.lost == 1):
                idle.append(index)
        idle.sort(key=lambda index: self._record(eligible[index].name).last_busy)
        for index in idle[: 0 if total < 2 else max(1, total // 8)]:
            richest = max(range(len(counts)), key=lambda other: counts[other])
            counts[richest] -= 1
            counts[index] += 1


def _for_free_members(tasks: Sequence[OpenTask], offers: Mapping[int, str], free: Collection[str]) -> dict[int, str]:
    """Return the first offer to each free member, and all offers of tasks that members have failed at: few members may take those."""
    failed = {one.task for one in tasks if one.failed}
    chosen: dict[int, str] = {}
    for task, member in offers.items():
        if task in failed or (member in free and member not in chosen.values()):
            chosen[task] = member
    return chosen

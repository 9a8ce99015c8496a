"""A small fleet in virtual time, with the scheduler and the staleness rule of the real one. It has no store, no records and no bytes.

Tasks have whole sizes and different lengths, and offers are made at most once per second. Regions fetch the newest version as soon as their
link is free, and the trainer trains one step after the other. `step_seconds` says by a formula what this model does in detail.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..fleet.rules.assignment import OpenTask
from ..fleet.rules.scheduler import Candidate, Scheduler
from ..fleet.rules.staleness import StalenessBudget
from .fleet_shape import FleetShape
from .network import Arrival

_MOST_MEMBERS = 32
"""Larger fleets are modelled by this many members, with the same share in each region."""

_TASKS_EACH = 6
"""Tasks of a modelled member and step. Real tasks may be shorter, which makes ends of rounds smoother."""

_SPREAD = 0.2
"""Tasks take up to this share more or less time than the mean."""

_TICK = 1.0
"""Seconds from a change to the next offers."""

_WARM_UP, _STEPS = 12, 72
"""Steps that are left out of the figures, and steps in all. On slow links steps come in bursts of up to one more than the staleness, so few
steps would give a wrong mean; 60 is a multiple of the usual bursts."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The figures of a fleet in virtual time.

    Parameters
    ----------
    members
        The number of modelled members.
    steps
        The number of steps that the figures are about.
    step_seconds
        Seconds from one training step to the next.
    idle_share
        The share of time for which members had no work.
    """

    members: int
    steps: int
    step_seconds: float
    idle_share: float


def simulate(shape: FleetShape, arriving: Sequence[Arrival], *, seed: int = 0) -> SimulatedFleet:
    """Return how fast a fleet is in virtual time. The same seed gives the same figures.

    Parameters
    ----------
    shape
        The fleet.
    arriving
        How a version arrives in each region.
    seed
        Chooses the lengths of tasks.
    """
    return _Model(shape, arriving, random.Random(seed)).run()


@dataclass(slots=True)
class _Member:
    name: str
    region: int
    offers: list[tuple[int, int]] = field(default_factory=list)
    """Step and task of each offer, the oldest step first."""
    works_on: tuple[int, int] | None = None
    since: float = 0.0


@dataclass(slots=True)
class _Round:
    """The tasks of one step that nobody has leased, the seconds that each task takes, and how many are not delivered."""

    open: dict[int, OpenTask]
    seconds: list[float]
    missing: int


class _Model:
    def __init__(self, shape: FleetShape, arriving: Sequence[Arrival], chance: random.Random) -> None:
        self._shape, self._arriving, self._random = shape, arriving, chance
        self._budget = StalenessBudget(shape.staleness)
        self._scheduler = Scheduler()
        self._members = {one.name: one for one in _modelled(arriving)}
        self._seconds_per_task = shape.generate_seconds / _TASKS_EACH
        self._tokens_per_task = max(1, round(shape.tokens_per_second * self._seconds_per_task))
        self._rounds: dict[int, _Round] = {}
        self._opened = self._published = 0
        self._has = [0] * len(arriving)
        self._link_free = [True] * len(arriving)
        self._fetched = [0] * len(arriving)
        self._trains = False
        self._trained_at = [0.0]
        self._worked: list[tuple[float, float]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._board_due = False
        self.now = 0.0

    def run(self) -> SimulatedFleet:
        self._scheduler.note_alive(list(self._members), 0.0)
        self._open_rounds()
        while len(self._trained_at) <= _STEPS:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        begin, end = self._trained_at[_WARM_UP], self._trained_at[_STEPS]
        worked = [*self._worked, *((one.since, end) for one in self._members.values() if one.works_on is not None)]
        busy = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in worked)
        steps = _STEPS - _WARM_UP
        idle = max(0.0, 1 - busy / (len(self._members) * (end - begin)))
        return SimulatedFleet(len(self._members), steps, (end - begin) / steps, idle)

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, happens))

    def _open_rounds(self) -> None:
        for step in range(self._opened + 1, self._budget.newest_open(self._published) + 1):
            total = _TASKS_EACH * len(self._members)
            self._rounds[step] = _Round({task: OpenTask(task) for task in range(total)}, self._lengths(total), total)
            self._opened = step
        self._board_soon()

    def _lengths(self, tasks: int) -> list[float]:
        """Return the seconds of each task. Their sum is the same for every round."""
        drawn = [self._random.uniform(1 - _SPREAD, 1 + _SPREAD) for _ in range(tasks)]
        return [one * self._seconds_per_task * tasks / sum(drawn) for one in drawn]

    def _board_soon(self) -> None:
        if not self._board_due:
            self._board_due = True
            self._after(_TICK, self._board)

    def _board(self) -> None:
        """Offer all open tasks, as the trainer does when it writes a board."""
        self._board_due = False
        holding: dict[str, int] = defaultdict(int)
        for one in self._members.values():
            one.offers = []
            holding[one.name] = one.works_on is not None
        later = sum(len(found.open) for found in self._rounds.values())
        for step, found in sorted(self._rounds.items()):
            tasks = list(found.open.values())
            later -= len(tasks)
            members = [
                Candidate(one.name, self._has[one.region], holding[one.name], *(2 * (one.since if one.works_on else None,)))
                for one in self._members.values()
            ]
            chosen = self._scheduler.offers(tasks, members, oldest_step=self._budget.oldest_step(step), now=self.now, later=later)
            for task in tasks:
                name = chosen.get(task.task)
                offered_at = task.offered_at if name == task.offered_to else self.now
                found.open[task.task] = OpenTask(task.task, name, offered_at)
                if name is not None:
                    holding[name] += 1
                    self._members[name].offers.append((step, task.task))
        for one in self._members.values():
            self._take_work(one)

    def _take_work(self, one: _Member) -> None:
        if one.works_on is not None or not one.offers:
            return
        step, task = one.works_on = one.offers.pop(0)
        one.since = self.now
        offered = self._rounds[step].open.pop(task).offered_at
        self._after(self._rounds[step].seconds[task], lambda: self._delivered(one, offered))

    def _delivered(self, one: _Member, offered: float) -> None:
        assert one.works_on is not None
        step, _ = one.works_on
        one.works_on = None
        self._worked.append((one.since, self.now))
        self._scheduler.delivered(one.name, tokens=self._tokens_per_task, offered=offered, leased=one.since, finished=self.now)
        self._rounds[step].missing -= 1
        self._train()
        self._take_work(one)
        if one.works_on is None:
            self._board_soon()

    def _train(self) -> None:
        step = len(self._trained_at)
        found = self._rounds.get(step)
        if not self._trains and found is not None and not found.missing:
            self._trains = True
            del self._rounds[step]
            self._after(self._shape.train_seconds, self._trained)

    def _trained(self) -> None:
        self._trains = False
        self._published = len(self._trained_at)
        self._trained_at.append(self.now)
        self._open_rounds()
        for region in range(len(self._arriving)):
            self._fetch(region)
        self._train()

    def _fetch(self, region: int) -> None:
        """Fetch the newest version, if the link is free and the region does not have that version."""
        version = self._published
        if not self._link_free[region] or self._fetched[region] == version:
            return
        self._link_free[region] = False
        self._fetched[region] = version
        arrival = self._arriving[region]
        self._after(arrival.behind, lambda: self._arrived(region, version))
        self._after(arrival.link_seconds, lambda: self._link_is_free(region))

    def _link_is_free(self, region: int) -> None:
        self._link_free[region] = True
        self._fetch(region)

    def _arrived(self, region: int, version: int) -> None:
        self._has[region] = max(self._has[region], version)
        self._board_soon()


def _modelled(arriving: Sequence[Arrival]) -> list[_Member]:
    """Return at most `_MOST_MEMBERS` members, divided among the regions as the real ones are; at least one for each region."""
    total = sum(one.region.members for one in arriving)
    factor = min(1.0, _MOST_MEMBERS / total)
    return [
        _Member(f"{index}-{number}", index)
        for index, one in enumerate(arriving)
        for number in range(max(1, round(one.region.members * factor)))
    ]

"""Emulated generation: regions make tokens at a fixed speed, but only with weights that the staleness admits. Pure.

Batch b is what step b of the trainer learns from, and step b makes version b. A batch takes tokens of versions that are at most `staleness`
steps older than the newest one that could exist when the step begins: version b − 1 − staleness, or a newer one. A region without such
weights waits. All methods run in this loop, so they differ only in when weights arrive.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of generation and training.

    Parameters
    ----------
    regions
        The number of regions.
    speed
        Tokens per second of one region.
    generation
        Seconds in which all regions together make a batch.
    training
        Seconds of a training step.
    staleness
        The most steps by which weights may be behind.
    """

    regions: int
    speed: float
    generation: float
    training: float
    staleness: int = 1

    @property
    def batch(self) -> float:
        """Tokens of a batch."""
        return self.regions * self.speed * self.generation


@dataclass
class _Region:
    version: int = 0
    paused: bool = False


class Progress:
    """The loop at some time. Times only increase.

    Parameters
    ----------
    loop
        The loop.
    start
        The time at which generation begins, with version 0 everywhere.
    """

    def __init__(self, loop: Loop, start: float) -> None:
        self.loop = loop
        self.now = start
        self.tokens = 0.0
        """All tokens that were made."""
        self.completed: list[float] = []
        """The times at which batches were complete."""
        self._in_batch = 0.0
        self._regions = [_Region() for _ in range(loop.regions)]

    @property
    def batch(self) -> int:
        """The number of the batch that is being made."""
        return len(self.completed) + 1

    def speed(self) -> float:
        """Return the tokens per second of all regions that work now."""
        oldest = self.batch - 1 - self.loop.staleness
        return self.loop.speed * sum(not region.paused and region.version >= oldest for region in self._regions)

    def batch_ends(self) -> float:
        """Return when the batch will be complete, if no weights arrive before."""
        speed = self.speed()
        return self.now + (self.loop.batch - self._in_batch) / speed if speed else math.inf

    def advance(self, time: float) -> None:
        """Generate until a time."""
        while (end := self.batch_ends()) <= time:
            self._make(end)
            self.completed.append(end)
            self._in_batch = 0.0
        self._make(time)

    def pause(self, region: int, time: float) -> None:
        """Stop a region while its weights are written."""
        self.advance(time)
        self._regions[region].paused = True

    def serve(self, region: int, version: int, time: float) -> None:
        """Let a region work with another version from now on."""
        self.advance(time)
        self._regions[region] = _Region(max(version, self._regions[region].version))

    def _make(self, time: float) -> None:
        made = self.speed() * max(0.0, time - self.now)
        self.tokens += made
        self._in_batch += made
        self.now = max(self.now, time)


@dataclass(order=True, slots=True)
class _Event:
    time: float
    number: int
    act: Callable[[float], None] = field(compare=False)


def replay(loop: Loop, publish: float, transfers: Sequence[float], pauses: Sequence[float], steps: int) -> float:
    """Return tokens per second in the long run if weights arrive after times that were measured, in virtual time.

    A region fetches the newest version when it has the one before. The first batches, which need no new weights, are not counted.

    Parameters
    ----------
    loop
        The loop.
    publish
        Seconds from the end of training until regions can begin to fetch.
    transfers
        Seconds in which each region fetches and decodes a version.
    pauses
        Seconds in which each region writes weights. It makes no tokens then.
    steps
        The number of batches to count.
    """
    progress = Progress(loop, 0.0)
    events: list[_Event] = []
    numbers = itertools.count()
    newest, trained, is_training = 0, 0, False
    fetching = [False] * loop.regions
    have = [0] * loop.regions
    first = loop.staleness + 2

    def at(time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(events, _Event(time, next(numbers), act))

    def fetch(region: int, now: float) -> None:
        if fetching[region] or have[region] >= newest:
            return
        fetching[region], version = True, newest
        at(now + transfers[region], lambda time: progress.pause(region, time))
        at(now + transfers[region] + pauses[region], lambda time: arrive(region, version, time))

    def arrive(region: int, version: int, now: float) -> None:
        progress.serve(region, version, now)
        fetching[region], have[region] = False, version
        fetch(region, now)

    def published(now: float) -> None:
        nonlocal newest
        newest += 1
        for region in range(loop.regions):
            fetch(region, now)

    def step_ends(now: float) -> None:
        nonlocal is_training, trained
        trained += 1
        is_training = False
        at(now + publish, published)

    while len(progress.completed) < first + steps:
        if not is_training and len(progress.completed) > trained:
            is_training = True
            at(max(progress.now, progress.completed[trained]) + loop.training, step_ends)
        soonest = events[0].time if events else math.inf
        if progress.batch_ends() <= soonest:
            progress.advance(progress.batch_ends())
        else:
            event = heapq.heappop(events)
            progress.advance(event.time)
            event.act(event.time)
    return steps * loop.batch / (progress.completed[first + steps - 1] - progress.completed[first - 1])


def ideal(loop: Loop, steps: int = 20) -> float:
    """Return tokens per second over a network that costs nothing: weights are everywhere when a step ends."""
    return replay(loop, 0.0, [0.0] * loop.regions, [0.0] * loop.regions, steps)

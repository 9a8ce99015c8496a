"""Measure in virtual time how shares of the work cope with one region whose link is slow."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import Any
from unittest.mock import patch

from equal_shares import EqualShares
from report import Table

from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.scheduler import Candidate, Scheduler
from deltawire.fleet.rules.staleness import StalenessBudget
from deltawire.fleet.rules.version_delays import VersionDelays
from deltawire.testing.fleet_simulation.kernel import Process
from deltawire.testing.fleet_simulation.parse_cache import cached_parsing
from deltawire.testing.fleet_simulation.region_model import Region, RegionEngine, RelayModel
from deltawire.testing.fleet_simulation.store_model import Network
from deltawire.testing.fleet_simulation.trainer_model import Plan
from deltawire.testing.fleet_simulation.wan_link import WanLink
from deltawire.testing.fleet_simulation.world import Member, World

REGIONS, MEMBERS_EACH, TASKS_EACH = 4, 4, 3
TASK_SECONDS, TRAIN_SECONDS, COMMIT_SECONDS = 10.0, 2.0, 0.2
RATE, SLOWER = 125e6, 20.0
"""1 Gbit/s, and how much slower the link of the last region is."""
VERSION_BYTES = 190e6
ROWS = [(1e6, 0, 1.0), (1e6, 1, 1.0), (1e6, 2, 1.0), (40e6, 0, 1.0), (40e6, 1, 1.0), (1e6, 0, 0.5), (1e6, 1, 0.5)]
"""Sizes of a result, staleness budgets, and how fast the members behind the slow link are compared with the others.

1 MB is about 80,000 tokens with log-probs; 40 MB are results with other large data.
"""
_TOKENS_PER_TASK = 9
_DELAY, _RELAY_POLL, _LOCAL_SECONDS = 0.04, 0.5, 0.2
_UNFINISHED = 0.5 - 10.5 / (2 * _TOKENS_PER_TASK**2)
"""How much of a task a member has done, on average, when no more tasks of a round are taken. Tasks have two completions of 1 to 8 tokens,
so their variance is 10.5. This is the mean for a renewal process after a few tasks."""


class SpeedAlone(Scheduler):
    """Gives tasks by measured speed, without regard to links: results are never late, and tasks are never copied."""

    def _tasks_before(self, one: Candidate, now: float) -> float:
        return float(one.holding)

    def is_worth_a_copy(self, member: str, leased: float, now: float, others: float) -> bool:
        return False

    def is_long(self, leased: float, now: float) -> bool:
        return False


@dataclass(frozen=True)
class Shares:
    """A way to share the work: the scheduler, whether the delays of versions count, and how many regions take part."""

    scheduler: type[Scheduler]
    delays: bool
    regions: int = REGIONS


WAYS = {
    "equal shares": Shares(EqualShares, delays=False),
    "measured speed": Shares(SpeedAlone, delays=False),
    "speed and links": Shares(Scheduler, delays=True),
    "without the slow region": Shares(Scheduler, delays=True, regions=REGIONS - 1),
}


def world_of(seed: int, shares: Shares, *, staleness: int, result_bytes: float, speed: float, steps: int) -> World:
    """Return a world of members in regions. The last of the four regions has a slow link, and may have slower members."""
    plan = Plan(
        run="0" * 32,
        last_step=steps,
        tasks=REGIONS * MEMBERS_EACH * TASKS_EACH,
        rows=1,
        budget=StalenessBudget(staleness),
        options=FleetOptions(lease_seconds=60, poll_seconds=0.5),
        train_seconds=TRAIN_SECONDS,
        commit_seconds=COMMIT_SECONDS,
        checkpoint_every=1,
        scheduler=shares.scheduler,
    )
    world = World(Random(seed), plan, Network(delay=0.02), member_poll=1.0)
    for number in range(shares.regions):
        is_slow = number == REGIONS - 1
        rate = RATE / SLOWER if is_slow else RATE
        link = WanLink(lambda: world.kernel.now, delay=_DELAY, rate=rate, result_bytes=result_bytes, version_bytes=VERSION_BYTES)
        relay = RelayModel(world.kernel, world.chain, link, poll=_RELAY_POLL)
        relay.process = Process(f"relay{number}", world.kernel, world.perform)
        relay.process.start(relay.steps(), lambda value, error: None)
        region = Region(f"region{number}", world.kernel, world.random, world.chain, link, relay, local_seconds=_LOCAL_SECONDS)
        for member in range(MEMBERS_EACH):
            tokens = _TOKENS_PER_TASK / TASK_SECONDS * (speed if is_slow else 1.0)
            engine = RegionEngine(world.kernel, world.random, world.chain, world.published, rate=tokens)
            world.add_member(Member(f"member{number * MEMBERS_EACH + member}", engine, 0.0, 1, region=region))
    return world


def seconds_per_step(seed: int, shares: Shares, **settings: Any) -> float:
    """Return how long a step takes on average, from the first version to the last."""
    world = world_of(seed, shares, **settings)
    world.start_trainer()
    patched = patch.object(VersionDelays, "period", VersionDelays.period if shares.delays else None)
    with cached_parsing(), patched:
        world.kernel.run(1e6, lambda: world.finished)
    assert world.finished
    times = [world.published[version.seq] for version in world.chain.every()]
    return (times[-1] - times[0]) / (len(times) - 1)


def least_seconds(staleness: int, result_bytes: float, speed: float, steps: int) -> float:
    """Return the seconds per step that no scheduler can go below that does not know the lengths of tasks before they are done.

    A member works on a round from the arrival of the oldest version that the round admits until training of the round begins. All these
    times together are `1 + staleness` times the run, less the time that each version takes to the member, training and the commit, for
    each step. So the run must be long enough for all work to fit. A task that a member has begun when the round ends is done elsewhere.
    """

    def tasks(seconds: float, rate: float, member_speed: float, members: int) -> float:
        upload = result_bytes / rate + _DELAY
        before = (2 * _DELAY + _RELAY_POLL) / 2 + VERSION_BYTES / rate + (1 + 1 / 12) / 2 + _LOCAL_SECONDS  # until members have a version
        after = upload + TRAIN_SECONDS + COMMIT_SECONDS
        windows = (1 + staleness) * seconds - steps * (before + after)
        task_seconds = TASK_SECONDS / member_speed
        in_windows = members * (windows / task_seconds - steps * _UNFINISHED)
        in_the_run = members * (seconds - before - after) / task_seconds
        uploaded = (seconds - before - after + upload) * rate / result_bytes  # results of a region share its link
        return max(0.0, min(in_windows, in_the_run, uploaded * members / MEMBERS_EACH))

    low, high = 0.0, 1e6
    while high - low > 1e-3:
        middle = (low + high) / 2
        fast = tasks(middle, RATE, 1.0, (REGIONS - 1) * MEMBERS_EACH)
        slow = tasks(middle, RATE / SLOWER, speed, MEMBERS_EACH)
        low, high = (low, middle) if fast + slow >= steps * REGIONS * MEMBERS_EACH * TASKS_EACH else (middle, high)
    return high / steps


def measure(steps: int = 10, seeds: int = 8) -> Table:
    """Measure all ways to share the work."""
    table = Table(
        "fleet-links",
        f"Seconds per step: {REGIONS} regions of {MEMBERS_EACH} members, one behind a link that is {SLOWER:.0f} times slower than "
        f"1 Gbit/s, versions of {VERSION_BYTES / 1e6:.0f} MB, {TASKS_EACH} tasks of {TASK_SECONDS:.0f} s a member and step",
        [
            "a result",
            "staleness",
            "its members",
            *WAYS,
            "any scheduler, at least",
            "gain on equal shares",
            "at most",
            "gain on measured speed",
        ],
    )
    gains: dict[str, list[float]] = {"equal shares": [], "measured speed": []}
    for result_bytes, staleness, speed in ROWS:
        settings = {"staleness": staleness, "result_bytes": result_bytes, "speed": speed, "steps": steps}
        found = {way: mean(seconds_per_step(seed, shares, **settings) for seed in range(seeds)) for way, shares in WAYS.items()}
        for way, each in gains.items():
            each.append(found[way] / found["speed and links"] - 1)
        on_equal, on_speed = (f"{each[-1]:+.0%}" for each in gains.values())
        least = least_seconds(staleness, result_bytes, speed, steps)
        its_members = "as fast" if speed == 1 else f"{speed:.0%} as fast"
        times = [f"{found[way]:.1f}" for way in WAYS]
        at_most = f"{found['equal shares'] / least - 1:+.0%}"
        row = [f"{result_bytes / 1e6:.0f} MB", str(staleness), its_members, *times, f"{least:.1f}", on_equal, at_most, on_speed]
        table.rows.append(row)
    table.notes.append(
        f"Virtual time, {steps} steps, mean of {seeds} seeds: the real steps of trainer and members over modelled links, relays and a "
        "modelled store. The gains say how many more steps shares by speed and links make in the same time. Equal shares are assigned in "
        "turn and never reassigned. Measured speed is the same scheduler without what it knows of links. The column `any scheduler` is the "
        "least that a scheduler needs that does not know how long tasks will take. Requests between trainer and members are left out "
        f"there, but a version takes {VERSION_BYTES / RATE * SLOWER:.0f} s over the slow link, and members begin no task of a round before "
        "they have a version that the round admits. The column `at most` is the gain of such a scheduler on equal shares."
    )
    equal, speed = min(gains["equal shares"]), min(gains["measured speed"])
    table.check(f"at least 26% more steps than with equal shares in every row (least: {equal:+.0%})", equal >= 0.26)
    table.check(f"nowhere fewer steps than by speed alone, within 2% (least: {speed:+.1%})", speed >= -0.02)
    return table

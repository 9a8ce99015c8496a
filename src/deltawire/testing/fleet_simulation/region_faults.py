"""Regions of a run from its seed: links and relays, how they fail, and what must hold for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from .kernel import Process
from .oracle import Violation
from .region_model import Region, RegionEngine, RelayModel
from .wan_link import PIECES, WanLink
from .world import Member, World

_RATE = 1e6
_SLOWER = 100.0
_STEADY_RATE = 2.0
"""Tokens per second of the members in the region that never fails."""
_LONGEST_TASK_TOKENS = 16
"""Most tokens of a task, for each of its rows."""


def add_regions(world: World) -> None:
    """Add two to four regions, each with a reader that only follows the chain. The first one never fails, and has an honest member."""
    random = world.random
    world.is_calm = random.random() < 0.5
    for number in range(random.randint(2, 4)):
        link = WanLink(
            lambda: world.kernel.now,
            delay=random.choice([0.01, 0.04, 0.15]),
            rate=_RATE,
            result_bytes=random.choice([1e4, 3e5, 2e6]),
            version_bytes=random.choice([1e5, 2e6]),
        )
        relay = RelayModel(world.kernel, world.chain, link, poll=1.0) if number == 0 or random.random() < 0.85 else None
        region = Region(f"region{number}", world.kernel, random, world.chain, link, relay, local_seconds=0.2)
        world.regions.append(region)
        start_relay(world, region)
        process = Process(f"reader{number}", world.kernel, world.perform)
        process.start(region.follow_steps(region.reader_got, region.reader_has), lambda value, error: _raise(error))
    engine = RegionEngine(world.kernel, random, world.chain, world.published, rate=_STEADY_RATE)
    world.add_member(Member("steady", engine, 0.0, 1, region=world.regions[0]))


def start_relay(world: World, region: Region) -> None:
    """Start the relay of a region, unless it runs or is gone."""
    relay = region.relay
    if relay is None or relay.is_up:
        return
    world.log(f"relay of {region.name}", "starts")
    relay.process = Process(f"relay-{region.name}", world.kernel, world.perform)
    relay.process.start(relay.steps(), lambda value, error: _raise(error))


def plan_link_faults(world: World) -> float:
    """Plan faults of links and relays. Return the seconds until all of them are over."""
    random = world.random
    over = random.choice([60.0, 300.0, 900.0])
    failing = world.regions[1:]
    for region in failing:
        if random.random() < 0.25:
            region.link.rate /= _SLOWER
    for _ in range(random.randint(1, 6)):
        world.kernel.later(over * random.random(), _inject, world, random.choice(failing))
    if random.random() < 0.15:
        isolated = random.choice(failing)
        over = 3600.0
        world.kernel.later(60 * random.random(), isolated.link.cut, over, world.kernel.later)
        world.log(isolated.name, "will be isolated for an hour")
    if random.random() < 0.1:
        world.kernel.later(over * random.random(), _lose_every_relay, world)
    return over


def end_link_faults(world: World) -> None:
    """End all faults of links and relays.

    Relays that are gone stay gone, some that show an old commit continue, and links that were slow from the start stay slow.
    """
    for region in world.regions:
        region.link.mend()
        if region.relay is not None:
            region.relay.shown_old = region.relay.shown_old if region.relay.stays_old else None
            start_relay(world, region)
            assert region.relay.process is not None
            region.relay.process.wake()


def judge_regions(world: World) -> None:
    """Check after the last step that no step waited for a failing region, that every region catches up, and what crossed the links."""
    if world.is_calm:
        _judge_steps(world)
    world.kernel.run(math.inf, lambda: world.faults_over)
    head = world.chain.head()
    assert head is not None
    versions = len(world.chain.every())
    slowest = max(region.link.version_bytes / region.link.rate for region in world.regions)
    world.kernel.run(
        world.kernel.now + 600.0 + 2 * versions * (slowest + 5.0), lambda: all(r.reader_has() == head.seq for r in world.regions)
    )
    for region in world.regions:
        if region.reader_has() != head.seq:
            raise Violation(f"{region.name} does not catch up: its reader has commit {region.reader_has()}, and the newest is {head.seq}.")
        most = max(region.link.pieces.values(), default=0)
        if most > PIECES:
            raise Violation(f"a version crossed the link of {region.name} {most / PIECES:.2f} times for its relay.")
        if region.relay is not None and not region.relay.has_failed and region.link.direct:
            raise Violation(f"readers of {region.name} fetched versions from the origin, although its relay worked all the time.")


def _judge_steps(world: World) -> None:
    """Check that every step was published in a time in which the member that never fails could have done the work alone.

    It may have begun with later rounds, and tasks that members of failing regions hold go to it when their leases expire.
    """
    plan = world.plan
    longest = plan.rows * _LONGEST_TASK_TOKENS / _STEADY_RATE
    rounds = 1 + plan.budget.steps
    bound = rounds * plan.tasks * (longest + 5.0) + 2 * plan.options.lease_seconds + plan.train_seconds + 60.0
    times = [world.published[version.seq] for version in world.chain.every()]
    for number, (earlier, later) in enumerate(itertools.pairwise(times), start=1):
        if later - earlier > bound:
            raise Violation(f"version {number} came {later - earlier:.0f} s after the one before; at most {bound:.0f} s are allowed.")


def _inject(world: World, region: Region) -> None:
    if not world.faults_over:
        world.random.choice(_FAULTS)(world, region)


def _cut(world: World, region: Region) -> None:
    seconds = world.random.choice([2.0, 20.0, 200.0]) * world.random.random()
    world.log(region.name, f"is cut off for {seconds:.0f} s")
    region.link.cut(seconds, world.kernel.later)


def _slow_down(world: World, region: Region) -> None:
    if region.link.rate == _RATE:
        world.log(region.name, "gets a link that is a hundred times slower")
        region.link.rate = _RATE / _SLOWER
        world.kernel.later(300 * world.random.random(), setattr, region.link, "rate", _RATE)


def _kill_relay(world: World, region: Region) -> None:
    relay = region.relay
    if relay is not None and relay.process is not None:
        world.log(f"relay of {region.name}", "is killed")
        relay.has_failed = True
        relay.process.kill()
        world.kernel.later(60 * world.random.random(), start_relay, world, region)


def _freeze_relay(world: World, region: Region) -> None:
    relay = region.relay
    if relay is not None and relay.process is not None:
        world.log(f"relay of {region.name}", "freezes")
        relay.has_failed = True
        relay.process.freeze()
        world.kernel.later(300 * world.random.random(), relay.process.wake)


def _lose_relay(world: World, region: Region) -> None:
    if region.relay is not None:
        world.log(f"relay of {region.name}", "is gone for ever")
        if region.relay.process is not None:
            region.relay.process.kill()
        region.relay = None


def _show_old(world: World, region: Region) -> None:
    relay = region.relay
    if relay is not None:
        world.log(f"relay of {region.name}", "shows an old commit")
        relay.has_failed = True
        relay.shown_old = world.random.randint(-1, max(0, relay.shown))
        relay.stays_old = world.random.random() < 0.5
        if not relay.stays_old:
            world.kernel.later(300 * world.random.random(), setattr, relay, "shown_old", None)


def _lose_every_relay(world: World) -> None:
    for region in world.regions[1:]:
        _lose_relay(world, region)


_FAULTS: tuple[Callable[[World, Region], None], ...] = (
    _cut,
    _cut,
    _slow_down,
    _kill_relay,
    _kill_relay,
    _freeze_relay,
    _lose_relay,
    _show_old,
)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error

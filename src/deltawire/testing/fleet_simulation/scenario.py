"""Makes a run from a seed: how many members of which kind there are, how slow the network is, and what fails when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ...fleet.options import FleetOptions
from ...fleet.rules.staleness import StalenessBudget
from .engine_model import EngineModel
from .faults import (
    degrade_network,
    disconnect_trainer,
    freeze_trainer,
    kill_trainer,
    kill_trainer_soon,
    start_second_trainer,
    store_down,
)
from .misbehaviour import KINDS, Misbehaviour
from .oracle import Violation
from .parse_cache import cached_parsing
from .region_faults import add_regions, end_link_faults, judge_regions, plan_link_faults
from .region_model import RegionEngine
from .store_model import Network
from .trainer_model import Plan
from .wan_link import PIECES
from .world import Member, World, unexpected

_PATIENCE = 4 * 3600.0
"""Virtual seconds that a run may take after the last fault. All known seeds need far less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed. The counts are for people and for benchmarks.

    Parameters
    ----------
    seed
        The seed.
    members
        How many members there were.
    violation
        Which rule was broken; None if all rules held.
    seconds
        How many virtual seconds the run took.
    events
        How many events happened.
    steps
        The last published training step.
    accepted
        How many results were trained on.
    rejected
        How many results were refused, by reason.
    requests
        How many requests were made, by kind of process, kind of request and folder of the store.
    trainers
        How many trainers were started.
    copied
        How many copies of versions relays fetched over the links of regions.
    direct
        How many copies of versions readers fetched from the origin, because a relay did not work.
    """

    seed: int
    members: int
    violation: str | None
    seconds: float
    events: int
    steps: int
    accepted: int
    rejected: dict[str, int]
    requests: dict[tuple[str, str, str], int]
    trainers: int
    copied: int = 0
    direct: int = 0


def simulate(seed: int, *, members: int | None = None, regions: bool = False, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed. The same seed, number of members and choice of regions give the same run, event by event.

    Parameters
    ----------
    seed
        The seed.
    members
        How many members there are at the start. By default the seed decides.
    regions
        Whether members live in regions with links and relays, which also fail.
    trace
        Called with one line for every event.
    """
    world = _world(Random(f"{'regions' if regions else 'fleet'} {seed}"), members, trace, regions=regions)
    violation = None
    try:
        with cached_parsing():
            _run(world)
    except Violation as error:
        violation = str(error)
    except Exception as error:  # a fault of a model; it must not hide the seed, nor end the runs of other seeds
        violation = str(unexpected("the simulation", error))
    rejected: Counter[str] = Counter()
    for trainer in world.trainers:
        if trainer.model.coordinator is not None:
            rejected.update(trainer.model.coordinator.rejected)
    head = world.chain.head()
    return Outcome(
        seed=seed,
        members=len(world.members),
        violation=violation,
        seconds=world.kernel.now,
        events=world.kernel.events,
        steps=0 if head is None else head.step,
        accepted=world.oracle.accepted,
        rejected=dict(rejected),
        requests=dict(world.store.counts),
        trainers=len(world.trainers),
        copied=sum(region.link.pieces.total() // PIECES for region in world.regions),
        direct=sum(region.link.direct.total() for region in world.regions),
    )


def _world(random: Random, members: int | None, trace: Callable[[str], None] | None, *, regions: bool) -> World:
    size = members or _size(random, most=60 if regions else 3000)  # each reader of a region takes as long to simulate as a member
    large = size > 100
    plan = Plan(
        run=f"{random.getrandbits(128):032x}",
        last_step=random.randint(2, 3) if large else random.randint(3, 10) if regions else random.randint(2, 7),
        tasks=random.randint(size // 4, size) if large else random.randint(1, 5),
        rows=random.randint(1, 2),
        budget=StalenessBudget(random.choice([0, 1, 1, 2, 3])),
        options=FleetOptions(
            lease_seconds=random.choice([10, 20, 60]),
            quorum=random.choice([1.0, 1.0, 1.0, 0.7]),
            poll_seconds=2.0 if large else random.choice([0.5, 1.0, 3.0]),
            keep_steps=random.choice([3, 4, 8]),
        ),
        train_seconds=random.choice([0.0, 2.0, 15.0]),
        checkpoint_every=random.choice([1, 1, 2, 3]),
        polls_while_training=random.random() < 0.7,
        untrainable=random.choice([0, 0, 1, 6]),
        publishes_beside=random.random() < 0.5,
        upload_seconds=random.choice([0.0, 0.0, 5.0]),
    )
    network = Network(delay=random.choice([0.005, 0.05, 0.15]), timeout=random.choice([2.0, 10.0]), can_wait=random.random() < 0.5)
    granularity = random.choice([0.0, 0.0, 1.0])
    world = World(random, plan, network, granularity=granularity, member_poll=5.0 if large else random.choice([0.5, 1.0, 2.0]), trace=trace)
    if regions:
        add_regions(world)
    for _ in range(size):
        join(world, rogue=random.random() < (0.0 if world.is_calm else 0.25))
    return world


def _size(random: Random, *, most: int) -> int:
    draw = random.random()
    if draw < 0.001:
        return min(most, random.randint(1000, 3000))
    return random.randint(10, 60) if draw < 0.03 else random.randint(1, 6)


def join(world: World, *, rogue: bool) -> None:
    """Add a new machine of any speed, whose clock may be wrong by an hour."""
    random = world.random
    kind = random.choice(KINDS) if rogue else None
    rate, sync_seconds = random.choice([0.5, 2.0, 2.0, 8.0]), random.choice([0.2, 2.0, 20.0])
    region = random.choice(world.regions) if world.regions and kind != "pinned" else None
    engine = (
        EngineModel(world.kernel, random, world.chain, rate=rate, sync_seconds=sync_seconds, pinned=kind == "pinned")
        if region is None
        else RegionEngine(world.kernel, random, world.chain, world.published, rate=rate)
    )
    misbehaviour = None if kind is None else Misbehaviour(kind, random, world.chain, world.store.objects)
    member = Member(
        f"member{len(world.members)}",
        engine,
        random.choice([0.0, 0.0, 3600.0, -3600.0]),
        random.choice([1, 1, 2]),
        misbehaviour,
        region=region,
    )
    world.kernel.later(random.choice([0.0, 5.0, 60.0]) * random.random(), world.add_member, member)
    world.members[member.name] = member


def _run(world: World) -> None:
    random = world.random
    world.start_trainer()
    fault_seconds = random.choice([0.0, 60.0, 200.0, 600.0])
    for _ in range(random.randint(0, 14) if fault_seconds and not world.is_calm else 0):
        world.kernel.later(fault_seconds * random.random(), _inject_fault, world)
    if world.regions:
        fault_seconds = max(fault_seconds, plan_link_faults(world))
    world.kernel.later(fault_seconds, _end_faults, world)
    world.kernel.run(fault_seconds + _PATIENCE, lambda: world.finished)
    if not world.finished:
        head = world.chain.head()
        raise Violation(f"the run does not continue: it is at step {head.step if head else None} of {world.plan.last_step}.")
    if world.regions:
        judge_regions(world)


def _inject_fault(world: World) -> None:
    """Inject a random fault, unless the faults are over."""
    if not world.faults_over:
        world.random.choice(_FAULTS)(world)


def _end_faults(world: World) -> None:
    """End all faults. Members that break the rules continue; if there is no honest member, one joins."""
    world.log("", "all faults end")
    world.faults_over = True
    world.network.clear()
    end_link_faults(world)
    for process in [trainer.process for trainer in world.trainers] + [
        one.process for one in world.members.values() if one.process is not None
    ]:
        process.cut_off = False
        process.wake()
    if not any(one.honest and not one.retired for one in world.members.values()):
        join(world, rogue=False)
    world.supervise_trainer()


def _kill_member(world: World) -> None:
    member = _running_member(world)
    if member is not None:
        after = None if world.random.random() < 0.2 else 60 * world.random.random()
        world.kill_member(member, after)


def _kill_member_soon(world: World) -> None:
    member = _running_member(world)
    if member is not None and member.process is not None:
        world.kill_after(member.process, world.random.randrange(12))


def _freeze_member(world: World) -> None:
    """Freeze a member, often for longer than its lease."""
    member = _running_member(world)
    if member is not None and member.process is not None:
        world.log(member.name, "freezes")
        member.process.freeze()
        world.kernel.later(world.plan.options.lease_seconds * 4 * world.random.random(), member.process.wake)


def _disconnect_member(world: World) -> None:
    member = _running_member(world)
    if member is not None and member.process is not None:
        world.log(member.name, "is disconnected")
        member.process.cut_off = True
        world.kernel.later(world.plan.options.lease_seconds * 4 * world.random.random(), setattr, member.process, "cut_off", False)


def _slow_down_member(world: World) -> None:
    member = _running_member(world)
    if member is not None:
        world.log(member.name, "slows down")
        member.engine.rate = max(0.05, member.engine.rate / 10)


def _tell_member_to_leave(world: World) -> None:
    member = _running_member(world)
    if member is not None and member.state is not None:
        world.log(member.name, "is told to leave")
        member.state.leave()
        member.retired = world.random.random() < 0.5


def _join(world: World) -> None:
    if len(world.members) < 4000:
        join(world, rogue=world.random.random() < 0.3)


def _step_clock(world: World) -> None:
    """Set the store's clock forward or back, by up to ten years."""
    seconds = world.random.choice([-3e8, -3e7, -7200.0, -30.0, 30.0, 7200.0, 3e7, 3e8])
    world.log("", f"the store's clock is set by {seconds:+g} seconds")
    world.store.objects.clock_shift += seconds


_FAULTS: tuple[Callable[[World], None], ...] = (
    _kill_member,
    _kill_member_soon,
    _kill_member_soon,
    _freeze_member,
    _freeze_member,
    _disconnect_member,
    _slow_down_member,
    _tell_member_to_leave,
    _join,
    degrade_network,
    degrade_network,
    store_down,
    _step_clock,
    _step_clock,
    kill_trainer,
    kill_trainer_soon,
    kill_trainer_soon,
    kill_trainer_soon,
    freeze_trainer,
    freeze_trainer,
    disconnect_trainer,
    start_second_trainer,
)


def _running_member(world: World) -> Member | None:
    up = [one for one in world.members.values() if one.process is not None and one.process.alive]
    return world.random.choice(up) if up else None

"""From a seed to a run: how many members of which sort, how far away, and what goes wrong when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ...fleet.options import FleetOptions
from ...fleet.rules.staleness import StalenessBudget
from .engine_model import EngineModel
from .mischief import KINDS, Mischief
from .oracle import Violation
from .remembered import remembered_parsing
from .store_model import Weather
from .trainer_model import Plan
from .world import Member, World

_PATIENCE = 4 * 3600.0
"""Virtual seconds that a run may take after the last fault. Every seed that we know needs far less."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. `violation` is None if all was well; counts are for people, and for benchmarks."""

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


def simulate(seed: int, *, members: int | None = None, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed. The same seed and number of members give the same run, event by event."""
    world = _world(Random(f"fleet {seed}"), members, trace)
    violation = None
    try:
        with remembered_parsing():
            _run(world)
    except Violation as error:
        violation = str(error)
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
    )


def _world(random: Random, members: int | None, trace: Callable[[str], None] | None) -> World:
    size = members or _size(random)
    large = size > 100
    plan = Plan(
        run=f"{random.getrandbits(128):032x}",
        last_step=random.randint(2, 3) if large else random.randint(2, 7),
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
        looked_after=random.random() < 0.7,
        spoiled=random.choice([0, 0, 1, 6]),
    )
    weather = Weather(delay=random.choice([0.005, 0.05, 0.15]), timeout=random.choice([2.0, 10.0]))
    granularity = random.choice([0.0, 0.0, 1.0])
    world = World(random, plan, weather, granularity=granularity, member_poll=5.0 if large else random.choice([0.5, 1.0, 2.0]), trace=trace)
    for _ in range(size):
        join(world, rogue=random.random() < 0.25)
    return world


def _size(random: Random) -> int:
    draw = random.random()
    if draw < 0.001:
        return random.randint(1000, 3000)
    return random.randint(10, 60) if draw < 0.03 else random.randint(1, 6)


def join(world: World, *, rogue: bool) -> None:
    """A new machine, of any speed, with a clock that may be off by an hour."""
    random = world.random
    kind = random.choice(KINDS) if rogue else None
    engine = EngineModel(
        world.kernel,
        random,
        world.chain,
        rate=random.choice([0.5, 2.0, 2.0, 8.0]),
        sync_seconds=random.choice([0.2, 2.0, 20.0]),
        pinned=kind == "pinned",
    )
    mischief = None if kind is None else Mischief(kind, random, world.chain, world.store.objects)
    member = Member(f"member{len(world.members)}", engine, random.choice([0.0, 0.0, 3600.0, -3600.0]), random.choice([1, 1, 2]), mischief)
    world.kernel.later(random.choice([0.0, 5.0, 60.0]) * random.random(), world.add_member, member)
    world.members[member.name] = member


def _run(world: World) -> None:
    random = world.random
    world.start_trainer()
    trouble = random.choice([0.0, 60.0, 200.0, 600.0])
    for _ in range(random.randint(0, 14) if trouble else 0):
        world.kernel.later(trouble * random.random(), _befall, world)
    world.kernel.later(trouble, _calm, world)
    world.kernel.run(trouble + _PATIENCE, lambda: world.finished)
    if not world.finished:
        head = world.chain.head()
        raise Violation(f"the run does not go on: it stands at step {head.step if head else None} of {world.plan.last_step}.")


def _befall(world: World) -> None:
    """Something happens, to somebody."""
    if not world.calm:
        world.random.choice(_FAULTS)(world)


def _calm(world: World) -> None:
    """Faults cease. Who misbehaves goes on to; but one honest member there is."""
    world.tell("", "all faults cease")
    world.calm = True
    world.weather.clear()
    for process in [trainer.process for trainer in world.trainers] + [
        one.process for one in world.members.values() if one.process is not None
    ]:
        process.cut_off = False
        process.wake()
    if not any(one.honest and not one.retired for one in world.members.values()):
        join(world, rogue=False)
    world.supervise_trainer()


def _kill_member(world: World) -> None:
    member = _somebody(world)
    if member is not None:
        after = None if world.random.random() < 0.2 else 60 * world.random.random()
        world.kill_member(member, after)


def _doom_member(world: World) -> None:
    member = _somebody(world)
    if member is not None and member.process is not None:
        world.doom(member.process, world.random.randrange(12))


def _freeze_member(world: World) -> None:
    """Often past its lease."""
    member = _somebody(world)
    if member is not None and member.process is not None:
        world.tell(member.name, "freezes")
        member.process.freeze()
        world.kernel.later(world.plan.options.lease_seconds * 4 * world.random.random(), member.process.wake)


def _cut_member_off(world: World) -> None:
    member = _somebody(world)
    if member is not None and member.process is not None:
        world.tell(member.name, "is cut off")
        member.process.cut_off = True
        world.kernel.later(world.plan.options.lease_seconds * 4 * world.random.random(), setattr, member.process, "cut_off", False)


def _slow_member_down(world: World) -> None:
    member = _somebody(world)
    if member is not None:
        world.tell(member.name, "slows down")
        member.engine.rate = max(0.05, member.engine.rate / 10)


def _send_member_away(world: World) -> None:
    member = _somebody(world)
    if member is not None and member.state is not None:
        world.tell(member.name, "is told to leave")
        member.state.leaving = True
        member.retired = world.random.random() < 0.5


def _join(world: World) -> None:
    if len(world.members) < 4000:
        join(world, rogue=world.random.random() < 0.3)


def _bad_weather(world: World) -> None:
    weather, draw = world.weather, world.random.random
    weather.lost, weather.unanswered, weather.landing_late = 0.2 * draw(), 0.2 * draw(), 0.1 * draw()
    weather.stale_hints = 0.5 * draw()
    world.tell("", f"bad weather: {weather}")
    world.kernel.later(60 * draw(), weather.clear)


def _store_down(world: World) -> None:
    world.tell("", "the store is down")
    world.weather.down = True
    world.kernel.later(60 * world.random.random(), setattr, world.weather, "down", False)


def _step_clock(world: World) -> None:
    """Somebody sets the store's clock, by hours or by years."""
    seconds = world.random.choice([-3e8, -3e7, -7200.0, -30.0, 30.0, 7200.0, 3e7, 3e8])
    world.tell("", f"the store's clock is set by {seconds:+g} seconds")
    world.store.objects.clock_shift += seconds


def _kill_trainer(world: World) -> None:
    world.kill_trainer(30 * world.random.random())


def _doom_trainer(world: World) -> None:
    if world.trainers:
        world.doom(world.trainers[-1].process, world.random.randrange(60))


def _freeze_trainer(world: World) -> None:
    """And perhaps somebody takes over before it wakes: then it is a zombie."""
    if not world.trainers:
        return
    process = world.trainers[-1].process
    world.tell(process.name, "freezes")
    process.freeze()
    asleep = 120 * world.random.random()
    world.kernel.later(asleep, process.wake)
    if world.random.random() < 0.7:
        world.kernel.later(asleep * world.random.random(), _rival, world)


def _cut_trainer_off(world: World) -> None:
    if world.trainers:
        process = world.trainers[-1].process
        world.tell(process.name, "is cut off")
        process.cut_off = True
        world.kernel.later(60 * world.random.random(), setattr, process, "cut_off", False)


def _rival(world: World) -> None:
    """Somebody starts a second trainer while the first still runs."""
    if not world.finished:
        world.start_trainer()


_FAULTS: tuple[Callable[[World], None], ...] = (
    _kill_member,
    _doom_member,
    _doom_member,
    _freeze_member,
    _freeze_member,
    _cut_member_off,
    _slow_member_down,
    _send_member_away,
    _join,
    _bad_weather,
    _bad_weather,
    _store_down,
    _step_clock,
    _step_clock,
    _kill_trainer,
    _doom_trainer,
    _doom_trainer,
    _doom_trainer,
    _freeze_trainer,
    _freeze_trainer,
    _cut_trainer_off,
    _rival,
)


def _somebody(world: World) -> Member | None:
    up = [one for one in world.members.values() if one.process is not None and one.process.alive]
    return world.random.choice(up) if up else None

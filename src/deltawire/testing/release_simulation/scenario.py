"""Makes a run of live traffic from a seed: who takes part, how slow the network is, and what fails when."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ...fleet.options import FleetOptions
from ...fleet.rules.staleness import StalenessBudget
from ...format.feedback import FeedbackFile
from ...format.interactions import Interactions
from ...format.records.channel_records import ChannelMove
from ...format.records.gate_records import GateRecord
from ...format.records.live_records import Metric
from ...format.records.version_records import Commit
from ...live.gate_rules import GatePolicy, Limit
from ..fleet_simulation.faults import (
    degrade_network,
    freeze_trainer,
    kill_trainer,
    kill_trainer_soon,
    start_second_trainer,
    store_down,
)
from ..fleet_simulation.oracle import Violation
from ..fleet_simulation.parse_cache import cached_parsing
from ..fleet_simulation.store_model import Network
from ..fleet_simulation.trainer_model import Plan
from ..fleet_simulation.world import unexpected
from .live_world import UPLOAD_SECONDS, LiveWorld, Service
from .virtual_time import VirtualTime, virtual_time

PATIENCE = 2 * 3600.0
"""Virtual seconds that a run may take after the last fault. All known seeds need far less."""

_PARSED = (Interactions, FeedbackFile, ChannelMove, GateRecord, Commit)
_OFFSETS = (0.0, 0.0, 3 * 3600.0, -3 * 3600.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed. The counts are for people.

    Parameters
    ----------
    seed
        The seed.
    violation
        Which rule was broken; None if all rules held.
    seconds
        How many virtual seconds the run took.
    events
        How many events happened.
    trainers
        How many trainers were started.
    counts
        How many interactions, pieces of feedback, moves and so on there were.
    """

    seed: int
    violation: str | None
    seconds: float
    events: int
    trainers: int
    counts: dict[str, int]


def simulate(seed: int, *, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed. The same seed gives the same run, event by event.

    Parameters
    ----------
    seed
        The seed.
    trace
        Called with one line for every event.
    """
    random = Random(f"live {seed}")
    memory = Path("/dev/shm")  # journals are small, and need not survive
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        virtual_time(random) as time,
        cached_parsing(*_PARSED),
    ):
        world = _world(random, Path(folder), time, trace)
        violation = None
        try:
            _run(world)
        except Violation as error:
            violation = str(error)
        except Exception as error:  # a fault of a model; it must not hide the seed, nor end the runs of other seeds
            violation = str(unexpected("the simulation", error))
        finally:
            world.stop()
    return Outcome(
        seed=seed,
        violation=violation,
        seconds=world.kernel.now,
        events=world.kernel.events,
        trainers=len(world.trainers),
        counts=dict(world.live.counts),
    )


def _world(random: Random, folder: Path, time: VirtualTime, trace: Callable[[str], None] | None) -> LiveWorld:
    last_step = random.randint(1, 4)
    run = f"{random.getrandbits(128):032x}"
    poll_seconds, keep_steps = random.choice([1.0, 3.0]), random.choice([1, 2, 8])
    train_seconds = random.choice([2.0, 15.0])
    checkpoint_every = random.choice([1, 1, 2])
    plan = Plan(
        run=run,
        last_step=last_step,
        tasks=0,
        rows=1,
        budget=StalenessBudget(last_step + 2),
        options=FleetOptions(lease_seconds=20, poll_seconds=poll_seconds, keep_steps=max(keep_steps, checkpoint_every)),
        train_seconds=train_seconds,
        checkpoint_every=checkpoint_every,
        untrainable=random.choice([0, 0, 1]),
        publishes_beside=random.random() < 0.5,
        upload_seconds=random.choice([0.0, 5.0]),
    )
    window = random.choice([20, 40])
    thumbs = Metric("thumbs", window=window, default=random.choice([None, 0.5]))
    rating = Metric(
        "rating", level="episode", type="float", window=30, settle=random.choice([None, 10]), default=0.25, weight=0.5, low=0.0, high=1.0
    )
    network = Network(delay=random.choice([0.005, 0.05, 0.15]), timeout=random.choice([2.0, 10.0]), can_wait=random.random() < 0.5)
    world = LiveWorld(
        random,
        plan,
        network,
        granularity=random.choice([0.0, 0.0, 1.0]),
        metrics=(thumbs, rating) if random.random() < 0.7 else (thumbs,),
        retention=random.choice([100.0, 600.0, 86400.0]),
        live_tasks=random.randint(2, 6),
        policy=GatePolicy((Limit.parse("thumbs:-0.5", must_hold=True),), alpha=0.1, min_answers=8, max_seconds=600.0),
        bad_versions=random.choice([0.0, 0.4, 0.8]),
        folder=folder,
        time=time,
        trace=trace,
    )
    for _ in range(random.choice([1, 2, 2, 3])):
        world.add_gateway(random.choice([4.0, 8.0]), random.choice(_OFFSETS))
    for number in range(random.randint(2, 4)):
        world.add_follower("canary" if number % 2 else "stable", random.choice([0.1, 5.0]))
    for _ in range(random.choice([1, 1, 2])):
        world.add_gate(random.choice(_OFFSETS))
    for _ in range(random.choice([1, 2, 2])):
        world.add_promoter(random.choice([10.0, 30.0]), random.choice(_OFFSETS))
    return world


def _run(world: LiveWorld) -> None:
    random = world.random
    world.start_trainer()
    world.kernel.later(1.0, _traffic, world, random.choice([1.0, 2.0]))
    world.kernel.later(10.0, world.check_end)
    fault_seconds = random.choice([0.0, 120.0, 400.0])
    for _ in range(random.randint(0, 14) if fault_seconds else 0):
        world.kernel.later(fault_seconds * random.random(), _inject_fault, world)
    world.kernel.later(fault_seconds, _end_faults, world)
    world.kernel.run(fault_seconds + PATIENCE, lambda: world.finished)
    if not world.finished:
        _explain_end(world)


def _explain_end(world: LiveWorld) -> None:
    waiting = world.live.waiting_since()
    if waiting is not None and waiting[1] < world.kernel.now - UPLOAD_SECONDS:
        raise Violation(f"interaction {waiting[0]} was recorded at {waiting[1]:.0f} s, but never stored.")
    head = world.chain.head()
    at = f"it is at step {head.step if head else None} of {world.plan.last_step}"
    if not world.is_trained:
        raise Violation(f"the run does not continue: {at}.")
    serving = {one.name: (one.channel, one.serving) for one in world.followers}
    moves = {name: [(move.kind, move.target.seq) for move in moves[-3:]] for name, moves in world.live.moves.items()}
    raise Violation(f"channels still move, or followers have not reached them: {at}, moves end with {moves}, engines serve {serving}.")


def _traffic(world: LiveWorld, pause: float) -> None:
    """Let users ask, for ever."""
    world.users.ask()
    world.kernel.later(2 * pause * world.random.random(), _traffic, world, pause)


def _inject_fault(world: LiveWorld) -> None:
    """Inject a random fault, unless the faults are over."""
    if not world.faults_over:
        world.random.choice(_FAULTS)(world)


def _end_faults(world: LiveWorld) -> None:
    world.log("", "all faults end")
    world.faults_over = True
    world.network.clear()
    for process in [trainer.process for trainer in world.trainers] + [one.process for one in world.services.values() if one.process]:
        process.cut_off = False
        process.wake()
    world.supervise_trainer()


def _service(world: LiveWorld) -> Service:
    return world.random.choice(list(world.services.values()))


def _kill_service(world: LiveWorld) -> None:
    world.kill_service(_service(world), 40 * world.random.random())


def _kill_service_soon(world: LiveWorld) -> None:
    process = _service(world).process
    if process is not None and process.alive:
        world.kill_after(process, world.random.randrange(25))


def _disconnect_service(world: LiveWorld) -> None:
    process = _service(world).process
    if process is not None:
        world.log(process.name, "is disconnected")
        process.cut_off = True
        world.kernel.later(90 * world.random.random(), setattr, process, "cut_off", False)


def _forget_answers(world: LiveWorld) -> None:
    """Restart engines' tables of answers: a gateway can no longer ask what they drew before."""
    world.log("", "engines forget what they drew")
    world.drawn.clear()


def _step_clock(world: LiveWorld) -> None:
    """Set the store's clock forward."""
    seconds = world.random.choice([20.0, 600.0, 7200.0])
    world.log("", f"the store's clock is set by {seconds:+g} seconds")
    world.store.objects.clock_shift += seconds


_FAULTS: tuple[Callable[[LiveWorld], None], ...] = (
    _kill_service,
    _kill_service,
    _kill_service_soon,
    _kill_service_soon,
    _kill_service_soon,
    _disconnect_service,
    _forget_answers,
    degrade_network,
    degrade_network,
    store_down,
    _step_clock,
    kill_trainer,
    kill_trainer_soon,
    kill_trainer_soon,
    freeze_trainer,
    start_second_trainer,
    LiveWorld.vandalise,
)

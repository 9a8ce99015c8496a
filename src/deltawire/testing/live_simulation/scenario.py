"""One run of live traffic, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ...fleet.options import FleetOptions
from ...fleet.rules.staleness import StalenessBudget
from ...format.feedback import FeedbackFile
from ...format.interactions import Interactions
from ..fleet_simulation.engine_model import EngineModel
from ..fleet_simulation.faults import start_second_trainer
from ..fleet_simulation.kernel import Process
from ..fleet_simulation.oracle import Violation
from ..fleet_simulation.parse_cache import cached_parsing
from ..fleet_simulation.store_model import Network
from ..fleet_simulation.trainer_model import Plan
from ..fleet_simulation.world import Member, World
from .live_oracle import LiveOracle
from .live_trainer import LiveTrainerModel
from .users import Traffic

_FAULTS_END = 600.0
_LONGEST = 20_000.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Parameters
    ----------
    seed
        The seed.
    violation
        The rule that was broken; None if all rules held.
    events
        How many events happened.
    trained
        How many interactions were trained on, in all lines of history.
    answers
        How many interactions there were.
    trainers
        How many trainers ran.
    """

    seed: int
    violation: str | None
    events: int
    trained: int
    answers: int
    trainers: int


@dataclass(slots=True)
class LiveWorld(World):
    """A fleet with live traffic.

    Parameters
    ----------
    most
        The most interactions of a step.
    """

    most: int = 4

    def __post_init__(self) -> None:
        World.__post_init__(self)
        self.oracle = LiveOracle(self.plan.run, self.chain, self.store.objects, self.plan.budget)

    def make_trainer(self, process: Process) -> LiveTrainerModel:
        return LiveTrainerModel(**self.trainer_parts(process), most=self.most)


def simulate(seed: int, *, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run live traffic in virtual time, and judge it. The seed determines everything that happens.

    Parameters
    ----------
    seed
        The seed.
    trace
        Called with one line for every event.
    """
    random = Random(f"live/{seed}")
    plan = Plan(
        run=f"{random.getrandbits(128):032x}",
        last_step=random.randint(4, 7),
        tasks=random.choice([0, 0, 1, 2]),
        rows=1,
        budget=StalenessBudget(random.choice([2, 4, 8])),
        options=FleetOptions(lease_seconds=30, poll_seconds=2.0, keep_steps=random.choice([1, 2, 4])),
        train_seconds=random.uniform(5, 30),
        checkpoint_every=1,
        polls_while_training=random.random() < 0.7,
    )
    network = Network(delay=random.choice([0.02, 0.5]), lost=random.choice([0.0, 0.02]), unanswered=random.choice([0.0, 0.02]))
    world = LiveWorld(random, plan, network, granularity=random.choice([0.0, 1.0]), trace=trace, most=random.randint(1, 5))
    traffic = Traffic(world, random)
    assert isinstance(world.oracle, LiveOracle)
    world.oracle.traffic = traffic
    traffic.start(random.randint(1, 3))
    for number in range(2 if plan.tasks else 0):
        world.add_member(Member(f"m{number}", EngineModel(world.kernel, random, world.chain, rate=8.0, sync_seconds=2.0), 0.0, 1))
    world.start_trainer()
    for _ in range(random.choice([0, 1, 2, 4])):
        _plan_fault(world, random)
    world.kernel.later(_FAULTS_END, _end_faults, world)
    violation = None
    try:
        with cached_parsing(Interactions, FeedbackFile):
            world.kernel.run(_LONGEST, lambda: world.finished)
        if not world.finished:
            raise Violation(f"the run did not finish within {_LONGEST:g} virtual seconds.")
    except Violation as error:
        violation = str(error)
    return Outcome(seed, violation, world.kernel.events, world.oracle.trained, len(traffic.answers), len(world.trainers))


def _plan_fault(world: LiveWorld, random: Random) -> None:
    """Kill, freeze or replace the trainer at some moment, or right after some request."""
    at = random.uniform(5, _FAULTS_END - 100)
    kind = random.choice(["kill", "request", "freeze", "replace"])
    if kind == "kill":
        world.kernel.later(at, world.kill_trainer, random.uniform(1, 30))
    elif kind == "request":
        world.kernel.later(at, lambda: world.kill_after(world.trainers[-1].process, random.randrange(30)))
    elif kind == "replace":
        world.kernel.later(at, start_second_trainer, world)  # the one before continues, and does not know
    else:
        world.kernel.later(at, _freeze, world, random.uniform(5, 120))


def _freeze(world: LiveWorld, seconds: float) -> None:
    process = world.trainers[-1].process
    process.freeze()
    world.kernel.later(seconds, process.wake)
    world.kernel.later(seconds / 2, start_second_trainer, world)


def _end_faults(world: LiveWorld) -> None:
    world.faults_over = True
    world.network.clear()
    world.kernel.later(1.0, world.supervise_trainer)

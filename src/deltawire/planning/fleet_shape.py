"""The members of a fleet, and how long a training step takes if they wait for versions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .network import Arrival
from .quantities import checked


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The sizes and speeds of a fleet.

    Parameters
    ----------
    generate_seconds
        Seconds in which all members together generate the tokens of one training step, if none of them waits.
    train_seconds
        Seconds of training for each step.
    staleness
        As `StalenessBudget.steps`: how many updates a policy may be behind.
    task_tokens
        Tokens of one task, which is the unit of work that a member leases.
    tokens_per_second
        Tokens that one member generates in a second.
    gpus_per_member
        The number of GPUs of one member.
    trainer_gpus
        The number of GPUs of the trainer.
    """

    generate_seconds: float = 60.0
    train_seconds: float = 30.0
    staleness: int = 1
    task_tokens: float = 4096.0
    tokens_per_second: float = 2500.0
    gpus_per_member: int = 1
    trainer_gpus: int = 8

    def __post_init__(self) -> None:
        checked(self.generate_seconds, "The seconds of generation", most=1e7, least=1e-3)
        checked(self.train_seconds, "The seconds of training", most=1e7)
        checked(self.staleness, "The staleness", most=1000)
        checked(self.task_tokens, "The tokens of a task", most=1e9, least=1)
        checked(self.tokens_per_second, "The tokens per second of a member", most=1e9, least=1e-3)
        checked(self.gpus_per_member, "The GPUs of a member", most=1e6, least=1)
        checked(self.trainer_gpus, "The GPUs of the trainer", most=1e6, least=1)


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a run. Requests and stored bytes have no price here; ask your provider.

    Parameters
    ----------
    egress
        Dollars for each GB (1e9 bytes) that crosses a link.
    gpu_hour
        Dollars for an hour of one GPU.
    """

    egress: float = 0.09
    gpu_hour: float = 2.5

    def __post_init__(self) -> None:
        checked(self.egress, "The price of egress", most=1e6)
        checked(self.gpu_hour, "The price of a GPU hour", most=1e6)


def gpus_to_hold(state_bytes: float) -> int:
    """Return the smallest power of two of GPUs that hold a model: 64 GB of weights on each.

    Parameters
    ----------
    state_bytes
        The size of a full checkpoint.
    """
    gpus = 1
    while gpus * 64e9 < state_bytes and gpus < 1 << 19:
        gpus *= 2
    return gpus


def step_seconds(shape: FleetShape, arriving: Sequence[Arrival]) -> float:
    """Return the seconds from one training step to the next, in the long run.

    A step takes at least as long as its training, and as the generation of its tokens. Members of a region may work on a step from the
    arrival of the oldest version that the staleness admits until the step's training begins. Regions that get versions later work less,
    and other regions make their share. If versions cross a link more slowly than they are made, steps come in bursts.

    Parameters
    ----------
    shape
        The fleet.
    arriving
        How a version arrives in each region. Empty: the network costs nothing.
    """
    low = max(shape.generate_seconds, shape.train_seconds)
    if not arriving:
        return max(low, (shape.generate_seconds + shape.train_seconds) / (shape.staleness + 1))
    if shape.staleness:
        # A reader fetches the first version of a burst at once, and the newest one after that, so two versions cross for each burst.
        low = max(low, 2 * min(one.link_seconds for one in arriving) / (shape.staleness + 1))
    members = sum(one.region.members for one in arriving)

    def generates_enough(period: float) -> bool:
        working = sum(one.region.members * _busy_share(shape, one, period) for one in arriving)
        return working * period >= shape.generate_seconds * members * (1 - 1e-12)

    if generates_enough(low):
        return low
    high = 2 * low
    while not generates_enough(high):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if generates_enough(middle) else (middle, high)
    return high


def _busy_share(shape: FleetShape, arrival: Arrival, period: float) -> float:
    """Return the share of time for which the members of a region have work, if steps follow each other after `period` seconds."""
    window = (shape.staleness + 1) * period - shape.train_seconds - arrival.behind
    if arrival.link_seconds > period:
        window -= period / 2  # the link is busy when a version is published, so the region begins to fetch it later
    return min(1.0, max(0.0, window / max(period, arrival.link_seconds)))

"""Limits of links, stores and the trainer, and how much of them a run uses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..fleet.steps.requests import MOST_TOGETHER
from .fleet_shape import FleetShape
from .link_model import PIECE_BYTES
from .network import Arrival

_PUTS, _GETS = 3_500, 5_500
"""Requests per second that S3 takes for one prefix."""

_GET_SECONDS = 0.063
"""Seconds in which S3 answers a small GET, in the median."""

PUTS_PER_ROLLOUT, GETS_PER_ROLLOUT, TRAINER_PER_ROLLOUT = 3.41, 5.78, 3.39
"""Writes and reads for each accepted rollout, and the requests of the trainer among them: the row of 512 members in
benchmarks/results/fleet-coordination.json."""

_OFFERS = 8_000
"""Most offers on a board."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource with a limited rate.

    Parameters
    ----------
    name
        The resource.
    used
        How much of it the run uses.
    allowed
        How much of it there is.
    unit
        What `used` and `allowed` count.
    """

    name: str
    used: float
    allowed: float
    unit: str

    @property
    def share(self) -> float:
        """The share that is used. Above 1, the run cannot go at the planned speed."""
        return self.used / self.allowed


def limits(shape: FleetShape, arriving: Sequence[Arrival], objects: int, period: float) -> list[Limit]:
    """Return all limits, the one that is reached first in front.

    Parameters
    ----------
    shape
        The fleet.
    arriving
        How a version arrives in each region.
    objects
        The number of files of a version.
    period
        Seconds from one step to the next.
    """
    members = sum(one.region.members for one in arriving)
    rollouts = members * shape.tokens_per_second * shape.generate_seconds / shape.task_tokens / period
    fetches = sum(max(objects, one.link_bytes / PIECE_BYTES) for one in arriving) / period
    found = [
        Limit(f"link of {one.region.name}", 8 * one.link_bytes * one.share_fetched(period) / period, one.region.link.rate, "bit/s")
        for one in arriving
    ]
    found += [
        Limit("PUTs of the origin", rollouts * PUTS_PER_ROLLOUT + objects / period, _PUTS, "requests/s"),
        Limit("GETs of the origin", rollouts * GETS_PER_ROLLOUT + fetches, _GETS, "requests/s"),
        Limit("requests of the trainer", rollouts * TRAINER_PER_ROLLOUT, MOST_TOGETHER / _GET_SECONDS, "requests/s"),
        Limit("offers on the board", members, _OFFERS, "members"),
    ]
    return sorted(found, key=lambda limit: -limit.share)

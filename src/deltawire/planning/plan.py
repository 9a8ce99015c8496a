"""Puts workload, network, fleet and prices together: what a training step costs with full weights, XOR + zstd-1 and deltawire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .fleet_model import simulate
from .fleet_shape import FleetShape, Prices, step_seconds
from .network import Arrival, Network, Shipment, arrivals
from .quantities import checked
from .store_limits import Limit, limits
from .workload import Workload

_XOR_ENCODES, _XOR_DECODES = 1.59 / 6.19, 1.24 / 6.86
"""Speed of XOR + zstd-1 as it is shipped, relative to deltawire's: benchmarks/results/codec-speed.json."""

FULL, XOR, DELTAWIRE, NO_RELAYS = "full weights", "XOR + zstd-1", "deltawire", "deltawire, no relays"


@dataclass(frozen=True, slots=True)
class Codec:
    """The speed of encoding and decoding weights.

    Parameters
    ----------
    encode_rate
        Bytes of the full state that the trainer encodes in a second, all its ranks together.
    decode_rate
        Bytes of the full state that a member decodes in a second.
    """

    encode_rate: float
    decode_rate: float

    @classmethod
    def of_gpus(cls, fleet: FleetShape) -> Codec:
        """Return the rates if two cores beside each GPU encode or decode its part of the weights (benchmarks/results/codec-speed.json)."""
        return cls(10.8e9 * fleet.trainer_gpus, 11.3e9 * fleet.gpus_per_member)

    def __post_init__(self) -> None:
        checked(self.encode_rate, "The encoding rate, in bytes per second,", most=1e16, least=1)
        checked(self.decode_rate, "The decoding rate, in bytes per second,", most=1e16, least=1)


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The costs of one way to send weights.

    Parameters
    ----------
    name
        The method.
    bytes_per_step
        Bytes that one copy of an update has, on average over the steps.
    total_bytes
        Bytes that one copy of all updates has, over all steps.
    arriving
        How an update arrives in each region.
    step_seconds
        Seconds from one training step to the next.
    formula_seconds
        The same by the formula alone, without a fleet in virtual time.
    idle_share
        The share of time for which members wait.
    of_free
        Training steps per second, relative to a network that costs nothing.
    egress_dollars, gpu_dollars
        Dollars for each step.
    tokens_per_dollar
        Generated tokens for each dollar.
    limits
        What the run uses of links, stores and the trainer; first the resource that is used most.
    """

    name: str
    bytes_per_step: float
    total_bytes: float
    arriving: Sequence[Arrival]
    step_seconds: float
    formula_seconds: float
    idle_share: float
    of_free: float
    egress_dollars: float
    gpu_dollars: float
    tokens_per_dollar: float
    limits: Sequence[Limit]

    @property
    def is_reachable(self) -> bool:
        """True if no limit is exceeded. Otherwise the run is slower than the plan says, and costs more."""
        return self.limits[0].share <= 1

    @property
    def dollars(self) -> float:
        """The dollars for each step."""
        return self.egress_dollars + self.gpu_dollars

    @property
    def worst(self) -> Arrival:
        """The arrival of an update in the region that gets it last."""
        return max(self.arriving, key=lambda one: one.behind)

    @property
    def median_behind(self) -> float:
        """Seconds after which half of all members have the update."""
        half = sum(one.region.members for one in self.arriving) / 2
        for one in sorted(self.arriving, key=lambda one: one.behind):
            half -= one.region.members
            if half <= 0:
                break
        return one.behind


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The costs of a run.

    Parameters
    ----------
    workload, network, fleet, prices, codec
        What the plan was made for.
    methods
        The costs of each way to send weights: full weights first.
    """

    workload: Workload
    network: Network
    fleet: FleetShape
    prices: Prices
    codec: Codec
    methods: Sequence[MethodPlan]

    def method(self, name: str) -> MethodPlan:
        """Return the method with a name.

        Parameters
        ----------
        name
            The name of the method, such as "deltawire".
        """
        return next(one for one in self.methods if one.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        work, network = self.workload, self.network
        return {
            "version": 1,
            "workload": {
                **asdict(work),
                "files": work.objects,
                "anchor_versions": work.anchor_versions,
            },
            "network": {
                "relays": network.relays,
                "cut_through": network.cut_through,
                "streams": network.streams,
                "poll_seconds": network.poll_seconds,
                "local": asdict(network.local),
                "regions": [asdict(region) for region in network.regions],
                "model": asdict(network.model),
            },
            "fleet": {"members": network.members, **asdict(self.fleet)},
            "prices": asdict(self.prices),
            "codec": asdict(self.codec),
            "methods": [_as_json(one, self.methods[0]) for one in self.methods],
        }


def plan(
    workload: Workload,
    network: Network,
    fleet: FleetShape | None = None,
    prices: Prices | None = None,
    *,
    codec: Codec | None = None,
    seed: int | None = 0,
) -> PlanReport:
    """Return what each training step of a run costs.

    All methods use the network in the same way, so that they differ only by what they send. If the network has relays, the last row shows
    deltawire without them.

    Parameters
    ----------
    workload
        The bytes of each step.
    network
        Regions and links.
    fleet
        How members generate, and the trainer trains.
    prices
        The prices of egress and GPUs.
    codec
        How fast weights are encoded and decoded. None: with two cores for each GPU.
    seed
        Chooses the lengths of tasks of the fleet in virtual time, which gives the seconds of a step. None: use the formula alone.
    """
    fleet, prices = fleet or FleetShape(), prices or Prices()
    codec = codec or Codec.of_gpus(fleet)
    encode, decode = workload.state_bytes / codec.encode_rate, workload.state_bytes / codec.decode_rate
    coded = workload.fetched(workload.delta_bytes)
    shipments = [
        (FULL, Shipment(workload.objects, workload.state_bytes), workload.steps * workload.state_bytes, network),
        (
            XOR,
            Shipment(workload.objects, workload.fetched(workload.xor_bytes), encode / _XOR_ENCODES, decode / _XOR_DECODES),
            workload.total(workload.xor_bytes),
            network,
        ),
        (DELTAWIRE, Shipment(workload.objects, coded, encode, decode), workload.total(workload.delta_bytes), network),
    ]
    if network.relays and network.members > len(network.regions):
        alone = replace(network, relays=False)
        shipments.append((NO_RELAYS, Shipment(workload.objects, coded, encode, decode), workload.total(workload.delta_bytes), alone))
    free, _ = _pace(fleet, [replace(one, behind=0.0, link_seconds=1e-9) for one in arrivals(network, shipments[0][1])], seed)
    methods = [_method(name, shipment, total, used, fleet, prices, free, seed) for name, shipment, total, used in shipments]
    return PlanReport(workload, network, fleet, prices, codec, methods)


def _pace(fleet: FleetShape, arriving: Sequence[Arrival], seed: int | None) -> tuple[float, float]:
    """Return the seconds of a step, and the share of time for which members wait."""
    if seed is None:
        period = step_seconds(fleet, arriving)
        return period, 1 - fleet.generate_seconds / period
    found = simulate(fleet, arriving, seed=seed)
    return found.step_seconds, found.idle_share


def _method(
    name: str, shipment: Shipment, total: float, network: Network, fleet: FleetShape, prices: Prices, free: float, seed: int | None
) -> MethodPlan:
    arriving = arrivals(network, shipment)
    period, idle = _pace(fleet, arriving, seed)
    egress = prices.egress * sum(one.link_bytes * one.share_fetched(period) for one in arriving) / 1e9
    gpus = network.members * fleet.gpus_per_member + fleet.trainer_gpus
    gpu = prices.gpu_hour * gpus * period / 3600
    tokens = network.members * fleet.tokens_per_second * fleet.generate_seconds
    return MethodPlan(
        name=name,
        bytes_per_step=shipment.nbytes,
        total_bytes=total,
        arriving=arriving,
        step_seconds=period,
        formula_seconds=step_seconds(fleet, arriving),
        idle_share=idle,
        of_free=free / period,
        egress_dollars=egress,
        gpu_dollars=gpu,
        tokens_per_dollar=tokens / (egress + gpu) if egress + gpu else 0.0,
        limits=limits(fleet, arriving, shipment.objects, period),
    )


def _as_json(one: MethodPlan, full: MethodPlan) -> dict[str, Any]:
    return {
        "name": one.name,
        "bytes_per_step": one.bytes_per_step,
        "total_bytes": one.total_bytes,
        "saved": 1 - one.total_bytes / full.total_bytes,
        "behind_seconds": {"median": one.median_behind, "worst": one.worst.behind, "worst_region": one.worst.region.name},
        "step_seconds": one.step_seconds,
        "formula_seconds": one.formula_seconds,
        "idle_share": one.idle_share,
        "of_free": one.of_free,
        "dollars_per_step": {"egress": one.egress_dollars, "gpu": one.gpu_dollars, "total": one.dollars},
        "tokens_per_dollar": one.tokens_per_dollar,
        "regions": [
            {
                "name": arrival.region.name,
                "behind_seconds": arrival.behind,
                "link_seconds": arrival.link_seconds,
                "link_bytes": arrival.link_bytes,
            }
            for arrival in one.arriving
        ],
        "reachable": one.is_reachable,
        "limits": [{**asdict(limit), "share": limit.share} for limit in one.limits],
    }

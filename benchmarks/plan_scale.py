"""Plan runs of 8 billion to a trillion weights, in 1 to 64 regions and with 8 to 10,000 members, as `deltawire plan` does."""

from __future__ import annotations

from report import Table
from step_cost import MODELS

from deltawire.planning import FleetShape, Link, Network, Prices, Region, Workload, plan
from deltawire.planning.fleet_shape import gpus_to_hold
from deltawire.planning.plan import DELTAWIRE, FULL, MethodPlan, PlanReport
from deltawire.planning.store_limits import Limit

LINK = Link(1e9, 0.08)
RATE = 2_500.0
"""Tokens per second of a member."""
FLEETS = [(1, 8, 15), (4, 64, 15), (4, 512, 15), (16, 2_000, 15), (64, 8_000, 15), (64, 8_000, 30), (64, 10_000, 30)]
"""Regions, members, and the seconds of a task."""
FORMATS = {"8B": "bf16", "70B": "bf16", "1T": "fp8-block"}


def planned(model: str, regions: int, members: int, task_seconds: float) -> PlanReport:
    """Return the plan that `deltawire plan` makes of a model with its default options."""
    weights, in_bf16 = MODELS[model]
    dtype = FORMATS[model]
    work = Workload.of_model(weights, dtype, in_bf16=0 if dtype == "bf16" else in_bf16)
    each = gpus_to_hold(work.state_bytes)
    fleet = FleetShape(gpus_per_member=each, trainer_gpus=max(8, 4 * each), tokens_per_second=RATE, task_tokens=task_seconds * RATE)
    shares = [members // regions + (number < members % regions) for number in range(regions)]
    return plan(work, Network([Region(f"r{number + 1}", LINK, share) for number, share in enumerate(shares)]), fleet, Prices())


def measure() -> Table:
    """Return the table of docs/scale.md."""
    table = Table(
        "plan-scale",
        f"Computed: links of {LINK.rate / 1e9:.0f} Gbit/s and {1000 * LINK.rtt:.0f} ms, and all else as `deltawire plan` assumes",
        [
            "model",
            "regions",
            "members",
            "a task",
            "full weights: all by",
            "deltas: all by",
            "full weights: speed",
            "deltas: speed",
            "deltas: $/step",
            "tokens/$, deltas to full",
            "deltas: PUT / GET per second",
            "first limit with deltas",
        ],
    )
    for model, dtype in FORMATS.items():
        for regions, members, seconds in FLEETS:
            report = planned(model, regions, members, seconds)
            full, deltas = report.method(FULL), report.method(DELTAWIRE)
            cells = ["–"] * 4
            if deltas.is_reachable:
                ratio = deltas.tokens_per_dollar / full.tokens_per_dollar
                cells = [_percent(full.of_free), _percent(deltas.of_free), f"{deltas.dollars:,.2f}", f"{ratio:.3g}×"]
            name = f"{model} {dtype.removesuffix('-block')}"
            row = [name, str(regions), f"{members:,}", f"{seconds} s", f"{full.worst.behind:,.0f} s", f"{deltas.worst.behind:.1f} s"]
            table.rows.append([*row, *cells, _requests(deltas), _limit(deltas)])
    allowed = " and ".join(f"{limit.allowed:,.0f} {limit.name[:3]}" for limit in _of_the_origin(deltas))
    table.notes.append(
        "The embedding and the output layer of the 1T model are in bf16. PUT and GET are the requests of trainer, members and relays "
        f"to the origin, for records, results and weights. S3 takes {allowed} requests per second for one prefix. "
        "Rows without a speed have the requests that the planned speed would need."
    )
    return table


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _of_the_origin(method: MethodPlan) -> list[Limit]:
    return sorted((limit for limit in method.limits if limit.name.endswith("of the origin")), key=lambda limit: limit.allowed)


def _requests(method: MethodPlan) -> str:
    return " / ".join(f"{limit.used:,.0f}" if limit.used >= 10 else f"{limit.used:.1f}" for limit in _of_the_origin(method))


def _limit(method: MethodPlan) -> str:
    first = method.limits[0]
    name = "link" if first.name.startswith("link") else first.name
    return f"{name}, {first.share:.0%}"

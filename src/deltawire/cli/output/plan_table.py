"""The report of `deltawire plan` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from . import figures
from .tables import lay_out_table
from .terminal import result_console

if TYPE_CHECKING:
    from ...planning.plan import MethodPlan, PlanReport

_WIDEST = 80
_TITLES = ("", "bytes", "half by", "all by", "step", "wait", "speed", "$/step", "tokens/$")


def print_plan(report: PlanReport) -> None:
    """Print the report on stdout, in at most 80 columns."""
    console = result_console()
    width = min(console.width, _WIDEST)
    for number, line in enumerate(plan_lines(report, width)):
        console.print(Text(line, style="bold" if number == 0 else ""), soft_wrap=True)


def plan_lines(report: PlanReport, width: int = _WIDEST) -> list[str]:
    """Return the lines of the report.

    Parameters
    ----------
    report
        The report.
    width
        The most columns of a line.
    """
    rows = [_row(one) for one in report.methods]
    heading, lines = lay_out_table(_TITLES, rows, width=width, left=("",), dropped_first=("half by", "tokens/$", "wait"))
    texts = [_about(report), "", heading, *lines, "", *_limits(report), *_totals(report), *_assumptions(report)]
    return [part for text in texts for part in (figures.wrap_words(text, width, indent=2) if len(text) > width else [text])]


def _row(one: MethodPlan) -> tuple[str, ...]:
    return (
        one.name if one.is_reachable else f"{one.name} *",
        figures.size(round(one.bytes_per_step)),
        _seconds(one.median_behind),
        _seconds(one.worst.behind),
        _seconds(one.step_seconds),
        f"{100 * one.idle_share:.0f}%",
        _percent(one.of_free),
        _dollars(one.dollars),
        figures.short_count(round(one.tokens_per_dollar)),
    )


def _about(report: PlanReport) -> str:
    work, network = report.workload, report.network
    regions = f"{len(network.regions):,} region{'s' if len(network.regions) > 1 else ''}"
    changed = "" if work.changed is None else f", {100 * work.changed:.3g}% changed"
    return f"{figures.size(round(work.state_bytes))} of weights{changed}; {network.members:,} members in {regions}"


def _limits(report: PlanReport) -> list[str]:
    lines = ["First limit, and the share of it that is used:"]
    for one in report.methods:
        first = one.limits[0]
        lines.append(f"  {one.name}: {first.name}, {100 * first.share:.3g}%{'' if one.is_reachable else ' (too much)'}")
    if not all(one.is_reachable for one in report.methods):
        lines.append(
            "Methods with a star use more than there is, so they are slower and cost more than the table says. Fewer and larger tasks "
            "(--tokens) need fewer requests."
        )
    return lines


def _totals(report: PlanReport) -> list[str]:
    work = report.workload
    full = report.methods[0].total_bytes
    lines = ["", f"{work.steps:,} steps, one copy:"]
    for one in report.methods[:3]:
        saved = "" if one.total_bytes == full else f", {100 * (one.total_bytes / full - 1):+.1f}%".replace("-", "−")
        lines.append(f"  {one.name}: {figures.size(round(one.total_bytes))}{saved}")
    each = work.anchor_versions
    lines.append(
        f"  anchors of deltawire, to the origin only: one every {each:,} versions, {figures.size(round(work.state_bytes / each))} per step"
    )
    return lines


def _assumptions(report: PlanReport) -> list[str]:
    fleet, network, codec = report.fleet, report.network, report.codec
    copies = "one copy to each region" if network.relays else "one copy to each member"
    slowest = min(network.regions, key=lambda region: region.link.rate)
    return [
        "",
        f"Assumed: {copies}; slowest link {_bits(slowest.link.rate)}, {1000 * slowest.link.rtt:.3g} ms; within regions "
        f"{_bits(network.local.rate)}; stores answer after {1000 * network.model.server_seconds:.3g} ms; "
        f"{'' if network.cut_through else 'no '}cut-through; staleness {fleet.staleness}; "
        f"{figures.duration(fleet.generate_seconds)} of generation and {figures.duration(fleet.train_seconds)} of training for each step; "
        f"{fleet.gpus_per_member:,} GPU{'s' if fleet.gpus_per_member > 1 else ''} per member, {fleet.trainer_gpus:,} for the trainer; "
        f"encoding {figures.size(round(codec.encode_rate))}/s, decoding {figures.size(round(codec.decode_rate))}/s; "
        f"${report.prices.egress:g} per GB, ${report.prices.gpu_hour:g} per GPU hour.",
        "Computed from recorded updates and a model of links; nothing was measured here.",
    ]


def _seconds(value: float) -> str:
    """Return a time with three digits up to ten minutes, because steps differ by little."""
    return figures.duration(value) if value >= 600 else f"{value:.{0 if value >= 99.95 else 1}f} s"


def _bits(rate: float) -> str:
    return f"{figures.short_count(round(rate))}bit/s"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.995 or share < 0.9 else 1}f}%" if share >= 0.01 else f"{100 * share:.2g}%"


def _dollars(amount: float) -> str:
    return f"{amount:,.{2 if amount < 1000 else 0}f}"

"""Shows a fleet as lines of text, for `deltawire members` and `deltawire top`. Narrow terminals show fewer columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from . import figures
from .tables import lay_out_table

if TYPE_CHECKING:
    from ...fleet.overview import SeenFleet, SeenMember, SeenRound

_TITLES = ("member", "state", "step", "behind", "update", "link", "latency", "works on", "tokens", "tokens/s", "heard")
_DROPPED_FIRST = ("behind", "tokens", "latency", "works on", "link", "update", "tokens/s")
_WIDEST_NAME = 24
_ROUND_TITLES = ("round", "for step", "tasks", "leased", "delivered", "")


def short_name(name: str, width: int) -> str:
    """Return the name of a member; a long one without its middle, because members of one fleet differ at the end.

    Uses three dots, because an ellipsis takes more columns in a terminal that shows only ASCII characters.
    """
    return name if len(name) <= width else f"{name[: width // 2 - 2]}...{name[-(width - width // 2 - 1) :]}"


def member_lines(fleet: SeenFleet, *, width: int, now: float) -> list[str]:
    """Return a heading and a line per member, the most recent record first. Below a member is the reason why it left, if it gave one.

    Returns an empty list if there are no members.
    """
    if not fleet.members:
        return []
    ordered = sorted(fleet.members, key=lambda one: (-one.modified, one.beat.member))
    rows = [_member_row(one, fleet, now) for one in ordered]
    heading, lines = lay_out_table(_TITLES, rows, width=width, left=("member", "state", "works on"), dropped_first=_DROPPED_FIRST)
    reasons = [[] if one.beat.reason is None else [_cut(f"  {figures.printable(one.beat.reason)}", width)] for one in ordered]
    return [heading, *(text for line, why in zip(lines, reasons, strict=True) for text in (line, *why))]


def round_lines(rounds: Sequence[SeenRound], *, width: int) -> list[str]:
    """Return a heading and a line per round, the newest first; an empty list if there are no rounds."""
    if not rounds:
        return []
    rows = [
        (
            str(one.record.round),
            str(one.record.for_step),
            f"{one.record.tasks:,}",
            f"{one.leased:,}",
            f"{one.delivered:,}",
            "acknowledged" if one.acknowledged else "",
        )
        for one in rounds
    ]
    heading, lines = lay_out_table(_ROUND_TITLES, rows, width=width, left=("",))
    return [heading, *lines]


def is_silent(one: SeenMember, fleet: SeenFleet, now: float) -> bool:
    """Return whether a member wrote no record for longer than a lease lasts, by this machine's clock. Only for display."""
    return now - one.modified > (60 if fleet.board is None else fleet.board.lease_seconds)


def member_as_json(one: SeenMember, fleet: SeenFleet, now: float) -> dict[str, Any]:
    """Return a member as plain values."""
    beat = one.beat
    return {
        "member": beat.member,
        "state": beat.state,
        "reason": beat.reason,
        "engine": beat.engine,
        "silent": is_silent(one, fleet, now),
        "heard_seconds_ago": round(max(0.0, now - one.modified), 3),
        "seq": beat.seq,
        "step": beat.step,
        "behind": beat.lag,
        "update_seconds": None if beat.behind_ms is None else beat.behind_ms / 1000,
        "link": None
        if beat.link is None
        else {"bytes_per_second": beat.link.goodput, "latency_ms": beat.link.latency_ms, "failures": beat.link.failures},
        "tokens": beat.tokens,
        "tokens_per_second": _rate(one),
        "working": [dict(zip(("round", "task", "attempt"), attempt, strict=True)) for attempt in beat.working],
    }


def round_as_json(one: SeenRound) -> dict[str, Any]:
    """Return a round as plain values."""
    return {
        "round": one.record.round,
        "for_step": one.record.for_step,
        "epoch": one.record.epoch,
        "tasks": one.record.tasks,
        "leased": one.leased,
        "delivered": one.delivered,
        "acknowledged": one.acknowledged,
    }


def _member_row(one: SeenMember, fleet: SeenFleet, now: float) -> tuple[str, ...]:
    beat, link = one.beat, one.beat.link
    rate = _rate(one)
    state = "silent" if is_silent(one, fleet, now) and beat.state != "left" else beat.state
    tasks = [f"{number}/{task}" for number, task, _ in beat.working]
    return (
        short_name(beat.member, _WIDEST_NAME),
        state,
        "" if beat.step is None else str(beat.step),
        str(beat.lag) if beat.lag else "",
        "" if beat.behind_ms is None else figures.duration(beat.behind_ms / 1000),
        "" if link is None or link.goodput is None else f"{figures.size(link.goodput)}/s",
        "" if link is None or link.latency_ms is None else f"{figures.short_count(link.latency_ms)} ms",
        " ".join(tasks[:2]) + (f" +{len(tasks) - 2}" if len(tasks) > 2 else ""),
        figures.short_count(beat.tokens),
        "" if rate is None else figures.short_count(round(rate)),
        f"{figures.duration(max(0.0, now - one.modified))} ago",
    )


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 3)}..."


def _rate(one: SeenMember) -> float | None:
    """Return the tokens per second of busy time, as the member reports them; None before it has finished a task."""
    return round(1000 * one.beat.tokens / one.beat.busy_ms, 3) if one.beat.busy_ms else None

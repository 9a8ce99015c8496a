"""Channels and their moves, as people and programs read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...format.records.channel_records import ChannelMove
from . import figures
from .tables import lay_out_table
from .terminal import print_line, print_rows, print_wrapped, result_console


@dataclass(frozen=True, slots=True)
class ShownMove:
    """A move, and the number and step of the version that it names."""

    move: ChannelMove
    version: int
    step: int | None


def move_as_json(shown: ShownMove) -> dict[str, Any]:
    """Return a move as JSON values."""
    move = shown.move
    return {
        "channel": move.channel,
        "move": move.move,
        "kind": move.kind,
        "version": shown.version,
        "seq": move.target.seq,
        "step": shown.step,
        "digest": move.target.digest and move.target.digest.hex(),
        "share": None if move.share is None else move.share / 1_000_000,
        "why": move.why,
        "by": move.by,
        "time": move.time / 1000,
        "signed_by": move.signature and move.signature.key,
    }


def print_move(shown: ShownMove) -> None:
    """Print one move that was just made."""
    move = shown.move
    print_rows(
        f"the channel {move.channel} names version {shown.version}",
        [
            ("move", f"{move.move}, {move.kind}"),
            ("step", "" if shown.step is None else f"{shown.step:,}"),
            ("share of users", _share(move)),
            ("why", move.why),
            ("by", move.by),
            ("signed", "" if move.signature is None else f"by {move.signature.key}"),
        ],
    )


def print_moves(heading: str, moves: Sequence[ShownMove], *, now: float) -> None:
    """Print a table of moves."""
    console = result_console()
    titles = ["channel", "version", "step", "share", "move", "kind", "age", "by", "why"]
    rows = [
        [
            shown.move.channel,
            str(shown.version),
            "" if shown.step is None else f"{shown.step:,}",
            _share(shown.move),
            str(shown.move.move),
            shown.move.kind,
            figures.duration(now - shown.move.time / 1000),
            figures.printable(shown.move.by),
            figures.printable(shown.move.why),
        ]
        for shown in moves
    ]
    print_wrapped(console, heading, style="bold")
    if not rows:
        print_line("  there are no channels: `deltawire promote URL CHANNEL --version N` makes one")
        return
    left = ("channel", "kind", "by", "why")
    title, lines = lay_out_table(titles, rows, width=console.width - 2, left=left, dropped_first=("by", "why", "move", "step", "age"))
    for line in (title, *lines):
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _share(move: ChannelMove) -> str:
    return "" if move.share is None else f"{figures.percent(move.share, 1_000_000)}%"

"""What `deltawire log` prints: the chain as a picture, then a line per commit. Most lines fit 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from . import chain_picture, figures
from .terminal import result_console

if TYPE_CHECKING:
    from ..format.records import Commit, Run
    from .chain_history import Entry, History

_TITLES = ("", "seq", "kind", "step", "epoch", "age", "size", "smaller", "changed", "≈ %", "ways")
_LEFT = ("", "kind", "ways")
_WIDEST_PICTURE = 100
_STYLES = {"anchor": "green", "fence": "yellow", "rewind": "magenta"}


def print_history(url: str, run: Run, history: History, *, now: float) -> None:
    """Heading, picture, legend, list (newest first), and what is to be known about collection."""
    console = result_console()
    console.print(Text.assemble((figures.printable(run.run), "bold"), f"  {_summary(history)}  ", (url, "dim")), soft_wrap=True)
    if not history.entries:
        return
    for drawn in _picture(history, console.width):
        console.print(Text(f"  {drawn}"), soft_wrap=True)
    console.print(Text(f"  {chain_picture.LEGEND}", style="dim"), soft_wrap=True)
    entries = list(reversed(history.entries))
    rows = [_row(entry, now) for entry in entries]
    widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        # Not rich's own Table: that measures every cell several times, and a chain has thousands of commits.
        padded = [
            cell.ljust(width) if title in _LEFT else cell.rjust(width) for cell, title, width in zip(cells, _TITLES, widths, strict=True)
        ]
        return "  ".join(padded)

    lines = [Text(line(_TITLES), style="bold")]
    for entry, row in zip(entries, rows, strict=True):
        faded = entry.void or entry.abandoned or entry.collected
        lines.append(Text.assemble((line(row), "dim" if faded else _STYLES.get(entry.commit.kind, "")), ("  " + _note(entry), "dim")))
    for text in lines:
        text.rstrip()
    console.print(Text("\n").join(lines), soft_wrap=True)
    if history.floor >= 0:
        console.print(
            Text(f"floor {history.floor}: what only versions up to this one need was collected, or will be", style="dim"), soft_wrap=True
        )


def _summary(history: History) -> str:
    if not history.entries:
        return "no commits yet"
    newest = history.entries[-1].commit
    if newest.state_seq is None:
        return "no versions yet"
    return f"version {newest.state_seq} is in force, {newest.updates:,} published, {figures.size(newest.state_bytes)} of weights"


def _picture(history: History, width: int) -> list[str]:
    glyphs = "".join(chain_picture.glyph(e.commit.kind, void=e.void, anchored=e.anchored) for e in history.entries)
    first, last = history.entries[0].commit.seq, history.entries[-1].commit.seq
    room = min(width, _WIDEST_PICTURE) - len(str(last)) - 3
    return chain_picture.draw(first, glyphs, history.skips, max(room, 8))


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    commit = entry.commit
    ways = ["◆"] if entry.anchored else []
    ways += [f"↷{base}" for base in entry.skips]
    return (
        chain_picture.glyph(commit.kind, void=entry.void, anchored=entry.anchored),
        str(commit.seq),
        commit.kind,
        "" if commit.step is None else str(commit.step),
        str(commit.epoch),
        figures.duration(now - commit.time / 1000),
        figures.size(commit.stored_bytes) if commit.files else "",
        figures.ratio(commit.state_bytes, commit.stored_bytes, "×") if commit.kind == "delta" and commit.files else "",
        figures.short_count(commit.changed) if commit.kind == "delta" else "",
        figures.percent(commit.changed, commit.state_bytes / 2) if commit.kind == "delta" else "",
        " ".join(ways),
    )


def _note(entry: Entry) -> str:
    notes = [_event(entry.commit)]
    if entry.void:
        notes.append("void: written after a newer writer had taken over")
    if entry.abandoned:
        notes.append("abandoned")
    if entry.collected and not entry.anchored:
        notes.append("collected")
    notes += [f"{name}={value}" for name, value in entry.commit.meta.items()]
    return figures.printable(", ".join(filter(None, notes)))


def _event(commit: Commit) -> str:
    if commit.kind == "fence":
        return "the first writer" if commit.seq == 0 else f"writer {commit.epoch} takes over"
    if commit.kind == "rewind" and commit.base is not None:
        return f"back to version {commit.base.seq}"
    return ""

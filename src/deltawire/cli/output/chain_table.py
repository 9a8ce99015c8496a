"""Prints the output of `deltawire log`: a picture of the chain, then a line per version. Narrow terminals show fewer columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from . import chain_picture, figures
from .tables import lay_out_table
from .terminal import print_wrapped, result_console

if TYPE_CHECKING:
    from ...format.records.run_records import Run
    from ...format.records.version_records import Commit
    from ..chain_history import Entry, History

_VERSION, _SEQ = "version", "seq"
_TITLES = ("", _VERSION, "kind", "step", "publisher", "age", "size", "smaller", "changed", "in %", "skips from")
_LEFT = ("", "kind", "skips from")
_DROPPED_FIRST = ("skips from", "publisher", "changed", "in %", "smaller", "kind", "age", "size")
"""The columns that a narrow terminal leaves out, in this order."""

_WIDEST_PICTURE = 100
_STYLES = {"anchor": "green", "fence": "yellow", "rewind": "magenta"}


def print_history(url: str, run: Run, history: History, *, now: float) -> None:
    """Print heading, picture, legend, list (newest first), and the floor of garbage collection.

    Parameters
    ----------
    url
        The chain's location.
    run
        The record of its run.
    history
        The versions or commits to print.
    now
        The current time in seconds after 1970.
    """
    console = result_console()
    print_wrapped(console, f"{run.run}  {_summary(history)}", style="bold")
    print_wrapped(console, url, style="dim")
    if not history.entries:
        return
    for drawn in _picture(history, console.width):
        console.print(Text(f"  {drawn}"), soft_wrap=True)
    for line in figures.wrap_items(chain_picture.legend(by_commits=history.by_commits), console.width - 2):
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    entries = list(reversed(history.entries))
    titles = [_SEQ if title == _VERSION and history.by_commits else title for title in _TITLES]
    rows = [_row(entry, history, now) for entry in entries]
    left_out = {"publisher"} if not history.by_commits else set()
    heading, lines = lay_out_table(titles, rows, width=console.width, left=_LEFT, dropped_first=_DROPPED_FIRST, left_out=left_out)
    texts = [Text(heading, style="bold")]
    for entry, line in zip(entries, lines, strict=True):
        faded = entry.void or entry.abandoned or entry.collected
        texts.append(Text(line, style="dim" if faded else _STYLES.get(entry.commit.kind, "")))
        texts += [Text(part, style="dim") for part in _note_lines(entry, history, line, texts[-1], console.width)]
    console.print(Text("\n").join(texts), soft_wrap=True)
    if history.floor >= 0:
        print_wrapped(console, _floor_text(history), style="dim", indent=2)


def _floor_text(history: History) -> str:
    floor = f"{'commit' if history.by_commits else 'version'} {history.label(history.floor)}"
    at_floor = next((entry for entry in history.entries if entry.commit.seq == history.floor), None)
    if at_floor is not None and at_floor.commit.kind in ("anchor", "delta") and not at_floor.collected:
        return f"floor {floor}: data that only versions before this one need were deleted, or will be"
    return (
        f"floor {floor}: data that only versions up to this one need were deleted, or will be, except the newest full checkpoint among them"
    )


def _summary(history: History) -> str:
    newest = history.head
    if newest is None:
        return "no commits yet"
    if newest.state_seq is None:
        return "no versions yet"
    return f"version {newest.updates} is the newest, {figures.size(newest.state_bytes)} of weights"


def _picture(history: History, width: int) -> list[str]:
    glyphs = "".join(chain_picture.glyph(e.commit.kind, void=e.void, anchored=e.anchored) for e in history.entries)
    first, last = (history.label(entry.commit.seq) for entry in (history.entries[0], history.entries[-1]))
    room = min(width, _WIDEST_PICTURE) - len(str(last)) - 3
    return chain_picture.draw(first, glyphs, history.skips, max(room, 8))


def _row(entry: Entry, history: History, now: float) -> tuple[str, ...]:
    commit = entry.commit
    return (
        chain_picture.glyph(commit.kind, void=entry.void, anchored=entry.anchored),
        str(history.label(commit.seq)),
        "full" if commit.kind == "anchor" else commit.kind,
        "" if commit.step is None else str(commit.step),
        str(commit.epoch),
        figures.duration(now - commit.time / 1000),
        figures.size(commit.stored_bytes) if commit.file_count else "",
        figures.ratio(commit.state_bytes, commit.stored_bytes, "×") if commit.kind == "delta" and commit.file_count else "",
        figures.short_count(commit.changed) if commit.kind == "delta" else "",
        figures.percent(commit.changed, commit.state_bytes / 2) if commit.kind == "delta" and commit.recipe is None else "",
        " ".join(str(history.label(base)) for base in entry.skips),
    )


def _note_lines(entry: Entry, history: History, line: str, row: Text, width: int) -> list[str]:
    """Return the lines for the note of a row. A note that fits is appended to the row instead."""
    note = _note(entry, history)
    if note and len(line) + 2 + len(note) <= width:
        row.append(f"  {note}", style="dim")
        return []
    return [f"    {part}" for part in figures.wrap_words(note, width - 4)] if note else []


def _note(entry: Entry, history: History) -> str:
    notes = [_event(entry.commit, history), f"on {' '.join(entry.channels)}" if entry.channels else ""]
    if entry.void:
        notes.append("void: a newer publisher had taken over")
    if entry.abandoned:
        notes.append("abandoned")
    if entry.collected and not entry.anchored:
        notes.append("collected")
    if entry.changed_files:
        notes.append(f"changed files: {' '.join(entry.changed_files)}")
    notes += [f"{name}={value}" for name, value in entry.commit.meta.items()]
    return figures.printable(", ".join(filter(None, notes)))


def _event(commit: Commit, history: History) -> str:
    if commit.kind == "fence":
        return "the first publisher" if commit.seq == 0 else f"publisher {commit.epoch} takes over"
    if commit.kind == "rewind" and commit.base is not None:
        return f"back to {'commit' if history.by_commits else 'version'} {history.label(commit.base.seq)}"
    return ""

"""Prints the table of `deltawire inspect`. It fits the terminal; a wide one shows longer bars and all modes. Names are never cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from . import figures
from .tables import lay_out_table
from .terminal import print_wrapped, result_console

if TYPE_CHECKING:
    from ...delta.inspect import DeltaFacts, PayloadFacts

_WIDE = 120
_WIDE_TITLES = ("dtype", "elements", "changed", "density %", "where", "ULPs 1/2–3/more %", "bits", "modes")
_TITLES = ("dtype", "elem.", "changed", "dens %", "where", "ULPs 1/2–3/+", "bits", "mode")
_LEFT = ("dtype", "where", "mode", "modes")
_DROPPED_FIRST = ("mode", "where", "ULPs 1/2–3/+", "dtype", "elem.", "bits")
"""The columns that a narrow terminal leaves out, in this order."""


def print_table(file: Path, facts: DeltaFacts, shown: Sequence[PayloadFacts]) -> None:
    """Print a table of tensors, then the totals of all tensors. Long names are printed above their figures.

    Parameters
    ----------
    file
        The path of the delta file.
    facts
        All facts about the delta.
    shown
        The tensors to print, in this order.
    """
    console = result_console()
    wide = console.width >= _WIDE
    titles = _WIDE_TITLES if wide else _TITLES
    rows = [_row(tensor, 16 if wide else 8, wide) for tensor in shown] + [_totals(facts, wide)]
    names = [figures.printable(tensor.label) for tensor in shown] + [f"total of {len(facts.payloads):,}"]
    heading, lines = lay_out_table(titles, rows, width=console.width, left=_LEFT, dropped_first=_DROPPED_FIRST, gap=" ")
    name_width = max(map(cell_len, ["tensor", *names]))
    fits_on_a_line = name_width + 1 + max(map(len, [heading, *lines])) <= console.width
    if not fits_on_a_line:
        heading, lines = lay_out_table(titles, rows, width=console.width - 2, left=_LEFT, dropped_first=_DROPPED_FIRST, gap=" ")
    texts = []
    for name, line, style in zip(["tensor", *names], [heading, *lines], ["bold", *[""] * len(shown), "bold"], strict=True):
        if fits_on_a_line:
            texts.append(Text(f"{set_cell_size(name, name_width)} {line}", style=style))
        else:
            texts += [Text(part, style=style) for part in [*figures.wrap_name(name, console.width), f"  {line}"]]
    print_wrapped(console, f"{file}  {figures.size(facts.bytes)}", style="bold")
    console.print(Text("\n").join(texts), soft_wrap=True)
    for note in _notes(facts, len(shown)):
        print_wrapped(console, note, style="dim", indent=9)


def _row(tensor: PayloadFacts, bar_slices: int, wide: bool) -> tuple[str, ...]:
    return (
        tensor.dtype,
        figures.short_count(tensor.elements),
        figures.short_count(tensor.changed),
        figures.percent(tensor.changed, tensor.elements),
        figures.density_bar(tensor.density, bar_slices),
        _steps(tensor.steps),
        figures.ratio(8 * tensor.bytes, tensor.changed),
        _modes(tensor.values, wide),
    )


def _totals(facts: DeltaFacts, wide: bool) -> tuple[str, ...]:
    elements = sum(tensor.elements for tensor in facts.payloads)
    changed = sum(tensor.changed for tensor in facts.payloads)
    steps: Counter[int] = Counter()
    values: Counter[str] = Counter()
    for tensor in facts.payloads:
        steps.update(dict(enumerate(tensor.steps)))
        values.update(tensor.values)
    return (
        "",
        figures.short_count(elements),
        figures.short_count(changed),
        figures.percent(changed, elements),
        "",
        _steps([steps[power] for power in range(max(steps, default=-1) + 1)]),
        figures.ratio(8 * facts.bytes, changed),
        _modes(values, wide),
    )


def _steps(steps: Sequence[int]) -> str:
    """Return the shares of changes by one, by two or three, and by more ULPs, in whole percent; a dash if no step is known."""
    known = sum(steps)
    if not known:
        return "–"
    shares = [sum(steps[:1]), sum(steps[1:2]), sum(steps[2:])]
    return "/".join(f"{100 * share / known:.0f}" for share in shares)


def _modes(values: Mapping[str, int], wide: bool) -> str:
    """Return the value modes by share of changed elements; on a narrow terminal the most frequent mode, and a plus for the others."""
    used = sorted(((count, mode) for mode, count in values.items() if count), key=lambda pair: (-pair[0], pair[1]))
    changed = sum(count for count, _ in used)
    if not used:
        return "–"
    if len(used) == 1 or not wide:
        return used[0][1] + "+" * (len(used) > 1)
    return ", ".join(f"{mode} {100 * count / changed:.0f}%" for count, mode in used)


def _notes(facts: DeltaFacts, shown: int) -> list[str]:
    notes = []
    if shown < len(facts.payloads):
        notes.append(f"{len(facts.payloads) - shown:,} more tensors are not shown, but the total includes them.")
    notes += [f"added    {name}  {dtype} {list(shape)}" for name, (dtype, shape) in sorted(facts.added.items())]
    notes += [f"removed  {name}" for name in sorted(facts.removed)]
    notes += [f"tied     {name} = {target}" for name, target in sorted(facts.aliases.items())]
    notes.append(f"digest   {facts.before.hex()} → {facts.after.hex()}")
    return notes

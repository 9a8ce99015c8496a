"""The table that `deltawire inspect` prints. It fits 80 columns; a wider terminal gets whole names, longer bars and all modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from . import figures
from .terminal import result_console

if TYPE_CHECKING:
    from ..delta import DeltaFacts, TensorFacts

_WIDE = 120
_WIDE_TITLES = ("dtype", "elements", "changed", "density %", "where", "±1/±2–3/more %", "bits", "modes")
_TITLES = ("dtype", "elem.", "changed", "dens %", "where", "±1/2–3/+", "bits", "mode")
_LEFT = ("dtype", "where", "mode", "modes")
_MIN_NAME = 8


def print_table(file: Path, facts: DeltaFacts, shown: Sequence[TensorFacts]) -> None:
    """The tensors `shown` in this order, then the totals of all."""
    console = result_console()
    wide = console.width >= _WIDE
    bar_slices = 16 if wide else 8
    rows = [_row(tensor, bar_slices, wide) for tensor in shown]
    total = _totals(facts, wide)
    titles = _WIDE_TITLES if wide else _TITLES
    widths = [max(len(row[column]) for row in [titles, total, *rows]) for column in range(len(titles))]
    longest = max([len(tensor.name) for tensor in shown] + [len(total_title := f"total of {len(facts.tensors):,}")])
    name_width = max(min(longest, console.width - sum(widths) - len(widths)), _MIN_NAME)

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=False)
    table.add_column("tensor", no_wrap=True, min_width=name_width, max_width=name_width)
    for title, width in zip(titles, widths, strict=True):
        style = "cyan" if title == "where" else ""
        table.add_column(title, justify="left" if title in _LEFT else "right", no_wrap=True, min_width=width, style=style)
    for tensor, row in zip(shown, rows, strict=True):
        table.add_row(Text(figures.shortened(figures.printable(tensor.name), name_width)), *(Text(cell) for cell in row))
    table.add_section()
    table.add_row(Text(figures.shortened(total_title, name_width)), *(Text(cell) for cell in total), style="bold")

    console.print(Text(figures.printable(str(file)), style="bold"), Text(figures.size(facts.bytes)), soft_wrap=True)
    console.print(table)
    for line in _notes(facts, len(shown)):
        console.print(Text(figures.printable(line), style="dim"), soft_wrap=True)


def _row(tensor: TensorFacts, bar_slices: int, wide: bool) -> tuple[str, ...]:
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
    elements = sum(tensor.elements for tensor in facts.tensors)
    changed = sum(tensor.changed for tensor in facts.tensors)
    steps: Counter[int] = Counter()
    values: Counter[str] = Counter()
    for tensor in facts.tensors:
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
    """Shares of steps of one, of two or three, and of more ULP, in whole percent; a dash where no step is known."""
    known = sum(steps)
    if not known:
        return "–"
    shares = [sum(steps[:1]), sum(steps[1:2]), sum(steps[2:])]
    return "/".join(f"{100 * share / known:.0f}" for share in shares)


def _modes(values: dict[str, int], wide: bool) -> str:
    """The value modes by share of changed elements; on a narrow terminal the most frequent one, and a plus for others."""
    used = sorted(((count, mode) for mode, count in values.items() if count), key=lambda pair: (-pair[0], pair[1]))
    changed = sum(count for count, _ in used)
    if not used:
        return "–"
    if len(used) == 1 or not wide:
        return used[0][1] + "+" * (len(used) > 1)
    return ", ".join(f"{mode} {100 * count / changed:.0f}%" for count, mode in used)


def _notes(facts: DeltaFacts, shown: int) -> list[str]:
    notes = []
    if shown < len(facts.tensors):
        notes.append(f"{len(facts.tensors) - shown:,} more tensors are not shown, but counted in the total.")
    notes += [f"added    {name}  {dtype} {list(shape)}" for name, (dtype, shape) in sorted(facts.added.items())]
    notes += [f"removed  {name}" for name in sorted(facts.removed)]
    notes += [f"tied     {name} = {target}" for name, target in sorted(facts.aliases.items())]
    notes.append(f"digest   {facts.before.hex()} → {facts.after.hex()}")
    return notes

"""The table that `deltawire inspect` prints. It fits 80 columns; a wider terminal gets whole names, longer bars and all modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.text import Text

from . import figures
from .terminal import result_console

if TYPE_CHECKING:
    from ..inspect import DeltaFacts, TensorFacts

_WIDE = 120
_WIDE_TITLES = ("dtype", "elements", "changed", "density %", "where", "±1/±2–3/more %", "bits", "modes")
_TITLES = ("dtype", "elem.", "changed", "dens %", "where", "±1/2–3/+", "bits", "mode")
_BAR = _TITLES.index("where")
_LEFT = ("dtype", "where", "mode", "modes")
_MIN_NAME = 8


def print_table(file: Path, facts: DeltaFacts, shown: Sequence[TensorFacts]) -> None:
    """The tensors `shown` in this order, then the totals of all."""
    console = result_console()
    wide = console.width >= _WIDE
    titles = _WIDE_TITLES if wide else _TITLES
    rows = [_row(tensor, 16 if wide else 8, wide) for tensor in shown]
    total = _totals(facts, wide)
    widths = [max(map(len, column)) for column in zip(titles, total, *rows, strict=True)]
    names = [figures.printable(tensor.name) for tensor in shown]
    total_name = f"total of {len(facts.tensors):,}"
    name_width = max(min(max(map(len, [total_name, *names])), console.width - sum(widths) - len(widths)), _MIN_NAME)

    def line(name: str, cells: Sequence[str], style: str = "") -> Text:
        aligned = [
            cell.ljust(width) if title in _LEFT else cell.rjust(width) for cell, title, width in zip(cells, titles, widths, strict=True)
        ]
        before, bar, after = aligned[:_BAR], aligned[_BAR], aligned[_BAR + 1 :]
        start = " ".join([set_cell_size(figures.shortened(name, name_width), name_width), *before]) + " "
        return Text.assemble(start, (bar, "cyan"), " " + " ".join(after), style=style)

    # Not rich's own Table: that measures every cell several times, and a mixture of experts has a hundred thousand tensors.
    lines = [line("tensor", titles, "bold"), *map(line, names, rows), line(total_name, total, "bold")]
    console.print(Text.assemble((figures.printable(str(file)), "bold"), f"  {figures.size(facts.bytes)}"), soft_wrap=True)
    for text in lines:
        text.rstrip()
    console.print(Text("\n").join(lines), soft_wrap=True)
    for note in _notes(facts, len(shown)):
        console.print(Text(figures.printable(note), style="dim"), soft_wrap=True)


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


def _modes(values: Mapping[str, int], wide: bool) -> str:
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

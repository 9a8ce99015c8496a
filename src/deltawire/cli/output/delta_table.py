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
    from ...delta.inspect import DeltaFacts, PayloadFacts, TensorFacts

_WIDE = 120
_WIDE_TITLES = ("dtype", "elements", "changed", "density %", "where", "ULPs 1/2–3/more %", "bits", "modes")
_TITLES = ("dtype", "elem.", "changed", "dens %", "where", "ULPs 1/2–3/+", "bits", "mode")
_TENSOR_TITLES = ("dtype", "elem.", "changed", "dens %")
_LEFT = ("dtype", "where", "mode", "modes")
_DROPPED_FIRST = ("mode", "where", "ULPs 1/2–3/+", "dtype", "elem.", "bits")
"""The columns that a narrow terminal leaves out, in this order."""


def print_payloads(file: Path, facts: DeltaFacts, shown: Sequence[PayloadFacts]) -> None:
    """Print a table of payloads, then the totals of all payloads.

    Parameters
    ----------
    file
        The path of the delta file.
    facts
        All facts about the delta.
    shown
        The payloads to print, in this order.
    """
    wide = result_console().width >= _WIDE
    rows = [_row(payload, 16 if wide else 8, wide) for payload in shown] + [_totals(facts, wide)]
    names = [figures.printable(payload.label) for payload in shown] + [f"total of {len(facts.payloads):,}"]
    notes = _notes(facts, len(facts.payloads) - len(shown), "payloads")
    if any(payload.name is None for payload in facts.payloads):
        notes.append("The file does not name its tensors. To list those that change, pass --base CHECKPOINT.")
    _print_rows(file, facts, ("payload", *(_WIDE_TITLES if wide else _TITLES)), names, rows, notes)


def print_tensors(file: Path, facts: DeltaFacts, shown: Sequence[TensorFacts], count: int) -> None:
    """Print a table of tensors that change.

    Parameters
    ----------
    file
        The path of the delta file.
    facts
        All facts about the delta.
    shown
        The tensors to print, in this order.
    count
        The number of all tensors that change.
    """
    rows = [_tensor_row(tensor.dtype, tensor.elements, tensor.changed) for tensor in shown]
    names = [figures.printable(tensor.name) for tensor in shown]
    _print_rows(file, facts, ("tensor", *_TENSOR_TITLES), names, rows, _notes(facts, count - len(shown), "tensors"))


def _print_rows(
    file: Path, facts: DeltaFacts, titles: tuple[str, ...], names: list[str], rows: list[tuple[str, ...]], notes: list[str]
) -> None:
    """Print rows below the size of the file. Long names are printed above their figures. The last row of a table of payloads is bold."""
    console = result_console()
    first, titles = titles[0], titles[1:]
    heading, lines = lay_out_table(titles, rows, width=console.width, left=_LEFT, dropped_first=_DROPPED_FIRST, gap=" ")
    name_width = max(map(cell_len, [first, *names]))
    fits_on_a_line = name_width + 1 + max(map(len, [heading, *lines])) <= console.width
    if not fits_on_a_line:
        heading, lines = lay_out_table(titles, rows, width=console.width - 2, left=_LEFT, dropped_first=_DROPPED_FIRST, gap=" ")
    styles = ["bold", *["" if not name.startswith("total of") else "bold" for name in names]]
    texts = []
    for name, line, style in zip([first, *names], [heading, *lines], styles, strict=True):
        if fits_on_a_line:
            texts.append(Text(f"{set_cell_size(name, name_width)} {line}", style=style))
        else:
            texts += [Text(part, style=style) for part in [*figures.wrap_name(name, console.width), f"  {line}"]]
    print_wrapped(console, f"{file}  {figures.size(facts.bytes)}", style="bold")
    console.print(Text("\n").join(texts), soft_wrap=True)
    for note in notes:
        print_wrapped(console, note, style="dim", indent=9)


def _tensor_row(dtype: str, elements: int, changed: int) -> tuple[str, ...]:
    return dtype, figures.short_count(elements), figures.short_count(changed), figures.percent(changed, elements)


def _row(tensor: PayloadFacts, bar_slices: int, wide: bool) -> tuple[str, ...]:
    return (
        *_tensor_row(tensor.dtype, tensor.elements, tensor.changed),
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


def _notes(facts: DeltaFacts, left_out: int, what: str) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"{left_out:,} more {what} are not shown" + (", but the total includes them." if what == "payloads" else "."))
    notes += [f"added    {name}  {dtype} {list(shape)}" for name, (dtype, shape) in sorted(facts.added.items())]
    notes += [f"removed  {name}" for name in sorted(facts.removed)]
    notes += [f"tied     {name} = {target}" for name, target in sorted(facts.aliases.items())]
    notes.append(f"digest   {facts.before.hex()} → {facts.after.hex()}")
    return notes

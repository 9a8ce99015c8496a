"""Numbers and names as people read them. Pure functions, without a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from ...events import printable as printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_SUFFIXES = ("", "k", "M", "G", "T", "P")


def size(count: int) -> str:
    """Return a number of bytes in decimal units with three digits: 999 B, 1.23 MB."""
    scaled, suffix = _scaled(count)
    return f"{scaled} {suffix}B"


def short_count(count: int) -> str:
    """Return a count in at most five characters: 999, 1.23M."""
    return "".join(_scaled(count))


def percent(part: float, whole: float) -> str:
    """Return a share with three digits. It is 0 only for nothing, and 100 only for all."""
    if not whole or not part:
        return "0"
    if part == whole:
        return "100"
    share = 100 * part / whole
    if share < 0.001:
        return "<.001"
    if share > 99.9:
        return ">99.9"
    return f"{share:.{3 if share < 1 else 2 if share < 10 else 1}f}"


def ratio(numerator: float, denominator: float, unit: str = "") -> str:
    """Return a quotient with three digits, or a dash if the denominator is 0."""
    if not denominator:
        return "–"
    value = numerator / denominator
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def duration(seconds: float) -> str:
    """Return a duration in its largest unit, with about two digits: 0.4 s, 12 s, 3 min, 4.2 h, 6 d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            value = seconds / length
            return f"{value:.{1 if value < 10 and unit != 'min' else 0}f} {unit}"
    return f"{max(seconds, 0.0):.{1 if seconds < 9.95 else 0}f} s"


def clock_time(seconds: float) -> str:
    """Return the local time of day at a number of seconds after 1970: 14:05:09."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def bits_per_change(byte_count: int, changed: int) -> float | None:
    """Return the bits per changed element; None if nothing changed."""
    return round(8 * byte_count / changed, 4) if changed else None


def wrap_words(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Break a text at spaces into lines of at most `width` columns. All lines except the first are indented.

    Spaces within a line do not change. A word that is wider than a line is not broken, but gets its own line.
    """
    lines: list[str] = []
    line, used = "", 0
    for word in re.findall(r" *[^ ]+", text):
        wide = cell_len(word)
        if line.strip() and used + wide > width:
            lines.append(line)
            line, used = " " * indent, indent
            word = word.lstrip()
            wide = cell_len(word)
        line, used = line + word, used + wide
    return [*lines, line]


def wrap_items(items: Iterable[str], width: int, *, gap: str = "  ") -> list[str]:
    """Distribute items over lines of at most `width` columns. No item is broken."""
    lines: list[str] = []
    for item in items:
        if lines and cell_len(lines[-1]) + len(gap) + cell_len(item) <= width:
            lines[-1] += gap + item
        else:
            lines.append(item)
    return lines


def wrap_name(name: str, width: int) -> list[str]:
    """Break the name of a tensor after dots into lines of at most `width` columns. All lines except the first are indented."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if lines[-1].strip() and cell_len(lines[-1]) + cell_len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return lines


def slice_densities(chunks: Sequence[tuple[int, int]], slices: int) -> list[float]:
    """Return the share of changed elements in each of `slices` equal ranges of a tensor, from (elements, changed) of its chunks.

    The positions of changes within a chunk are unknown, so they count as evenly spread.
    """
    total = sum(elements for elements, _ in chunks)
    changed = [0.0] * slices
    begin = 0
    for elements, changes in chunks:
        end = begin + elements
        for index in range(begin * slices // total, min(-(-end * slices // total), slices)):
            overlap = min(end, (index + 1) * total / slices) - max(begin, index * total / slices)
            changed[index] += changes * max(overlap, 0.0) / elements
        begin = end
    return [min(part * slices / total, 1.0) for part in changed] if total else changed


def density_bar(chunks: Sequence[tuple[int, int]], slices: int) -> str:
    """Return one block character per slice of a tensor. Its height is the density relative to the densest slice."""
    densities = slice_densities(chunks, slices)
    top = max(densities, default=0.0)
    return "".join(_BLOCKS[min(int(density / top * len(_BLOCKS)), len(_BLOCKS) - 1)] if density else " " for density in densities)


def _scaled(count: int) -> tuple[str, str]:
    value, step = float(count), 0
    while value >= 999.5 and step < len(_SUFFIXES) - 1:
        value /= 1000
        step += 1
    if not step:
        return str(count), ""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}", _SUFFIXES[step]

"""A plan as a picture: bars for each method, in SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from .plan import MethodPlan, PlanReport

_WIDTH, _LABELS, _BAR, _GAP = 760, 190, 18, 8
_COLOURS = ("#9aa5b1", "#c58b2a", "#1f7a5c", "#8fc7b0")

_PANELS: Sequence[tuple[str, Callable[[MethodPlan], float], str]] = (
    ("bytes of an update", lambda one: one.bytes_per_step, "B"),
    ("seconds until all members have it", lambda one: one.worst.behind, "s"),
    ("seconds of a step", lambda one: one.step_seconds, "s"),
    ("dollars for a step", lambda one: one.dollars, "$"),
)


def as_svg(report: PlanReport) -> str:
    """Return the picture as the text of an SVG file. The lengths of bars are logarithmic.

    Parameters
    ----------
    report
        The plan.
    """
    height = 24 + sum(34 + len(report.methods) * (_BAR + _GAP) for _ in _PANELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    top = 12.0
    for title, value, unit in _PANELS:
        parts.append(f'<text x="12" y="{top + 16:g}" font-weight="bold">{escape(title)} (logarithmic)</text>')
        top += 26
        parts += _bars(report.methods, [value(one) for one in report.methods], unit, top)
        top += len(report.methods) * (_BAR + _GAP) + 8
    return "\n".join([*parts, "</svg>", ""])


def _bars(methods: Sequence[MethodPlan], values: Sequence[float], unit: str, top: float) -> list[str]:
    least = min((value for value in values if value > 0), default=1.0) / 3
    widest = _WIDTH - _LABELS - 110
    reach = max(math.log(max(*values, least * 3) / least), 1e-9)
    lines = []
    for index, (one, value) in enumerate(zip(methods, values, strict=True)):
        y = top + index * (_BAR + _GAP)
        length = widest * max(0.0, math.log(max(value, least) / least)) / reach
        lines += [
            f'<text x="12" y="{y + 14:g}">{escape(one.name)}</text>',
            f'<rect x="{_LABELS}" y="{y:g}" width="{length:.1f}" height="{_BAR}" fill="{_COLOURS[index % len(_COLOURS)]}"/>',
            f'<text x="{_LABELS + length + 6:.1f}" y="{y + 14:g}">{escape(_short(value, unit))}</text>',
        ]
    return lines


def _short(value: float, unit: str) -> str:
    if unit == "$":
        return f"${value:,.2f}"
    if unit == "s":
        return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
    scaled, prefixes = value, iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while scaled >= 999.5:
        scaled, prefix = scaled / 1000, next(prefixes)
    return f"{scaled:.3g} {prefix}B"

"""The page of the live demo: curves as SVG, in one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 860, 280, 56, 36, 16
_COLOURS = ("#1f7a5c", "#c58b2a", "#5b6f8f", "#a33b3b")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Some curves over time, and moments that are marked.

    Parameters
    ----------
    title
        The title.
    curves
        The points (seconds, value) of each curve, by its name.
    highest
        The highest value of the axis.
    marks
        Moments and their labels.
    """

    title: str
    curves: Mapping[str, Points]
    highest: float
    marks: Sequence[tuple[float, str]] = ()


@dataclass
class Page:
    """The page.

    Parameters
    ----------
    title
        Its title.
    """

    title: str
    _parts: list[str] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def add_chart(self, chart: Chart) -> None:
        self._parts.append(f"<h2>{escape(chart.title)}</h2>{_svg(chart)}")

    def add_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        head = "".join(f"<th>{escape(each)}</th>" for each in columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows)
        self._parts.append(f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>")

    def html(self) -> str:
        """Return the page."""
        style = (
            "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;color:#1c2733}h2{font-size:1.1em;margin-top:2em}"
            "table{border-collapse:collapse}td,th{border-bottom:1px solid #d5dbe1;padding:.3em .8em;text-align:left}"
        )
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(self.title)}</title><style>{style}</style>'
        return f"{head}<h1>{escape(self.title)}</h1>{''.join(self._parts)}\n"


def _svg(chart: Chart) -> str:
    longest = max([1.0, *(at for points in chart.curves.values() for at, _ in points)])

    def place(at: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 16) * at / longest
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, value / chart.highest))
        return f"{x:.1f},{y:.1f}"

    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for step in range(5):
        value = chart.highest * step / 4
        y = place(0.0, value).split(",")[1]
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y}" y2="{y}" stroke="#e3e8ed"/><text x="8" y="{y}">{value:.3g}</text>')
    for step in range(6):
        x = place(longest * step / 5, 0.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{bottom + 16}">{longest * step / 5:.0f} s</text>')
    for number, (at, label) in enumerate(chart.marks):
        x = place(at, 0.0).split(",")[0]
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" stroke="#9aa5b1" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{float(x) + 3:.1f}" y="{bottom - 6 - 14 * (number % 4)}" fill="#5b6f8f">{escape(label)}</text>')
    for colour, (name, points) in zip(_COLOURS, chart.curves.items(), strict=False):
        line = " ".join(place(at, value) for at, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if points:
            x, y = place(*points[-1]).split(",")
            parts.append(f'<text x="{float(x) - 8:.1f}" y="{float(y) - 7:.1f}" text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])

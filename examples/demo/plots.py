"""Plots as inline SVG, without scripts. The page's CSS sets the colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values between `low` and `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    is_time: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(max(each, 1e-12)) if self.log else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about four round numbers."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        rough = (self.high - self.low) / 4 or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((power * factor for factor in (1, 2, 2.5, 5) if power * factor >= rough), 10 * power)
        if self.is_time:
            step = float(next((each for each in (1, 2, 5, 10, 15, 20, 30, 60) if each >= rough / 1.5), 60 * math.ceil(rough / 60)))
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def plain(value: float) -> str:
    return f"{value:g}"


class Plot:
    """A plot with two axes."""

    def __init__(
        self,
        name: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        height: int = 230,
        width: int = 560,
        left: int = 56,
        right: int = 14,
        log: bool = False,
        downwards: bool = False,
        x_label: Callable[[float], str] = clock,
        y_label: Callable[[float], str] = plain,
    ) -> None:
        self._name = name
        self._width, self._height = width, height
        self._floor, self._ceiling = height - 26, 22
        self.x = Scale(*x, left, width - right, is_time=x_label is clock)
        self.y = Scale(*y, *((self._ceiling, self._floor) if downwards else (self._floor, self._ceiling)), log)
        self._x_label, self._y_label = x_label, y_label
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], style: str, *, title: str = "") -> None:
        """Draw a line through all points."""
        if points:
            self._path([(self.x(x), self.y(y)) for x, y in points], f"line {style}", title)

    def stairs(self, points: Sequence[Point], until: float, style: str, *, base: float = 0.0, title: str = "") -> None:
        """Draw steps: each value holds until the next. Values are relative to `base`, and the area down to it is filled."""
        corners: list[Point] = []
        ends = [x for x, _ in points[1:]] + [until]
        for (x, y), end in zip(points, ends, strict=False):
            corners += [(self.x(x), self.y(base + y)), (self.x(end), self.y(base + y))]
        if corners:
            floor = self.y(base)
            self._path([(corners[0][0], floor), *corners, (corners[-1][0], floor)], f"steps {style}", title)

    def area(self, points: Sequence[Point], style: str) -> None:
        """Fill the area between the points and the axis."""
        if points:
            pixels = [(self.x(x), self.y(y)) for x, y in points]
            self._path([(pixels[0][0], self._floor), *pixels, (pixels[-1][0], self._floor)], f"area {style}", "")

    def dots(self, points: Sequence[Point], style: str, titles: Sequence[str] = (), *, size: float = 2.2) -> None:
        for index, (x, y) in enumerate(points):
            inner = f"<title>{escape(titles[index])}</title>" if titles else ""
            self._parts.append(f'<circle class="dot {style}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{size}">{inner}</circle>')

    def bar(self, x: tuple[float, float], y: tuple[float, float], style: str, title: str = "") -> None:
        """Draw a rectangle. It has a minimum width, so that short ones stay visible."""
        left, right = self.x(x[0]), self.x(x[1])
        top, bottom = sorted((self.y(y[0]), self.y(y[1])))
        size = f'width="{max(0.8, right - left):.1f}" height="{max(0.8, bottom - top):.1f}"'
        inner = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<rect class="bar {style}" x="{left:.1f}" y="{top:.1f}" {size} rx="1">{inner}</rect>')

    def level(self, y: float, style: str, text: str) -> None:
        """Draw a horizontal line with a text."""
        at = self.y(y)
        self._parts.append(f'<path class="line {style}" d="M{self.x.start:.1f} {at:.1f}H{self.x.end:.1f}"/>')
        self._parts.append(f'<text class="note" x="{self.x.end:.1f}" y="{at - 4:.1f}" text-anchor="end">{escape(text)}</text>')

    def mark(self, x: float, text: str, *, before: bool = False) -> None:
        """Mark a time with a vertical line, with a text at its top."""
        at = self.x(x)
        self._parts.append(f'<path class="mark" d="M{at:.1f} {self._floor}V{self._ceiling - 6}"/>')
        side = f'x="{at - 3:.1f}" text-anchor="end"' if before else f'x="{at + 3:.1f}"'
        self._parts.append(f'<text class="note" {side} y="{self._ceiling - 8}">{escape(text)}</text>')

    def sign(self, x: float, y: float, symbol: str, title: str) -> None:
        """Draw a symbol at a point."""
        position = f'x="{self.x(x):.1f}" y="{self.y(y) + 5:.1f}"'
        self._parts.append(f'<text class="sign" {position} text-anchor="middle">{symbol}<title>{escape(title)}</title></text>')

    def words(self, x: float, y: float, text: str, *, end: bool = False, style: str = "label") -> None:
        """Write a text at a value of the y axis. `x` is in pixels."""
        anchor = ' text-anchor="end"' if end else ""
        self._parts.append(f'<text class="{style}" x="{x:.1f}" y="{self.y(y) + 4:.1f}"{anchor}>{escape(text)}</text>')

    def svg(self, *, y_axis: bool = True) -> str:
        """Return the plot with its axes."""
        grid = []
        if y_axis:
            for value in self.y.ticks():
                at = self.y(value)
                grid.append(f'<path class="grid" d="M{self.x.start:.1f} {at:.1f}H{self.x.end:.1f}"/>')
                grid.append(
                    f'<text class="tick" x="{self.x.start - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{self._y_label(value)}</text>'
                )
        for value in self.x.ticks():
            at = self.x(value)
            grid.append(f'<text class="tick" x="{at:.1f}" y="{self._height - 8}" text-anchor="middle">{self._x_label(value)}</text>')
        grid.append(f'<path class="axis" d="M{self.x.start:.1f} {self._floor}H{self.x.end:.1f}"/>')
        box = f'viewBox="0 0 {self._width} {self._height}" role="img" aria-label="{escape(self._name)}"'
        return f"<svg {box}>{''.join(grid)}{''.join(self._parts)}</svg>"

    def _path(self, pixels: Sequence[Point], style: str, title: str) -> None:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        inner = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<path class="{style}" d="{path}">{inner}</path>')

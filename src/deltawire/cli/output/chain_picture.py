"""Draws a chain as text: a glyph per commit, oldest first, and the skips below them. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

_GLYPHS = {"anchor": "■", "delta": "·", "fence": "╪", "rewind": "↩"}


def legend(*, by_commits: bool) -> list[str]:
    """Return the meanings of the glyphs; with `by_commits` also of those for commits that make no version."""
    others = ["╪ new publisher", "× void"] if by_commits else []
    return ["■ full checkpoint", "· delta", "◆ delta and full checkpoint", "↩ rewind", *others, "╰─╯ skip"]


def glyph(kind: str, *, void: bool = False, anchored: bool = False) -> str:
    """Return the glyph of a commit."""
    if void:
        return "×"
    return "◆" if anchored and kind in ("delta", "rewind") else _GLYPHS[kind]


def draw(first: int, glyphs: str, skips: Iterable[tuple[int, int]], width: int) -> list[str]:
    """Return lines of glyphs, each labelled with the number of its first glyph, with the skips below them.

    Parameters
    ----------
    first
        The number of the first glyph.
    glyphs
        One character per commit.
    skips
        (target, base) of each skip. A skip whose base is before `first` begins at the left edge.
    width
        The largest number of glyphs on a line.
    """
    lanes = _lanes([(base, seq) for seq, base in skips])
    margin = len(str(first + len(glyphs) - 1))
    lines = []
    for start in range(first, first + len(glyphs), width):
        row = glyphs[start - first : start - first + width]
        lines.append(f"{start:>{margin}} {row}")
        for lane in lanes:
            cells = _lane_cells(lane, start, len(row))
            if cells:
                lines.append(" " * (margin + 1) + cells)
    return lines


def _lane_cells(lane: Sequence[tuple[int, int]], start: int, length: int) -> str:
    cells = [" "] * length
    for base, seq in lane:
        for at in range(max(base, start), min(seq, start + length - 1) + 1):
            mark = "╰" if at == base else "╯" if at == seq else "─"
            cells[at - start] = mark if cells[at - start] == " " else "┴"
    return "".join(cells).rstrip()


def _lanes(ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Distribute ranges over lines: those of similar length share a line, short ones first. They may touch, but not overlap."""
    by_length = defaultdict(list)
    for base, seq in sorted(ranges):
        by_length[round(math.log(max(seq - base, 1), 4))].append((base, seq))
    lanes: list[list[tuple[int, int]]] = []
    for _, alike in sorted(by_length.items()):
        own: list[list[tuple[int, int]]] = []
        for each in alike:
            free = next((lane for lane in own if lane[-1][1] <= each[0]), None)
            if free is None:
                own.append([each])
            else:
                free.append(each)
        lanes += own
    return lanes

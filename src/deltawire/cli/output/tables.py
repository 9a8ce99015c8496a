"""Tables that fit a width. Pure functions, without a terminal.

rich's own Table would be too slow, because it measures every cell several times: a chain has thousands of versions, and a mixture of
experts has a hundred thousand tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def lay_out_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    left: Collection[str] = (),
    dropped_first: Sequence[str] = (),
    left_out: Collection[str] = (),
    gap: str = "  ",
) -> tuple[str, list[str]]:
    """Return the heading and a line per row. Columns without any text in `rows` are not shown.

    Parameters
    ----------
    titles
        The titles of the columns.
    rows
        The cells of each row.
    width
        The width that the table should fit.
    left
        The titles of columns that are aligned to the left; the others are aligned to the right.
    dropped_first
        The titles of columns to drop, in this order, while the table is too wide.
    left_out
        The titles of columns that are never shown.
    gap
        The text between columns.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)] if rows else [len(title) for title in titles]
    has_text = [any(column) for column in zip(*rows, strict=True)] if rows else [True] * len(titles)
    shown = [index for index, title in enumerate(titles) if title not in left_out and has_text[index]]
    for title in dropped_first:
        if sum(widths[index] + len(gap) for index in shown) - len(gap) <= width:
            break
        shown = [index for index in shown if titles[index] != title]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[index].ljust(widths[index]) if titles[index] in left else cells[index].rjust(widths[index]) for index in shown]
        return gap.join(padded).rstrip()

    return line(titles), [line(row) for row in rows]

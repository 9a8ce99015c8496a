"""Tables that fit a width. Pure text, no terminal.

Not rich's own Table: that measures every cell several times, and a chain has thousands of versions, a mixture of experts a hundred thousand
tensors.
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
    """Return the heading and a line per row, all at most `width` wide if that can be done.

    Columns whose titles are `left` are aligned to the left, the others to the right. Columns without any text in `rows`, and those
    `left_out`, are not shown. While the rest is too wide, the columns of `dropped_first` are dropped, in this order.
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

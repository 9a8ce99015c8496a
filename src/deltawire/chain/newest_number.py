"""Find the newest commit of a chain by asking which slots are filled."""

from __future__ import annotations

from collections.abc import Callable

from ..format.records.canonical import MAX_INTEGER


def newest_filled(start: int, is_filled: Callable[[int], bool]) -> int:
    """Return the highest filled slot. Slots are filled without gaps, so few questions find it.

    Parameters
    ----------
    start
        A filled slot, or −1.
    is_filled
        Returns whether a slot is filled.
    """
    filled, stride = start, 1
    while filled + stride <= MAX_INTEGER and is_filled(filled + stride):
        filled, stride = filled + stride, 2 * stride
    empty = filled + stride
    while empty - filled > 1:
        middle = (filled + empty) // 2
        filled, empty = (middle, empty) if is_filled(middle) else (filled, middle)
    return filled

"""Find the newest of numbered objects, such as commits, by asking which numbers exist."""

from __future__ import annotations

from collections.abc import Callable

from ..format.records.canonical import MAX_INTEGER


def newest_number(start: int, exists: Callable[[int], bool]) -> int:
    """Return the highest number that exists. Numbers have no gaps, so few questions find it.

    Parameters
    ----------
    start
        A number that exists, or −1.
    exists
        Returns whether a number exists.
    """
    found, stride = start, 1
    while found + stride <= MAX_INTEGER and exists(found + stride):
        found, stride = found + stride, 2 * stride
    missing = found + stride
    while missing - found > 1:
        middle = (found + missing) // 2
        found, missing = (middle, missing) if exists(middle) else (found, middle)
    return found

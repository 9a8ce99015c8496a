"""Bounds the feedback that one caller gives, and its revisions. Only the caller that sends too much notices it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from .join import StoredFeedback

MOST_REVISIONS = 64
"""The most revisions of one caller for one metric of one interaction or episode that are kept."""
FEWEST_REVISIONS = 2
"""As many are kept however much feedback there is."""


def least_needed(revisions: Iterable[StoredFeedback]) -> StoredFeedback:
    """Return the revision without which most windows end with the same value.

    It is one that never counts, because an earlier one has a higher rank, or the one that counted for the shortest time before the next one
    replaced it. So the last one to count stays, and so does one that stood for long.

    Parameters
    ----------
    revisions
        At least two revisions of one caller for one metric of one target.
    """
    counted: list[StoredFeedback] = []
    for one in sorted(revisions, key=lambda each: each.order):
        if counted and one.rank < counted[-1].rank:
            return one
        counted.append(one)
    return min(pairwise(counted), key=lambda pair: pair[1].stored - pair[0].stored)[0]


def fair_share(counts: Iterable[int], most: int) -> int:
    """Return how much feedback each caller may keep so that all together have at most `most`. Callers that have less keep all of it.

    Parameters
    ----------
    counts
        How much feedback each caller has.
    most
        How much feedback all callers may have.
    """
    ordered, left = sorted(counts), most
    for index, count in enumerate(ordered):
        share = left // (len(ordered) - index)
        if count > share:
            return share
        left -= count
    return most

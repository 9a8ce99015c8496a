"""Bounds the revisions that one caller gives of one metric of one answer or episode. Only the caller that sends too many notices it."""

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

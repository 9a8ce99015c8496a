"""The beginning of a link's use: the number of streams doubles in each round, as long as more bytes per second arrive. Pure.

A new connection moves little in its first round trips, whatever the link can carry. On a link with a long delay, many streams must begin
early, and one change for each long measurement would come too late: the transfer would be over.
"""

from __future__ import annotations

import math

SECONDS_PER_STREAM = 0.005
"""On a link that was not used yet, there is one stream for each of these seconds of its delay."""
MOST_AT_FIRST = 32
_GROWTH = 1.1
_FLAT_ROUNDS = 3
"""A new stream needs one round to connect and one to ask, so its bytes arrive in the third."""
_ENOUGH = 0.9


def first_width(delay: float | None, least: int, most: int) -> int:
    """Return how many streams should begin on a link that was not used yet.

    Parameters
    ----------
    delay
        Seconds from a small request to its answer. None if there was none.
    least
        The number if the delay is short or unknown.
    most
        The largest number.
    """
    by_delay = 0 if delay is None else min(MOST_AT_FIRST, math.ceil(delay / SECONDS_PER_STREAM))
    return min(max(least, by_delay), most)


class Ramp:
    """Decides after each round whether the width doubles, and when this ends.

    Parameters
    ----------
    most
        The largest width.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._best = 0.0
        self._flat = 0
        self._rounds: list[tuple[int, float]] = []
        self.is_over = False
        """Whether more streams brought nothing, so that from now on each change is measured by itself."""

    def next_width(self, width: int, goodput: float) -> int:
        """Return the width for the next round.

        Parameters
        ----------
        width
            The width in this round, in which as many transfers ran.
        goodput
            The bytes per second in this round.
        """
        self._rounds.append((width, goodput))
        if goodput >= _GROWTH * self._best:
            self._best, self._flat = goodput, 0
            return min(2 * width, self._most)
        self._flat += 1
        if self._flat < _FLAT_ROUNDS:
            return width
        self.is_over = True
        return min(used for used, found in self._rounds if found >= _ENOUGH * self._best)

    @property
    def has_helped(self) -> bool:
        """Whether more streams than those of the first round brought more bytes per second."""
        return not self._rounds or self._rounds[0][1] < _ENOUGH * self._best

"""Keeps what was seen of one member over time: its lag, the pauses of its engine, and what its updates are worth in bytes.

A heartbeat tells only the present, and the next one replaces it. So the history begins when the observer first looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..format.records.member_records import Heartbeat

MOST_POINTS = 240
"""The most points that are kept for one member, of lag and of pauses each."""
MOST_SENT = 24_000
"""The most points that are sent to a page for all members together, unless that leaves a member too few to see anything."""
_FEWEST_SENT = 24
_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class Updates:
    """The versions that a member took, with the bytes of their deltas and of as many full weights, as the sizes in commits tell."""

    versions: int = 0
    bytes: int = 0
    full: int = 0

    def __add__(self, other: Updates) -> Updates:
        return Updates(self.versions + other.versions, self.bytes + other.bytes, self.full + other.full)


@dataclass(slots=True)
class MemberHistory:
    """The history of one member."""

    lags: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    """When the lag changed, and to how many versions."""
    pauses: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))
    """When a heartbeat first told of an update, for how many seconds the engine paused, and the commit that the member then had."""
    taken: Updates = field(default_factory=Updates)
    """The updates that the member took since it was first seen."""
    _counted: int | None = None
    """The commit up to which `taken` counts."""

    def note(self, beat: Heartbeat, modified: float) -> None:
        """Note what a heartbeat tells.

        Parameters
        ----------
        beat
            The heartbeat.
        modified
            When it was written, by the store's clock.
        """
        if beat.seq is None:
            return
        time = round(modified, 3)
        if not self.lags or self.lags[-1][1] != beat.lag:
            self.lags.append((time, beat.lag))
        if self._counted is None:
            self._counted = beat.seq
        pause = None if beat.update is None or beat.update.pause_us is None else beat.update.pause_us / 1e6
        if pause is not None and (not self.pauses or self.pauses[-1][1:] != (pause, beat.seq)):
            self.pauses.append((time, pause, beat.seq))

    def count(self, seq: int | None, between: Callable[[int, int], Updates], head: int) -> None:
        """Count the versions up to the member's commit.

        Parameters
        ----------
        seq
            The member's commit.
        between
            Returns what the versions after one commit and up to another are worth.
        head
            The newest commit that was read. A member may already have a newer one, which a later look counts.
        """
        if seq is None or self._counted is None:
            return
        upto = min(seq, head)
        if upto > self._counted:
            self.taken += between(self._counted, upto)
            self._counted = upto


def newest_points(points: list[_Point], members: int) -> list[_Point]:
    """Return the newest points of one of many members, few enough that those of all members can be sent.

    Parameters
    ----------
    points
        The points, the oldest first.
    members
        The number of members.
    """
    return points[-min(MOST_POINTS, max(_FEWEST_SENT, MOST_SENT // max(1, members))) :]

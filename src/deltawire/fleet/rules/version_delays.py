"""How long versions take to reach each member: what the trainer sees itself, and how far it believes what members say.

The trainer knows when it published a version, and sees when a heartbeat first names that version or a later one. Heartbeats come late, so
what it sees is too long by up to a heartbeat and a task. A member's own report can be wrong in both directions. The trainer believes a
report as far as its own observations allow it. Times are seconds of the fleet clock.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

_KEPT_VERSIONS = 64
_KEPT_INTERVALS = 8
_NEWEST = 0.3
"""The weight of a new observation in the moving average."""


def believed_delay(claimed: float | None, seen: float | None, slack: float) -> float | None:
    """Return how many seconds a version takes to reach a member; None if nothing is known.

    Parameters
    ----------
    claimed
        What the member says.
    seen
        How long it took until a heartbeat named the version. The true delay is at most this.
    slack
        How much longer than the true delay `seen` can be. A claim below `seen` − `slack` is not believed.
    """
    if claimed is None or seen is None:
        return claimed if seen is None else seen
    return min(max(claimed, seen - slack), seen)


def admissible_share(delay: float, period: float, staleness: int) -> float:
    """Return the share of time in which a member has a version that may work for an open round, from 0 to 1.

    A version becomes too old for all open rounds 1 + `staleness` periods after its publication. A member gets it after `delay` seconds, and
    then fetches the version that is newest at that time, which takes as long again.

    Parameters
    ----------
    delay
        How many seconds a version takes to reach the member.
    period
        How many seconds lie between two versions.
    staleness
        The staleness budget in steps.
    """
    usable = (1 + staleness) * period - delay
    return 1.0 if usable >= delay else max(0.0, usable / delay)


@dataclass(slots=True)
class _Seen:
    seq: int
    since: float
    delay: float | None = None
    claimed: float | None = None


class VersionDelays:
    """Observes when versions reach members."""

    def __init__(self) -> None:
        self._versions: deque[tuple[int, float]] = deque(maxlen=_KEPT_VERSIONS)
        self._members: dict[str, _Seen] = {}

    def published(self, seq: int, at: float) -> None:
        """Note that the trainer published a version.

        Parameters
        ----------
        seq
            The number of its commit.
        at
            When, by the fleet clock.
        """
        if not self._versions or seq > self._versions[-1][0]:
            self._versions.append((seq, at))

    def heard(self, member: str, seq: int | None, claimed: float | None, at: float) -> None:
        """Note a heartbeat.

        Parameters
        ----------
        member
            The member's name.
        seq
            The version that the heartbeat names; None if the member has none.
        claimed
            How many seconds updates take, as the member says; None if it does not say it.
        at
            When the heartbeat was written, by the fleet clock.
        """
        before = self._members.get(member)
        if seq is None or before is None or seq < before.seq:  # it has just joined, or went back: how long that took says nothing
            self._members[member] = _Seen(-1 if seq is None else seq, at, None if before is None else before.delay, claimed)
            return
        before.claimed = claimed
        published = self._published_at(seq)
        if seq > before.seq >= 0 and published is not None and at >= published:
            seen = at - published
            before.delay = seen if before.delay is None else (1 - _NEWEST) * before.delay + _NEWEST * seen
        if seq > before.seq:
            before.seq, before.since = seq, at

    def keep(self, members: Collection[str]) -> None:
        """Forget all members except these."""
        self._members = {member: seen for member, seen in self._members.items() if member in members}

    @property
    def period(self) -> float | None:
        """The usual time between two versions, in seconds; None before there were three."""
        times = [at for _, at in self._versions][-1 - _KEPT_INTERVALS :]
        intervals = [later - earlier for earlier, later in itertools.pairwise(times)]
        return statistics.median(intervals) if len(intervals) >= 2 else None

    def delay(self, member: str, now: float, slack: float) -> float | None:
        """Return how many seconds versions take to reach a member; None if that is not known.

        A member that waits for a version at this moment takes at least as long as it has waited since it got its last one.

        Parameters
        ----------
        member
            The member's name.
        now
            The time of the fleet clock.
        slack
            By how many seconds a heartbeat can name a version late.
        """
        seen = self._members.get(member)
        if seen is None:
            return None
        believed = believed_delay(seen.claimed, seen.delay, slack)
        index = bisect_right([seq for seq, _ in self._versions], seen.seq)
        if seen.seq < 0 or index == len(self._versions):
            return believed
        waited = now - max(self._versions[index][1], seen.since) - slack
        return max(waited, believed) if believed is not None else max(waited, 0.0) or None

    def _published_at(self, seq: int) -> float | None:
        return next((at for number, at in reversed(self._versions) if number == seq), None)

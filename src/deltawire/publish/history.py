"""The way back from the newest version to earlier ones, as small reverse deltas instead of copies of the state.

Versions are counted from an origin: position 0. The reverse delta of level 0 at position j leads from j to j−1. Where 4^i divides j,
the four of level i−1 that end there are composed to one of level i, from j to j−4^i: that is also where a skip of that span is made. So
at most three of each level wait at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..format.records.chain_records import CommitRef

FAN = 4

_SHARE, _LEAST = 4, 1 << 20


def budget_for(state_bytes: int) -> int:
    """What reverse deltas may take: the fourth part of the state's own size. In training at small steps they take a few per cent."""
    return max(state_bytes // _SHARE, _LEAST)


def span_of(level: int) -> int:
    """How many versions a reverse delta, or a skip, of this level covers."""
    return int(FAN**level)


class Forgotten(LookupError):
    """There is no way back to that version any more."""


@dataclass(frozen=True, slots=True)
class Reverse:
    """Deltas, by segment, that lead from version `target` at position `end` back to version `base`. Segments without one are the same.

    `forward_bytes` is what the cheapest way in the other direction costs a reader.
    """

    level: int
    end: int
    base: CommitRef
    target: CommitRef
    deltas: Mapping[int, bytes]
    forward_bytes: int

    @property
    def start(self) -> int:
        return self.end - span_of(self.level)

    @property
    def size(self) -> int:
        return sum(map(len, self.deltas.values()))


class History:
    """The reverse deltas that are kept, in at most `budget` bytes. Not safe for use from several threads: the baseline locks."""

    def __init__(self, origin: CommitRef, budget: int) -> None:
        self.here = origin
        self.position = 0
        self._budget = budget
        self._kept: dict[tuple[int, int], Reverse] = {}
        self._positions = {origin.seq: 0}
        self._held: Counter[int] = Counter()

    @property
    def size(self) -> int:
        """Bytes of all reverse deltas."""
        return sum(reverse.size for reverse in self._kept.values())

    @property
    def held(self) -> bool:
        return bool(self._held)

    def advance(self, target: CommitRef, deltas: Mapping[int, bytes], forward_bytes: int) -> None:
        """The newest version is now `target`; `deltas` lead back from it to the one before."""
        self.position += 1
        self._positions[target.seq] = self.position
        self._keep(Reverse(0, self.position, self.here, target, deltas, forward_bytes))
        self.here = target

    def restart(self, origin: CommitRef) -> None:
        """Forget everything: `origin` is the newest version, and there is no way back from it."""
        self.here, self.position = origin, 0
        self._kept.clear()
        self._held.clear()
        self._positions = {origin.seq: 0}

    def composable(self, level: int) -> list[Reverse] | None:
        """The four of the level below that end here, newest first; None if this is no place for that level, or one of them is missing."""
        span = span_of(level)
        if level < 1 or self.position == 0 or self.position % span:
            return None
        found = [self._kept.get((level - 1, self.position - step * (span // FAN))) for step in range(FAN)]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == FAN else None

    def add_composed(self, reverse: Reverse) -> None:
        """Keep a reverse delta of a higher level in place of its parts, if it fits into the budget; else the levels above get no skips."""
        lowest = min(self._held, default=self.position)
        self._kept = {
            (level, end): kept
            for (level, end), kept in self._kept.items()
            if level != reverse.level - 1 or not reverse.start < end <= reverse.end or end > lowest
        }
        if self.size + reverse.size <= self._budget:
            self._kept[reverse.level, reverse.end] = reverse

    def prune(self) -> None:
        """Drop what neither a later composition nor a held version needs. To be called when all compositions of a position are made."""
        lowest = min(self._held, default=self.position)
        self._kept = {
            (level, end): reverse
            for (level, end), reverse in self._kept.items()
            if end > self.position - self.position % span_of(level + 1) or end > lowest
        }
        self._positions = {seq: position for seq, position in self._positions.items() if position in (self.position, *self._held)}

    def hold(self) -> None:
        """Keep the way back to the newest version open until `release`."""
        self._held[self.position] += 1

    def release(self, seq: int) -> None:
        """The version need not be reached any more; nothing happens if it is forgotten already."""
        position = self._positions.get(seq)
        if position is not None and position in self._held:
            self._held[position] -= 1
            self._held += Counter()  # drops zeros
            self.prune()

    def way_back(self, seq: int) -> list[Reverse]:
        """What to apply, in order, to the newest version to get version `seq`. Raises `Forgotten`."""
        target = self._positions.get(seq)
        if target is None:
            raise Forgotten(f"commit {seq} cannot be reached from {self.here.seq} any more")
        way: list[Reverse] = []
        at = self.position
        while at > target:
            steps = [reverse for (_, end), reverse in self._kept.items() if end == at and reverse.start >= target]
            if not steps:
                raise Forgotten(f"commit {seq} cannot be reached from {self.here.seq} any more")
            way.append(max(steps, key=lambda reverse: reverse.level))
            at = way[-1].start
        return way

    def _keep(self, reverse: Reverse) -> None:
        if self.size + reverse.size > self._budget:
            self._kept.clear()  # changes so large that shortcuts are not worth much; begin again with what comes
            return
        self._kept[reverse.level, reverse.end] = reverse

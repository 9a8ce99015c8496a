"""Deltas from the newest version back to earlier ones, which take less memory than copies of the state.

Positions count versions from an origin, which has position 0. The reverse delta of level 0 at position j leads from j to j−1. If 4^i
divides j, the four reverse deltas of level i−1 that end at j are composed to one of level i, which leads from j to j−4^i. The skip over
these versions is made at the same position. Therefore at most three reverse deltas of each level are kept at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..format.records.record_parts import CommitRef

FAN = 4
"""The number of reverse deltas that are composed to one of the next level."""

_SHARE, _LEAST = 4, 1 << 20


def budget_for(state_bytes: int) -> int:
    """Return how many bytes reverse deltas may take: a quarter of the state. With small learning rates they take a few per cent."""
    return max(state_bytes // _SHARE, _LEAST)


def versions_of(level: int) -> int:
    """Return how many versions a reverse delta, or a skip, of this level covers."""
    return int(FAN**level)


class HistoryDropped(LookupError):
    """The deltas back to that version were dropped."""


@dataclass(frozen=True, slots=True)
class Reverse:
    """Deltas, by segment, that lead from version `target` at position `end` back to version `base`. Other segments are the same.

    `forward_bytes` is what readers have to fetch at least to get from `base` to `target`.
    """

    level: int
    end: int
    base: CommitRef
    target: CommitRef
    deltas: Mapping[int, bytes]
    forward_bytes: int

    @property
    def start(self) -> int:
        return self.end - versions_of(self.level)

    @property
    def size(self) -> int:
        return sum(map(len, self.deltas.values()))


class History:
    """Keeps reverse deltas, in at most `budget` bytes. It is not thread-safe: the baseline locks."""

    def __init__(self, origin: CommitRef, budget: int) -> None:
        self.here = origin
        self.position = 0
        self._budget = budget
        self._kept: dict[tuple[int, int], Reverse] = {}
        self._positions = {origin.seq: 0}
        self._held: Counter[int] = Counter()
        self._composing: set[int] = set()
        """Positions whose compositions are not all made yet."""
        self._begun = 0
        """The last position for which `begin_composing` was called. Until then, what compositions there need must stay."""

    @property
    def size(self) -> int:
        """The bytes of all reverse deltas."""
        return sum(reverse.size for reverse in self._kept.values())

    @property
    def held(self) -> bool:
        return bool(self._held)

    def advance(self, target: CommitRef, deltas: Mapping[int, bytes], forward_bytes: int) -> None:
        """Note that `target` is the newest version, and that `deltas` lead back from it to the one before."""
        self.position += 1
        self._positions[target.seq] = self.position
        self._keep(Reverse(0, self.position, self.here, target, deltas, forward_bytes))
        self.here = target

    def restart(self, origin: CommitRef) -> None:
        """Drop all reverse deltas. `origin` is the newest version."""
        self.here, self.position = origin, 0
        self._kept.clear()
        self._held.clear()
        self._composing.clear()
        self._begun = 0
        self._positions = {origin.seq: 0}

    def forget(self) -> None:
        """Drop all reverse deltas, and all versions with them: not even the newest one can be read after this."""
        self.restart(self.here)
        self._positions.clear()

    def begin_composing(self) -> int | None:
        """Return the present position if compositions are due, and keep what they need until `end_composing`. Otherwise return None.

        The present version is held as well.
        """
        self._begun = self.position
        if self.composable(1) is None:
            return None
        self._composing.add(self.position)
        self.hold()
        return self.position

    def end_composing(self, position: int, seq: int) -> None:
        """Note that all compositions at the position of version `seq` are made. Nothing happens if the history was restarted since."""
        if self.is_at(position, seq):
            self._composing.discard(position)
            self.release(seq)

    def is_at(self, position: int, seq: int) -> bool:
        """Tell whether version `seq` is at this position, and the history was not restarted since."""
        return self._positions.get(seq) == position

    def composable(self, level: int, position: int | None = None) -> list[Reverse] | None:
        """Return the four of the level below that end at a position, the newest first; by default at the present one.

        Returns None if that level is not due there, or one was dropped.
        """
        covered = versions_of(level)
        end = self.position if position is None else position
        if level < 1 or end == 0 or end % covered:
            return None
        found = [self._kept.get((level - 1, end - step * (covered // FAN))) for step in range(FAN)]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == FAN else None

    def add_composed(self, reverse: Reverse) -> None:
        """Replace four reverse deltas by the one that was composed of them. If it exceeds the budget, higher levels get no skips."""
        lowest = min(self._held, default=self.position)
        self._kept = {
            (level, end): kept
            for (level, end), kept in self._kept.items()
            if level != reverse.level - 1 or not reverse.start < end <= reverse.end or end > lowest
        }
        if self.size + reverse.size <= self._budget:
            self._kept[reverse.level, reverse.end] = reverse

    def prune(self) -> None:
        """Drop what neither a held version nor a later composition needs, such as one at the present position that has not begun."""
        lowest = min(self._held, default=self.position)
        composed = min(self._composing, default=self.position + (self._begun == self.position)) - 1
        self._kept = {
            (level, end): reverse
            for (level, end), reverse in self._kept.items()
            if end > composed - composed % versions_of(level + 1) or end > lowest
        }
        self._positions = {seq: position for seq, position in self._positions.items() if position in (self.position, *self._held)}

    def hold(self) -> None:
        """Keep the deltas that will lead back to the present version, until `release`."""
        self._held[self.position] += 1

    def release(self, seq: int) -> None:
        """Stop holding a version. Nothing happens if its deltas were dropped already."""
        position = self._positions.get(seq)
        if position is not None and position in self._held:
            self._held[position] -= 1
            self._held += Counter()  # drops zeros
            self.prune()

    def deltas_back(self, seq: int) -> list[Reverse]:
        """Return the reverse deltas that lead from the newest version to version `seq`, in order. Raises `HistoryDropped`."""
        target = self._positions.get(seq)
        if target is None:
            raise HistoryDropped(f"the deltas from commit {self.here.seq} back to commit {seq} were dropped")
        found: list[Reverse] = []
        at = self.position
        while at > target:
            steps = [reverse for (_, end), reverse in self._kept.items() if end == at and reverse.start >= target]
            if not steps:
                raise HistoryDropped(f"the deltas from commit {self.here.seq} back to commit {seq} were dropped")
            found.append(max(steps, key=lambda reverse: reverse.level))
            at = found[-1].start
        return found

    def _keep(self, reverse: Reverse) -> None:
        if self.size + reverse.size > self._budget:
            self._kept.clear()  # changes are so large that skips would save little; start again with the next version
            return
        self._kept[reverse.level, reverse.end] = reverse

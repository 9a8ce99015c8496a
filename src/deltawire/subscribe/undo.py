"""The way back: values that the last changes overwrote, as many as fit into a budget."""

from __future__ import annotations

from collections import deque

from ..chain.memory_state import Undo
from ..format.digest import Digest
from ..format.records.chain_records import Commit

_SHARE = 4
MOST_STEPS = 64


class UndoLog:
    """Undo steps in the order in which they were made. `budget` bounds their memory; None means a quarter of the state."""

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"undo_bytes must be at least 0, not {budget}")
        self._budget = budget
        self._steps: deque[Undo] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: Undo) -> None:
        """Remember a step, and forget the oldest ones beyond the budget."""
        self._steps.append(step)
        self._bytes += step.nbytes
        budget = step.after.state_bytes // _SHARE if self._budget is None else self._budget
        while self._steps and (self._bytes > budget or len(self._steps) > MOST_STEPS):
            self._bytes -= self._steps.popleft().nbytes

    def way_back(self, here: Digest | None, target: Commit) -> list[Undo] | None:
        """The steps that lead from the state `here` back to that of `target`, newest first; None if it is not that far that they reach.

        States are told apart by their digests: a rewind brings back a state under another number. After a sync that Ctrl-C cut off a step
        may be missing, or be undone already; beyond such a gap nothing may be undone, or the state would be a mix of versions.
        """
        steps: list[Undo] = []
        for step in reversed(self._steps):
            if step.after.digest != here or not step.update.is_applied:
                return None
            steps.append(step)
            here = step.before.digest
            if step.before.digest == target.digest:
                return steps
        return None

    def pop(self) -> Undo:
        """Take the newest step out, because it was undone."""
        step = self._steps.pop()
        self._bytes -= step.nbytes
        return step

    def clear(self) -> None:
        """Forget all: the state was replaced."""
        self._steps.clear()
        self._bytes = 0

"""The last update steps of a replica, kept so that it can go back to earlier versions without the store."""

from __future__ import annotations

from collections import deque

from ..chain.memory_state import UpdateStep
from ..format.digest import Digest
from ..format.records.version_records import Commit

_DEFAULT_SHARE = 4
"""Without a budget, the kept steps may take the memory of the state divided by this."""
MOST_STEPS = 64


class UndoLog:
    """Update steps in the order in which they were applied.

    Parameters
    ----------
    budget
        Most bytes that the kept steps may occupy. None means a quarter of the state.
    """

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 0:
            raise ValueError(f"undo_bytes must be at least 0, not {budget}")
        self._budget = budget
        self._steps: deque[UpdateStep] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: UpdateStep) -> None:
        """Keep a step, and drop the oldest ones that exceed the budget."""
        self._steps.append(step)
        self._bytes += step.nbytes
        budget = step.after.state_bytes // _DEFAULT_SHARE if self._budget is None else self._budget
        while self._steps and (self._bytes > budget or len(self._steps) > MOST_STEPS):
            self._bytes -= self._steps.popleft().nbytes

    def steps_back(self, current: Digest | None, target: Commit) -> list[UpdateStep] | None:
        """Return the steps from the state with digest `current` back to that of `target`, newest first.

        Returns None if the kept steps do not reach back that far. States are compared by their digests, because a rewind brings back a
        state under another number. If Ctrl-C interrupted a sync, a step may be missing or may be undone already. Nothing beyond such a gap
        may be undone, because the state would become a mix of versions.
        """
        steps: list[UpdateStep] = []
        for step in reversed(self._steps):
            if step.after.digest != current or not step.update.is_applied:
                return None
            steps.append(step)
            current = step.before.digest
            if step.before.digest == target.digest:
                return steps
        return None

    def drop_undone(self) -> None:
        """Drop the newest steps that are undone."""
        while self._steps and not self._steps[-1].update.is_applied:
            self._bytes -= self._steps.pop().nbytes

    def clear(self) -> None:
        """Drop all steps, because the state was replaced."""
        self._steps.clear()
        self._bytes = 0

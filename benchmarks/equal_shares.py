"""The baseline of shares: every member gets the same number of tasks."""

from __future__ import annotations

from collections.abc import Sequence

from deltawire.fleet.rules.assignment import OpenTask
from deltawire.fleet.rules.scheduler import Candidate, Scheduler


class EqualShares(Scheduler):
    """Assigns tasks to members in turn, whatever their speed or version, and never reassigns them. Tasks wait for their members."""

    def offers(
        self, tasks: Sequence[OpenTask], members: Sequence[Candidate], *, oldest_step: int, now: float, later: int = 0
    ) -> dict[int, str]:
        names = sorted(one.name for one in members)
        able = {one.name for one in members if one.step is not None and one.step >= oldest_step}
        return {task.task: name for task in tasks if (name := names[task.task % len(names)]) in able} if names else {}

    def is_straggler(self, member: str, leased: float, now: float, *, times: float = 1.0) -> bool:
        return False

    def is_worth_a_copy(self, member: str, leased: float, now: float, others: float) -> bool:
        return False

    def is_long(self, leased: float, now: float) -> bool:
        return False

"""The result of a check of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ReportProgress = Callable[[int, int], None]
"""Called with the number of commits done and the number of all commits."""


NO_ROUTE = "no new reader can get to the newest version: no undamaged route leads there"
"""The problem of the newest version if damage elsewhere leaves no route to it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: `where` is a key or a version, `what` describes the problem."""

    where: str
    what: str


@dataclass(slots=True)
class Report:
    """The result of a check. `floor` is −1 if nothing was ever collected. Files at or below the floor may be deleted, so they are not
    checked.
    """

    commits: int = 0
    versions: int = 0
    void: int = 0
    shortcuts: int = 0
    files: int = 0
    bytes: int = 0
    rebuilt: int = 0
    floor: int = -1
    problems: list[Problem] = field(default_factory=list)
    superseded: list[Problem] = field(default_factory=list)
    """Damage to data that readers of the newest version do not need: versions that a rewind abandoned, and data below the newest sound
    checkpoint. These versions can no longer be pulled, and collection removes them.
    """
    notes: list[Problem] = field(default_factory=list)
    """Findings that are not damage. They do no harm, and collection removes them."""

    @property
    def ok(self) -> bool:
        """Whether readers can reach the newest version, as far as was checked.

        A reader that has nothing can reach it over files that were all checked, and no other route that readers may take is damaged.
        """
        return not self.problems

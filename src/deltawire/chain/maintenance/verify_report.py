"""The result of a check of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ReportProgress = Callable[[int, int], None]
"""Called with the number of commits done, and of all."""


NO_ROUTE = "no new reader can get to the newest version: nothing that is sound leads there"
"""What is said of the newest version when damage elsewhere leaves no way to it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that should not be: `where` is a key, or a version."""

    where: str
    what: str


@dataclass(slots=True)
class Report:
    """What a check found. `floor` is −1 where nothing was ever collected; files at or below it may be gone, and are not asked for."""

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
    """Damage to data that readers of the newest version do not need: versions that a rewind abandoned, and what lies below the newest
    sound checkpoint. Such versions cannot be pulled any more. Collection removes them."""
    notes: list[Problem] = field(default_factory=list)
    """What is no damage: it is in nobody's way, and collection removes it."""

    @property
    def ok(self) -> bool:
        """Whether readers can get to the newest version, as far as the check has looked.

        A reader that has nothing yet can, over files that were all looked at; and no other way that readers may take is damaged.
        """
        return not self.problems

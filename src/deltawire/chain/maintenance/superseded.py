"""Find the data of a chain that still matter: those that lead from its newest sound checkpoint to its newest version. Asks no store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...format.records.version_records import Commit, Shortcut

Record = Commit | Shortcut


@dataclass(frozen=True, slots=True)
class Needed:
    """The part of a chain that readers of its newest version need, whatever version they have.

    `commits` are the numbers of the live commits from the newest sound checkpoint on. `checkpoint` is the record of that checkpoint. It is
    None if there is none; then all live commits are needed.
    """

    commits: frozenset[int]
    checkpoint: Record | None

    def needs(self, record: Record) -> bool:
        """Return whether readers need the files of a record. If not, the record is superseded."""
        if isinstance(record, Shortcut):
            return record.target.seq in self.commits and record.target.seq != self._start
        return record.seq in self.commits and not (record.seq == self._start and isinstance(self.checkpoint, Shortcut))

    @property
    def _start(self) -> int | None:
        return None if self.checkpoint is None else target_seq(self.checkpoint)


def find_needed(commits: Sequence[Commit], shortcuts: Iterable[Shortcut], is_damaged: Callable[[Record], bool]) -> Needed:
    """Walk down the history of the last commit to a sound checkpoint. `commits` are all commits of a chain that are not void, in order."""
    anchors = _anchors_of(shortcut for shortcut in shortcuts if not is_damaged(shortcut))
    live: set[int] = set()
    for commit in _history(commits):
        live.add(commit.seq)
        if commit.kind == "anchor" and not is_damaged(commit):
            return Needed(frozenset(live), commit)
        if commit.seq in anchors:
            return Needed(frozenset(live), anchors[commit.seq])
    return Needed(frozenset(live), None)


def live_checkpoints(commits: Sequence[Commit], shortcuts: Iterable[Shortcut]) -> Iterator[Record]:
    """Yield the checkpoints in the history that leads to the last of `commits`, newest first, whether or not their files exist."""
    anchors = _anchors_of(shortcuts)
    for commit in _history(commits):
        if commit.kind == "anchor":
            yield commit
        elif commit.seq in anchors:
            yield anchors[commit.seq]


def _anchors_of(shortcuts: Iterable[Shortcut]) -> dict[int, Shortcut]:
    return {shortcut.target.seq: shortcut for shortcut in shortcuts if shortcut.base is None}


def _history(commits: Sequence[Commit]) -> Iterator[Commit]:
    """Yield the commits that led to the last one, newest first. Versions that a rewind abandoned are not among them."""
    positions = {commit.seq: position for position, commit in enumerate(commits)}
    position: int | None = len(commits) - 1
    while position is not None and position >= 0:
        commit = commits[position]
        yield commit
        rewound = commit.base.seq if commit.kind == "rewind" and commit.base is not None else None
        position = position - 1 if rewound is None else positions.get(rewound)


def target_seq(record: Record) -> int:
    """Return the number of the commit that a commit or shortcut leads to."""
    return record.target.seq if isinstance(record, Shortcut) else record.seq

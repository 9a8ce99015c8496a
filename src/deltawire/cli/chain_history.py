"""The newest part of a chain as `deltawire log` shows it, read with few round trips however long the chain is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..chain.attachments import changed_names
from ..chain.find import find_version, version_number

if TYPE_CHECKING:
    from ..chain.log import ChainLog
    from ..format.records.chain_records import Commit

_AT_ONCE = 32
_WINDOW = 256
"""So many records of full size fit into what the log keeps in memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A commit and what others say of it.

    `anchored` if a checkpoint of it lies beside the chain; `skips` are the versions from which one delta leads here. Of `collected` ones
    the own files may be gone; `abandoned` ones were undone by a later rewind, `void` ones never counted. `changed_files` are the
    attachments that differ from those of the version before; empty for the first one that was read.
    """

    commit: Commit
    void: bool
    abandoned: bool
    collected: bool
    anchored: bool
    skips: tuple[int, ...]
    changed_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The newest part of a chain, oldest first: versions, or with `by_commits` all commits. `floor` is −1 while nothing was ever collected.

    `head` is the newest commit that is not void. `numbers` has the version numbers of all places that are mentioned.
    """

    entries: Sequence[Entry]
    floor: int
    head: Commit | None = None
    by_commits: bool = False
    numbers: Mapping[int, int] = field(default_factory=dict)

    def label(self, seq: int) -> int:
        """What people call the commit at a place: the number of its version, or with `by_commits` its place."""
        return seq if self.by_commits else self.numbers[seq]

    @property
    def skips(self) -> list[tuple[int, int]]:
        """(target, base) of all skips to what is shown, by their labels."""
        return [(self.label(entry.commit.seq), self.label(base)) for entry in self.entries for base in entry.skips]


def read_history(log: ChainLog, count: int | None, *, by_commits: bool = False) -> History:
    """Read the last `count` versions, or commits, or all; each is checked against the hash in the one after it.

    Empty for a chain without commits.
    """
    head = log.head()
    if head is None:
        return History([], -1)
    # One more than asked for, since whether a commit is void shows in those before it.
    lowest = 0 if count is None else _place_of(log, head, count, by_commits)
    commits = _read_down(log, head, lowest)
    void, abandoned = void_among(commits), abandoned_among(commits)
    changed_files = _changed_files([commit for commit in commits if commit.kind != "fence" and commit.seq not in void])
    floor = log.floor()
    anchors, skips = log.shortcuts(lowest - 1 if lowest else None, head.seq)
    anchored, bases = set(anchors), defaultdict(list)
    for seq, base in skips:
        bases[seq].append(base)
    entries = [
        Entry(
            commit,
            commit.seq in void,
            commit.seq in abandoned,
            commit.seq <= floor and commit.kind in ("delta", "anchor"),
            commit.seq in anchored,
            tuple(sorted(bases[commit.seq], reverse=True)),
            tuple(changed_files.get(commit.seq, ())),
        )
        for commit in commits
    ]
    if not by_commits:
        entries = [entry for entry in entries if entry.commit.kind != "fence" and not entry.void]
    shown = entries if count is None else entries[-count:]
    numbers = {commit.seq: commit.updates for commit in commits}
    rewound_to = {entry.commit.base.seq for entry in shown if entry.commit.kind == "rewind" and entry.commit.base is not None}
    for seq in {floor, *rewound_to, *(base for entry in shown for base in entry.skips)} - {-1, *numbers}:
        numbers[seq] = version_number(log, min(seq, head.seq))  # names and marks can say anything
    return History(shown, floor, log.in_force(head), by_commits, numbers)


def _changed_files(versions: Sequence[Commit]) -> dict[int, list[str]]:
    """For each version but the first, the attachments that differ from those of the version before."""
    pairs = itertools.pairwise(versions)
    return {
        after.seq: changed_names(before.attachments, after.attachments)
        for before, after in pairs
        if before.attachments is not None and after.attachments is not None
    }


def _place_of(log: ChainLog, head: Commit, count: int, by_commits: bool) -> int:
    """The place from which on all that is asked for is read."""
    if by_commits:
        return max(head.seq - count, 0)
    in_force = log.in_force(head)
    return 0 if in_force.updates <= count else find_version(log, in_force.updates - count).seq


def void_among(commits: Sequence[Commit]) -> set[int]:
    """Those that do not count, as far as these commits, a run of the chain up to its head, can tell.

    Void is what has a lower epoch than a commit before it; and what a later delta or fence passes over, since those build on the newest
    commit that is not void.
    """
    void = set()
    epoch = 0
    for commit in commits:
        if commit.epoch < epoch:
            void.add(commit.seq)
            continue
        epoch = commit.epoch
        if commit.kind in ("delta", "fence") and commit.base is not None:
            void.update(range(max(commit.base.seq + 1, commits[0].seq), commit.seq))
    return void


def abandoned_among(commits: Sequence[Commit]) -> set[int]:
    """The versions that rewinds have taken out of force."""
    abandoned: set[int] = set()
    for commit in commits:
        if commit.kind == "rewind" and commit.base is not None:
            abandoned.update(range(max(commit.base.seq + 1, commits[0].seq), commit.seq))
    return {commit.seq for commit in commits if commit.seq in abandoned and commit.kind != "fence"}


def _read_down(log: ChainLog, head: Commit, lowest: int) -> list[Commit]:
    commits = [head]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-log") as pool:
        while commits[-1].seq > lowest:
            top = commits[-1].seq
            list(pool.map(log.read, range(max(lowest, top - _WINDOW), top)))  # the log keeps them
            while commits[-1].seq > max(lowest, top - _WINDOW):
                commits.append(log.ancestor(commits[-1], commits[-1].seq - 1))
    return commits[::-1]

"""Reads the newest part of a chain, as `deltawire log` shows it, with few round trips however long the chain is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..chain.attachments import changed_names
from ..chain.channels import channels_by_commit
from ..chain.find import find_version, version_number
from ..chain.void_commits import abandoned_among, void_among

if TYPE_CHECKING:
    from ..chain.log import ChainLog
    from ..format.records.version_records import Commit

_AT_ONCE = 32
_WINDOW = 256
"""This many records of full size fit into the memory of `ChainLog`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A commit, and what other records say about it.

    Parameters
    ----------
    commit
        The commit.
    void
        It never counted, because a newer publisher had taken over.
    abandoned
        A later rewind went back to a version before it.
    collected
        Its files may have been deleted by garbage collection.
    anchored
        The chain holds an anchor of it.
    skips
        The seqs of the versions from which one delta leads to it.
    changed_files
        The attachments that differ from those of the version before. Empty for the oldest version that was read.
    channels
        The channels that name it.
    """

    commit: Commit
    void: bool
    abandoned: bool
    collected: bool
    anchored: bool
    skips: tuple[int, ...]
    changed_files: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The newest part of a chain.

    Parameters
    ----------
    entries
        Versions, or with `by_commits` all commits, oldest first.
    floor
        The seq of the floor; −1 if nothing was ever collected.
    head
        The newest commit that is not void.
    by_commits
        Whether the entries are all commits.
    numbers
        The version numbers of all commits that are mentioned, by seq.
    """

    entries: Sequence[Entry]
    floor: int
    head: Commit | None = None
    by_commits: bool = False
    numbers: Mapping[int, int] = field(default_factory=dict)

    def label(self, seq: int) -> int:
        """Return the number of the version at a seq; with `by_commits` the seq itself."""
        return seq if self.by_commits else self.numbers[seq]

    @property
    def skips(self) -> list[tuple[int, int]]:
        """The labels (target, base) of all skips to the entries."""
        return [(self.label(entry.commit.seq), self.label(base)) for entry in self.entries for base in entry.skips]


def read_history(log: ChainLog, count: int | None, *, by_commits: bool = False) -> History:
    """Read the newest versions, and check each commit against the hash in the one after it.

    Parameters
    ----------
    log
        The chain.
    count
        The number of versions, or of commits; None reads all of them.
    by_commits
        Read commits, also those that make no version.
    """
    head = log.head()
    if head is None:
        return History([], -1)
    # One more commit is read, because commits before a void one show that it is void.
    lowest = 0 if count is None else _lowest_seq(log, head, count, by_commits)
    commits = _read_down(log, head, lowest)
    void, abandoned = void_among(commits), abandoned_among(commits)
    changed_files = _changed_files([commit for commit in commits if commit.kind != "fence" and commit.seq not in void])
    floor = log.floor()
    anchors, skips = log.shortcuts(lowest - 1 if lowest else None, head.seq)
    anchored, bases = set(anchors), defaultdict(list)
    for seq, base in skips:
        bases[seq].append(base)
    kept = _kept_checkpoint(commits, anchored, void | abandoned, floor)
    channels = channels_by_commit(log)
    entries = [
        Entry(
            commit,
            commit.seq in void,
            commit.seq in abandoned,
            commit.seq <= floor and commit.kind in ("delta", "anchor") and commit.seq != kept and commit.seq not in channels,
            commit.seq in anchored,
            tuple(sorted(bases[commit.seq], reverse=True)),
            tuple(changed_files.get(commit.seq, ())),
            channels.get(commit.seq, ()),
        )
        for commit in commits
    ]
    if not by_commits:
        entries = [entry for entry in entries if entry.commit.kind != "fence" and not entry.void]
    shown = entries if count is None else entries[-count:]
    numbers = {commit.seq: commit.updates for commit in commits}
    rewound_to = {entry.commit.base.seq for entry in shown if entry.commit.kind == "rewind" and entry.commit.base is not None}
    for seq in {floor, *rewound_to, *(base for entry in shown for base in entry.skips)} - {-1, *numbers}:
        numbers[seq] = version_number(log, min(seq, head.seq))  # keys and marks may be wrong
    return History(shown, floor, log.in_force(head), by_commits, numbers)


def _kept_checkpoint(commits: Sequence[Commit], anchored: set[int], out_of_force: set[int], floor: int) -> int | None:
    """Return the seq of the full checkpoint that collection keeps: the newest one at or below the floor. None if it is not among these."""
    below = (commit for commit in reversed(commits) if commit.seq <= floor and commit.seq not in out_of_force)
    return next((commit.seq for commit in below if commit.kind == "anchor" or commit.seq in anchored), None)


def _changed_files(versions: Sequence[Commit]) -> dict[int, list[str]]:
    """Return, for each version except the first, the attachments that differ from those of the version before."""
    pairs = itertools.pairwise(versions)
    return {
        after.seq: changed_names(before.attachments, after.attachments)
        for before, after in pairs
        if before.attachments is not None and after.attachments is not None
    }


def _lowest_seq(log: ChainLog, head: Commit, count: int, by_commits: bool) -> int:
    """Return the seq of the first commit to read."""
    if by_commits:
        return max(head.seq - count, 0)
    in_force = log.in_force(head)
    return 0 if in_force.updates <= count else find_version(log, in_force.updates - count).seq


def _read_down(log: ChainLog, head: Commit, lowest: int) -> list[Commit]:
    commits = [head]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-log") as pool:
        while commits[-1].seq > lowest:
            top = commits[-1].seq
            list(pool.map(log.read, range(max(lowest, top - _WINDOW), top)))  # the log keeps them in memory
            while commits[-1].seq > max(lowest, top - _WINDOW):
                commits.append(log.ancestor(commits[-1], commits[-1].seq - 1))
    return commits[::-1]

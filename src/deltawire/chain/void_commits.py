"""Which commits of a chain count, as later commits tell. Pure functions over commits that were read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..format.records.version_records import Commit


def void_among(commits: Sequence[Commit]) -> set[int]:
    """Return the seqs of void commits among commits of a chain, which are ordered by their seqs.

    A commit is void if its epoch is lower than that of a commit before it, or if a later delta or fence has a base before it: these build
    on the newest commit that is not void.
    """
    void: set[int] = set()
    seqs = [commit.seq for commit in commits]
    epoch = 0
    for commit in commits:
        if commit.epoch < epoch:
            void.add(commit.seq)
            continue
        epoch = commit.epoch
        if commit.kind in ("delta", "fence") and commit.base is not None:
            void.update(_between(seqs, commit.base.seq, commit.seq))
    return void


def abandoned_among(commits: Sequence[Commit]) -> set[int]:
    """Return the seqs of versions that a later rewind has abandoned, among commits that are ordered by their seqs."""
    abandoned: set[int] = set()
    seqs = [commit.seq for commit in commits]
    for commit in commits:
        if commit.kind == "rewind" and commit.base is not None:
            abandoned.update(_between(seqs, commit.base.seq, commit.seq))
    return {commit.seq for commit in commits if commit.seq in abandoned and commit.kind != "fence"}


def _between(seqs: list[int], low: int, high: int) -> list[int]:
    """Return those of the seqs that lie between two numbers. A hostile base cannot make it longer than what was read."""
    return seqs[bisect_right(seqs, low) : bisect_left(seqs, high)]

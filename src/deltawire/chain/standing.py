"""Which commits of a chain count, as later commits tell. Pure functions over commits that were read."""

from __future__ import annotations

from collections.abc import Sequence

from ..format.records.version_records import Commit


def void_among(commits: Sequence[Commit]) -> set[int]:
    """Return the seqs of void commits among the newest commits of a chain.

    A commit is void if its epoch is lower than that of a commit before it, or if a later delta or fence has a base before it: these build
    on the newest commit that is not void.
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
    """Return the seqs of versions that a later rewind has abandoned."""
    abandoned: set[int] = set()
    for commit in commits:
        if commit.kind == "rewind" and commit.base is not None:
            abandoned.update(range(max(commit.base.seq + 1, commits[0].seq), commit.seq))
    return {commit.seq for commit in commits if commit.seq in abandoned and commit.kind != "fence"}

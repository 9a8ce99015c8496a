"""Finds out which versions a chain has, and which of them are in the history that leads to its head."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..errors import NoChain
from ..format.records.version_records import Commit
from .rules.staleness import KnownVersion


class ChainVersions:
    """Answers `FindVersion`. Versions that were found live stay live while this process writes the chain: only a resume abandons them.

    Parameters
    ----------
    log
        The chain.
    """

    def __init__(self, log: ChainLog) -> None:
        self._log = log
        self._live: dict[int, Commit] = {}
        self._below: Commit | None = None
        """The next older commit after those that are known to be live."""

    def newest(self) -> KnownVersion:
        """Return the version in force.

        Raise `NoChain` if no version is published yet, and ValueError if the version was published without its training step.
        """
        head = self._head()
        if head is None or head.state_seq is None:
            raise NoChain(f"no version is published at {self._log.store.url} yet.")
        found = _known(self._log.state_commit(head), live=True)
        if found is None:
            raise ValueError(f"commit {head.state_seq} in {self._log.store.url} was published without a training step, which a fleet needs")
        return found

    def find(self, seq: int) -> KnownVersion | None:
        """Read the head again, and return the version of this commit; None if the chain has no such version with a training step."""
        head = self._head()
        if head is None or seq > head.seq:
            return None
        self._walk(head, seq)
        if seq in self._live:
            return _known(self._live[seq], live=True)
        commit = self._log.ancestor(head, seq)
        return None if self._log.is_void(commit) else _known(commit, live=False)

    def _head(self) -> Commit | None:
        head = self._log.head()
        return None if head is None else self._log.in_force(head)

    def _walk(self, head: Commit, seq: int) -> None:
        """Follow the history from the head back to the commits that are known, and further back if `seq` is older."""
        if not self._live:
            self._below = head
        commit: Commit | None = head
        while self._live and commit is not None and commit.seq not in self._live:
            self._live[commit.seq] = commit
            commit = self._before(commit)
        while self._below is not None and (self._below.seq >= seq or not self._live):
            self._live[self._below.seq] = self._below
            self._below = self._before(self._below)

    def _before(self, commit: Commit) -> Commit | None:
        """Return the commit before this one in its history.

        For the first commit after a resume, that is the one that the trainer was resumed from.
        """
        if commit.kind == "rewind" and commit.base is not None:
            return self._log.ancestor(commit, commit.base.seq)
        before = self._log.previous(commit)
        if commit.kind == "anchor" and before is not None and before.kind == "fence" and before.epoch == commit.epoch:
            resumed_from = self._log.resumed_from(commit)
            if resumed_from is not None:
                return self._log.ancestor(commit, resumed_from)
        return before


def _known(commit: Commit, *, live: bool) -> KnownVersion | None:
    if commit.kind == "fence" or commit.step is None or commit.digest is None:
        return None
    return KnownVersion(commit.seq, commit.step, commit.digest, live)

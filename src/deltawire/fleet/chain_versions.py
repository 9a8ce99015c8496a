"""Which versions a chain has, and which of them are in the history that leads to its head."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..errors import NoChain
from ..format.records.chain_records import Commit
from .rules.staleness import KnownVersion


class ChainVersions:
    """Answers `FindVersion`. What was found live stays so for as long as this process writes the chain: only a resume abandons versions."""

    def __init__(self, log: ChainLog) -> None:
        self._log = log
        self._live: dict[int, Commit] = {}
        self._below: Commit | None = None
        """The next commit down from what is known to be live."""

    def newest(self) -> KnownVersion:
        """The version in force. `NoChain` before the first; ValueError for one that was published without its training step."""
        head = self._head()
        if head is None or head.state_seq is None:
            raise NoChain(f"no version is published at {self._log.store.url} yet.")
        found = _known(self._log.state_commit(head), live=True)
        if found is None:
            raise ValueError(f"commit {head.state_seq} in {self._log.store.url} was published without a step, which a fleet goes by")
        return found

    def find(self, seq: int) -> KnownVersion | None:
        """The version of this number, after a new look at the head; None if the chain has none, or one without a training step."""
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
        """Follow the history down from the head to what is known of it, and further if `seq` lies below that."""
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
        """What came before a commit in the history that it ends: for the first of a trainer that was resumed, what it was resumed from."""
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

"""Reads a chain for the page: the newest commits, and samples of all others, with a bounded number of requests in each look.

Commits that cannot be read or do not fit are entries like all others, with the reason. Only errors of the store itself are raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from ..chain.log import ChainLog
from ..chain.newest_number import newest_number
from ..chain.void_commits import abandoned_among, void_among
from ..errors import DeltawireError, ObjectMissing, StoreError
from ..format.records.version_records import Commit
from ..store import keys
from .member_history import Updates
from .plain_values import number_in, short

WINDOW = 240
"""The number of newest commits that are all read."""
SAMPLES = 256
"""The most samples of older commits. They are a power of two apart, so that each links to the one before."""
_MOST_SHORTCUTS = 2000
_AT_ONCE = 32
_CHECKED_FILES = 16
_LATE_SHORTCUTS = 64
"""Shortcuts are made after their versions, but not this many versions after them."""
_RECHECK_LOOKS = 15
_METRICS = ("reward", "reward_std", "mismatch_kl", "loss", "lag", "entropy", "tokens")
"""Strings of `meta` that the page shows as numbers."""


@dataclass(frozen=True, slots=True)
class ScannedCommit:
    """A commit, or the reason why there is none that can be shown."""

    seq: int
    commit: Commit | None
    hash: str
    problem: str | None


class ChainScan:
    """Keeps the newest commits of a chain and samples of the others.

    Parameters
    ----------
    log
        The chain.
    window
        The number of newest commits to keep.
    """

    def __init__(self, log: ChainLog, *, window: int = WINDOW) -> None:
        self._log = log
        self._window = window
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-dashboard")
        self._scanned: dict[int, ScannedCommit] = {}
        self._samples: dict[int, ScannedCommit] = {}
        self._stride = 1
        self._damage: dict[int, str] = {}
        self._anchors: set[int] = set()
        self._skips: set[tuple[int, int]] = set()
        self._floor = -1
        self._looks = 0
        self.head: int | None = None
        """The highest seq that has a commit."""
        self.times_set_back = 0
        """How often the store was set back to an earlier state, so that everything was read again."""
        self._lost: ScannedCommit | None = None
        """The newest commit that was seen, if it is no longer in the store."""

    def look(self) -> None:
        """Read what is new. Raises errors of the store, after which it can be called again."""
        self._looks += 1
        if self.head is not None and self._looks % _RECHECK_LOOKS == 0 and not self._has_commit(self.head):
            self._lost = self._scanned[self.head]
            self._forget()
        head = self._newest_seq()
        if head is None:
            return
        self._read_window(head)
        self._read_samples(head)
        if head != self.head or self._looks % _RECHECK_LOOKS == 1:
            self._read_shortcuts(head)
            self._check_newest(head)
        self._floor = min(self._log.floor(), head)
        self.head = head
        if self._lost is not None and head >= self._lost.seq and self.scanned(self._lost.seq).hash == self._lost.hash:
            self._lost = None

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def scanned(self, seq: int) -> ScannedCommit:
        """Return one commit, from memory or from the store. Raises errors of the store."""
        return self._scanned.get(seq) or self._samples.get(seq) or self._read(seq)

    def note_damage(self, seq: int, reason: str) -> None:
        """Show a version as damaged, because its files could not be used."""
        if len(self._damage) < 4 * self._window:
            self._damage[seq] = reason

    def version_of(self, seq: int | None) -> int | None:
        """Return the number of the version at a commit that is in memory. None if it is not."""
        scanned = None if seq is None else self._scanned.get(seq) or self._samples.get(seq)
        return None if scanned is None or scanned.commit is None else scanned.commit.updates

    def newest(self) -> Commit | None:
        """Return the newest commit in memory that left a state in force. None if there is none."""
        for seq in sorted(self._scanned, reverse=True):
            commit = self._scanned[seq].commit
            if commit is not None and commit.state_seq is not None:
                return commit
        return None

    def window(self) -> list[ScannedCommit]:
        """Return the newest commits, oldest first."""
        return [self._scanned[seq] for seq in sorted(self._scanned)]

    def in_memory(self) -> dict[int, ScannedCommit]:
        """Return all commits in memory by their seqs: the newest ones, and the samples."""
        return {**self._samples, **self._scanned}

    def read_all(self, seqs: Iterable[int]) -> list[ScannedCommit]:
        """Return commits, from memory or from the store, many at once. Raises errors of the store.

        Parameters
        ----------
        seqs
            The numbers of the commits.
        """
        return list(self._pool.map(self.scanned, seqs))

    def updates_between(self, low: int, high: int) -> Updates:
        """Return what a member takes that goes through all versions after one commit and up to another, as far as they are in memory.

        Parameters
        ----------
        low, high
            The commits that the member had and has.
        """
        commits = (scanned.commit for seq, scanned in self._scanned.items() if low < seq <= high)
        deltas = [commit for commit in commits if commit is not None and commit.kind == "delta"]
        return Updates(len(deltas), sum(one.stored_bytes for one in deltas), sum(one.state_bytes for one in deltas))

    def plain(self) -> dict[str, Any]:
        """Return the chain as plain values."""
        commits = [scanned.commit for scanned in self.window() if scanned.commit is not None]
        void, abandoned = void_among(commits), abandoned_among(commits)
        newest = self.newest()
        skips = [[seq, base] for seq, base in sorted(self._skips) if seq in self._scanned]
        return {
            "head": self.head,
            "version": None if newest is None else newest.updates,
            "state_bytes": 0 if newest is None else newest.state_bytes,
            "tensors": 0 if newest is None else newest.tensors,
            "recipe": None if newest is None or newest.recipe is None else short(str(newest.recipe), 80),
            "floor": self._floor,
            "floor_version": self.version_of(self._floor),
            "entries": [self.entry(scanned, void, abandoned, self._anchors) for scanned in self.window()],
            "skips": skips,
            "stride": self._stride,
            "samples": [self.entry(scanned) for _, scanned in sorted(self._samples.items()) if scanned.seq not in self._scanned],
            "set_back": self._lost is not None,
        }

    def entry(
        self, scanned: ScannedCommit, void: Set[int] = frozenset(), abandoned: Set[int] = frozenset(), anchors: Set[int] = frozenset()
    ) -> dict[str, Any]:
        """Return a commit as plain values.

        Parameters
        ----------
        scanned
            The commit.
        void, abandoned, anchors
            The seqs of commits that are void, that were abandoned, and that a shortcut made full checkpoints of.
        """
        problem = scanned.problem or self._damage.get(scanned.seq)
        entry: dict[str, Any] = {"seq": scanned.seq, "problem": None if problem is None else short(problem, 400)}
        commit = scanned.commit
        if commit is None:
            return {**entry, "kind": "corrupt"}
        flags = [
            name
            for name, is_set in (
                ("void", scanned.seq in void),
                ("abandoned", scanned.seq in abandoned),
                ("collected", scanned.seq <= self._floor and scanned.seq not in anchors and commit.kind != "fence"),
                ("anchored", scanned.seq in anchors),
            )
            if is_set
        ]
        return {
            **entry,
            "version": commit.updates,
            "kind": commit.kind,
            "step": commit.step,
            "epoch": commit.epoch,
            "time": commit.time / 1000,
            "base": None if commit.base is None else commit.base.seq,
            "bytes": commit.stored_bytes,
            "state_bytes": commit.state_bytes,
            "changed": commit.changed,
            "flags": flags,
            "metrics": _metrics(commit.meta),
        }

    def _forget(self) -> None:
        self._scanned.clear()
        self._samples.clear()
        self._skips.clear()
        self._anchors.clear()
        self._stride, self.head = 1, None
        self.times_set_back += 1
        self._log.forget()

    def _newest_seq(self) -> int | None:
        """Return the highest seq that has a commit: seqs have no gaps. Nothing is trusted except that an object exists."""
        start = self.head
        if start is None:
            hint = self._log.hint()
            start = hint if hint is not None and self._has_commit(hint) else 0 if self._has_commit(0) else None
        if start is None:
            return None
        return newest_number(start, self._has_commit)

    def _has_commit(self, seq: int) -> bool:
        try:
            self._log.store.head(keys.commit_key(seq))
        except ObjectMissing:
            return False
        return True

    def _read_window(self, head: int) -> None:
        lowest = max(0, head - self._window + 1)
        wanted = [seq for seq in range(lowest, head + 1) if seq not in self._scanned]
        read = {scanned.seq: scanned for scanned in self._pool.map(self._read, wanted)}
        self._scanned = check_links({seq: scanned for seq, scanned in {**self._scanned, **read}.items() if seq >= lowest})

    def _read_samples(self, head: int) -> None:
        while head // self._stride > SAMPLES:
            self._stride *= 2
        samples = {seq: scanned for seq, scanned in self._samples.items() if seq % self._stride == 0}
        wanted = [seq for seq in range(0, head + 1, self._stride) if seq not in samples]
        samples |= {scanned.seq: scanned for scanned in self._pool.map(lambda seq: self._scanned.get(seq) or self._read(seq), wanted)}
        self._samples = check_links(samples)

    def _read(self, seq: int) -> ScannedCommit:
        try:
            commit = self._log.read(seq)
            if commit is None:
                return ScannedCommit(seq, None, "", f"commit {seq} is missing, although a later one exists.")
            return ScannedCommit(seq, commit, self._log.hash(seq), None)
        except StoreError:
            raise
        except DeltawireError as error:
            return ScannedCommit(seq, None, "", str(error))

    def _read_shortcuts(self, head: int) -> None:
        """List the shortcuts to the newest commits. In most looks only the last of them are listed, because collection deletes few."""
        lowest = min(self._scanned, default=0)
        after = lowest - 1 if self._looks % _RECHECK_LOOKS == 1 else max(lowest, head - _LATE_SHORTCUTS) - 1
        found_anchors, found_skips = self.shortcuts(after, head)
        self._anchors = {seq for seq in self._anchors if lowest <= seq <= after} | found_anchors
        self._skips = {pair for pair in self._skips if lowest <= pair[0] <= after} | found_skips

    def shortcuts(self, after: int, upto: int) -> tuple[set[int], set[tuple[int, int]]]:
        """Return the seqs of versions that shortcuts made full checkpoints of, and the (seq, base) of skips. Raises errors of the store.

        Parameters
        ----------
        after, upto
            Only shortcuts to versions after the first commit, and up to the second, are listed.
        """
        store = self._log.store
        anchors = (
            keys.parse_anchor_key(info.key) for info in store.list(keys.ANCHORS, after=keys.anchor_key(after) if after >= 0 else None)
        )
        skips = (
            keys.parse_skip_key(info.key) for info in store.list(keys.SKIPS, after=keys.skip_key(after, 10**20 - 1) if after >= 0 else None)
        )
        found_anchors = {
            seq for seq in takewhile(lambda seq: seq is None or seq <= upto, islice(anchors, _MOST_SHORTCUTS)) if seq is not None
        }
        found_skips = {
            pair for pair in takewhile(lambda pair: pair is None or pair[0] <= upto, islice(skips, _MOST_SHORTCUTS)) if pair is not None
        }
        return found_anchors, found_skips

    def _check_newest(self, head: int) -> None:
        """Look up the first files of the newest version, which every reader needs now."""
        scanned = self._scanned.get(head)
        if scanned is None or scanned.commit is None:
            return
        for entry in scanned.commit.named_objects[:_CHECKED_FILES]:
            try:
                size = self._log.store.head(entry.key).size
                reason = None if size == entry.size else f"{entry.key} has {size:,} bytes, but its commit says {entry.size:,}."
            except ObjectMissing:
                reason = f"{entry.key} is missing."
            if reason is not None:
                self.note_damage(head, reason)


def check_links(all_scanned: dict[int, ScannedCommit]) -> dict[int, ScannedCommit]:
    """Compare each commit with the hashes of later ones, from the newest down. A commit that cannot be read vouches for none.

    Return the commits, in which those that do not fit are corrupt.

    Parameters
    ----------
    all_scanned
        The commits by their seqs.
    """
    found = dict(all_scanned)
    expected: dict[int, str] = {}
    for seq in sorted(all_scanned, reverse=True):
        scanned = all_scanned[seq]
        if scanned.problem is None and expected.get(seq, scanned.hash) != scanned.hash:
            why = f"commit {seq} is another than the one that later commits link to."
            found[seq] = scanned = ScannedCommit(seq, None, scanned.hash, why)
        if scanned.commit is not None:
            expected |= dict(scanned.commit.links)
            if scanned.commit.parent is not None:
                expected[seq - 1] = scanned.commit.parent
    return found


def _metrics(meta: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers in a commit's strings that the page can draw. Anybody may have written them."""
    found = {name: number_in(meta.get(name)) for name in _METRICS}
    return {name: number for name, number in found.items() if number is not None}

"""Find the files that lead from a state to a version, with few requests, and choose the cheapest route.

The sizes of files are in records, and a long chain has many records. So a route is first planned on assumptions: every commit is a delta on
the one before it, and a skip costs as much as its length suggests. Then the records along that route are read, from the target down, and
the route is planned again where they say otherwise. Every record that a hop depends on is compared with the chain by hash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...errors import ChainBroken, CorruptRecord, LimitExceeded, RollbackDetected, SignatureInvalid, UnsupportedVersion, VersionGone
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, FileEntry
from ...format.records.version_records import Commit, Shortcut
from ..log import ChainLog
from .plan import Edge, plan

FAR = 8
"""Readers more than this many versions behind look for shortcuts first."""

_TOO_FAR = 4096
"""Readers more than this many versions behind, with an anchor in between, start from a full checkpoint."""

HopName = tuple[int | None, int, str]
"""Identifies a hop: base, target, source."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a route: `files` lead from version `base`, or from nothing, to `target`. The sources "fence", "rewind" and "undo" have no
    files.

    `base_digest` is the digest of the state that the hop starts from. `shortcut` is the record that the files belong to, unless they
    belong to the commit that made the target. `find_route` leaves `files` empty if that record has a file list; `Routes.find` reads it.
    """

    target: Commit
    base: int | None
    files: tuple[FileEntry, ...]
    source: str
    base_digest: Digest | None = None
    shortcut: Shortcut | None = None

    @property
    def is_shortcut(self) -> bool:
        """Whether the files belong to a shortcut, not to the commit that made the target."""
        return self.shortcut is not None

    @property
    def record(self) -> Commit | Shortcut:
        """The record that the files belong to."""
        return self.target if self.shortcut is None else self.shortcut

    @property
    def has_unread_list(self) -> bool:
        """Whether `files` still has to be read from a file list."""
        return not self.files and self.source in ("commit", "anchor", "skip") and self.record.file_list is not None

    @property
    def name(self) -> HopName:
        """Identifies this hop, so that a route can be planned without it."""
        return self.base, self.target.seq, self.source


def fetched_hops(route: Sequence[Hop]) -> int:
    """Count the deltas and full checkpoints of a route. Fences, rewinds and undone steps fetch nothing, so they do not count."""
    return sum(1 for hop in route if hop.files)


def makes_versions(route: Sequence[Hop]) -> int:
    """Count the hops of a route that lead to another version. A fence makes none."""
    return sum(1 for hop in route if hop.source != "fence")


def find_route(
    log: ChainLog, have: CommitRef | None, target: Commit, *, extra: Sequence[Edge] = (), without: Collection[HopName] = ()
) -> list[Hop]:
    """Return the hops that lead from the reader's version to `target`, a commit that is not void. Returns [] if the reader is already
    there. The files of hops whose records have a file list are not read: use `Routes.find` to get them.

    Raises `VersionGone` if no route is left, and `ChainBroken` if the chain contradicts itself.

    Parameters
    ----------
    log
        The chain.
    have
        The commit that the reader is at, or None.
    target
        The commit to reach.
    extra
        Hops that only this reader can take ("undo").
    without
        Hops that proved unusable.
    """
    if have is not None and have.seq == target.seq:
        if have.commit != log.hash(target.seq):
            raise RollbackDetected(f"commit {have.seq} is not the one that was seen before.")
        return []
    if have is not None and 0 < target.seq - have.seq <= FAR:
        try:
            return _RouteSearch(log, have, target, extra, without).route()
        except VersionGone:
            pass  # the commits alone are not enough
    # The reader's version may be a dead end, so try routes from nothing next. Data that may be deleted may also still exist.
    starts = dict.fromkeys((have, None))
    for trusting in (False, True):
        for start in starts:
            search = _RouteSearch(log, start, target, extra, without)
            search.list_shortcuts(trusting)
            try:
                return search.route()
            except VersionGone as error:
                gone = error
    raise gone


class _RouteSearch:
    """All hops to a target that are known, assumed, or refuted."""

    def __init__(self, log: ChainLog, have: CommitRef | None, target: Commit, extra: Sequence[Edge], without: Collection[HopName]) -> None:
        self._log = log
        self._have = have
        self._target = target
        self._extra = list(extra)
        self._without = set(without)
        self._commits: dict[int, Commit] = {target.seq: target}
        """Commits that the target's hashes lead to."""
        self._confirmed: dict[int, list[Edge]] = {}
        """The edges of commits that were read. The edges of other commits are assumed."""
        self._read: set[HopName] = set()
        """Hops whose commits or shortcuts were read and fit the chain."""
        self._shortcuts: dict[HopName, Shortcut] = {}
        self._presumed_shortcuts: dict[tuple[int | None, int], Edge] = {}
        self._anchors: list[int] | None = None
        self._floor = -1
        self._low = target.seq if have is None else min(have.seq, target.seq)
        self._delta = target.stored_bytes if target.kind == "delta" else max(1, target.state_bytes // 100)
        if have is not None:
            self._confirm_have(have)

    def list_shortcuts(self, trusting: bool) -> None:
        """Find out which shortcuts exist and, unless `trusting`, which data may have been collected."""
        self._floor = -1 if trusting else self._log.floor()
        self._anchors = [seq for seq in self._log.anchors(None, self._target.seq) if (None, seq, "anchor") not in self._without]
        if self._have is not None and self._anchors and self._anchors[-1] - self._have.seq > _TOO_FAR:
            self._have = None
        for seq in self._anchors:
            self._presumed_shortcuts[None, seq] = Edge(None, seq, self._target.state_bytes, 4, "anchor")
        newest = self._anchors[-1] if self._anchors else 1
        beyond = self._have is not None and newest <= self._have.seq < self._target.seq
        self._reach_down_to(self._low if beyond else newest if self._have is None else min(newest, self._low))

    def route(self) -> list[Hop]:
        """Return the cheapest route of which every hop is confirmed."""
        have = None if self._have is None else self._have.seq
        while True:
            hops = plan(have, self._target.seq, self._edges()).hops
            if self._confirm_all(hops):
                return [self._hop(edge) for edge in hops]

    def _confirm_all(self, hops: Sequence[Edge]) -> bool:
        """Read the records that the hops depend on, from the target down. Return False if one of them is not as assumed.

        The reading stops early only when twice as much is known as before. Planning again after each surprise would take quadratic time,
        and planning only at the end might read many records that are not needed.
        """
        enough = 2 * len(self._read)
        sound = True
        for edge in reversed(hops):
            sound = self._confirm(edge) and sound
            if not sound and len(self._read) >= enough:
                break
        return sound

    def _edges(self) -> Iterator[Edge]:
        yield from (edge for edge in self._extra if not self._is_gone(edge))
        for seq in range(self._low + 1, self._target.seq + 1):
            if seq not in self._confirmed:
                yield Edge(seq - 1, seq, self._delta, 1, "commit")
        if self._anchors is not None and self._low not in self._confirmed and (None, self._low) not in self._presumed_shortcuts:
            yield Edge(None, self._low, self._target.state_bytes, 4, "commit")
        for edges in self._confirmed.values():
            yield from (edge for edge in edges if not self._is_gone(edge))
        yield from (edge for edge in self._presumed_shortcuts.values() if not self._is_gone(edge))

    def _is_gone(self, edge: Edge) -> bool:
        return _name(edge) in self._without or (edge.source in ("commit", "skip") and edge.target <= self._floor)

    def _confirm(self, edge: Edge) -> bool:
        """Read the record that an edge depends on. Return False if it is not as assumed, so that another route may be better."""
        if _name(edge) in self._read or edge in self._extra:
            return True
        if edge.source in ("skip", "anchor"):  # the edges of commits that were read are in `_read`
            return self._confirm_shortcut(edge)
        return self._confirm_commit(edge)

    def _confirm_commit(self, presumed: Edge) -> bool:
        commit = self._commit(presumed.target)
        edges = _edges_of(commit)
        if commit.base is not None:
            self._check_base(commit, commit.base)
            if commit.base.seq < self._low and self._anchors is not None:
                below = [seq for seq in self._anchors if seq <= commit.base.seq]
                self._reach_down_to(max(below, default=min(1, commit.base.seq)))
        self._confirmed[commit.seq] = edges
        self._read.update(map(_name, edges))
        return any(_bears_out(edge, presumed) and not self._is_gone(edge) for edge in edges)

    def _confirm_have(self, have: CommitRef) -> None:
        """Read the reader's own commit. If it only repeats another version's state under a new number, the reader has that version too."""
        commit = self._log.read(have.seq)
        if commit is None or self._log.hash(have.seq) != have.commit:
            raise RollbackDetected(f"commit {have.seq} is not in {self._log.store.url}, or not the one that was seen before.")
        if commit.kind in ("fence", "rewind"):
            self._extra += [edge for edge in _edges_of(commit) if edge.base == have.seq]

    def _confirm_shortcut(self, presumed: Edge) -> bool:
        shortcut = self._read_shortcut(presumed)
        del self._presumed_shortcuts[presumed.base, presumed.target]
        if shortcut is None:
            return False
        edge = Edge(presumed.base, presumed.target, shortcut.stored_bytes, _objects(shortcut), presumed.source)
        self._presumed_shortcuts[edge.base, edge.target] = edge
        self._shortcuts[_name(edge)] = shortcut
        self._read.add(_name(edge))
        return _bears_out(edge, presumed)

    def _read_shortcut(self, edge: Edge) -> Shortcut | None:
        """Return the record of a shortcut, or None if the chain does not confirm it. A wrong shortcut only costs a longer route."""
        try:
            shortcut = self._log.shortcut(edge.target, edge.base)
        except (CorruptRecord, SignatureInvalid, LimitExceeded, UnsupportedVersion):
            return None
        if shortcut is None:
            return None
        target = self._commit(edge.target)
        fits = shortcut.target == self._log.ref(target) and (shortcut.state_bytes, shortcut.tensors) == (target.state_bytes, target.tensors)
        if shortcut.base is not None:
            fits = fits and shortcut.base == self._log.ref(self._commit(shortcut.base.seq))
        return shortcut if fits else None

    def _hop(self, edge: Edge) -> Hop:
        target = self._commit_at(edge.target)
        base = None if edge.base is None else self._commit_at(edge.base)
        shortcut = self._shortcuts.get(_name(edge))
        files = shortcut.files if shortcut is not None else target.files if edge.source in ("commit", "anchor") else ()
        return Hop(target, edge.base, files, edge.source, None if base is None else base.digest, shortcut)

    def _commit_at(self, seq: int) -> Commit:
        """Return a commit, also that of the reader's version, which may lie above the target."""
        if seq <= self._target.seq:
            return self._commit(seq)
        commit = self._log.read(seq)
        if commit is None:
            raise ChainBroken(f"commit {seq} is not in {self._log.store.url}.")
        return commit

    def _commit(self, seq: int) -> Commit:
        if seq not in self._commits:
            nearest = seq + 1 if seq + 1 in self._commits else min(known for known in self._commits if known > seq)
            self._commits[seq] = self._log.ancestor(self._commits[nearest], seq)
        return self._commits[seq]

    def _check_base(self, commit: Commit, base: CommitRef) -> None:
        if self._log.ref(self._commit(base.seq)) != base:
            raise ChainBroken(f"commit {commit.seq} has a base {base.seq} that is not the one in the chain.")

    def _reach_down_to(self, low: int) -> None:
        self._low = low
        for seq, base in self._log.skips(low, self._target.seq):
            if base >= low and (base, seq) not in self._presumed_shortcuts and (base, seq, "skip") not in self._without:
                # Changes of successive versions overlap, so a skip costs less than the deltas that it replaces.
                estimate = int(self._delta * (seq - base) ** 0.85)
                self._presumed_shortcuts[base, seq] = Edge(base, seq, estimate, 1, "skip")


def _objects(record: Commit | Shortcut) -> int:
    """Return how many objects must be fetched for a record's files."""
    return record.file_count + (record.file_list is not None)


def _name(edge: Edge) -> HopName:
    return edge.base, edge.target, edge.source


def _bears_out(edge: Edge, presumed: Edge) -> bool:
    """Return whether an edge that was read costs about as much as assumed. If not, planning again may find a better route."""
    return _name(edge) == _name(presumed) and edge.cost <= 2 * presumed.cost


def _edges_of(commit: Commit) -> list[Edge]:
    """Return the hops that a commit offers: its files, or the fact that two commits have the same state."""
    if commit.kind == "anchor":
        return [Edge(None, commit.seq, commit.stored_bytes, _objects(commit), "anchor")]
    if commit.base is None:
        return []
    if commit.kind == "delta":
        return [Edge(commit.base.seq, commit.seq, commit.stored_bytes, _objects(commit), "commit")]
    return [Edge(commit.base.seq, commit.seq, 0, 0, commit.kind), Edge(commit.seq, commit.base.seq, 0, 0, commit.kind)]

"""Events that are made from the store of a run alone: commits, shortcuts, collections, engines, members, rounds, batches.

Nothing here writes.

Other processes wrote all of this. Commits are checked as a reader checks them, and other records are parsed strictly and skipped if they
are malformed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..chain.log import ChainLog
from ..chain.records.reports import read_reports
from ..events import Event, Value
from ..format.records.version_records import Commit
from .overview import FleetReader, SeenMember, SeenRound

_ROUNDS = 8
"""The number of newest rounds that are looked at."""


class StoreEvents:
    """Tells what has changed in the store of a run since the last look.

    Parameters
    ----------
    log
        The chain.
    fleet
        The fleet of the same run.
    count
        The first look tells of at most this many of the newest commits, and of the shortcuts to them.
    """

    def __init__(self, log: ChainLog, fleet: FleetReader, count: int = 20) -> None:
        self._log = log
        self._fleet = fleet
        self._count = count
        self._next: int | None = None
        """The seq of the first commit that was not told yet. None before the first look."""
        self._first = 0
        self._found: list[Event] = []
        self._shortcuts: set[tuple[int, int | None]] = set()
        self._floor = -1
        self._engines: dict[str, object] = {}
        self._members: dict[str, object] = {}
        self._rounds: dict[int, bool] = {}

    def look(self) -> list[Event]:
        """Return events for everything that is new, ordered by time. Raises what reading the chain raises; the next look tells the rest."""
        for part in (self._commits, self._made_shortcuts, self._collections, self._reports, self._fleet_changes):
            for event in part():  # one by one: if the rest fails, the next look returns these
                self._found.append(event)
        found, self._found = self._found, []
        return sorted(found, key=lambda event: event.time)

    def _commits(self) -> Iterator[Event]:
        head = self._log.head()
        if head is None:
            return
        if self._next is None:
            self._next = self._first = max(0, head.seq - self._count + 1)
        commits = [self._log.ancestor(head, seq) for seq in range(self._next, head.seq + 1)]
        yield from [self._commit(commit) for commit in commits]
        self._next = head.seq + 1

    def _commit(self, commit: Commit) -> Event:
        fields: dict[str, Value] = {
            "seq": commit.seq,
            "updates": commit.updates,
            "kind": commit.kind,
            "step": commit.step,
            "epoch": commit.epoch,
        }
        sizes = {"bytes": commit.stored_bytes, "state_bytes": commit.state_bytes, "changed": commit.changed}
        base = None if commit.base is None else commit.base.seq
        return Event("commit-seen", {**fields, **sizes, "base": base, "void": int(self._log.is_void(commit))}, commit.time / 1000)

    def _made_shortcuts(self) -> Iterator[Event]:
        if not self._next:
            return
        after = self._first - 1 if self._first else None
        anchors, skips = self._log.shortcuts(after, self._next - 1)
        now: set[tuple[int, int | None]] = {*((seq, None) for seq in anchors), *skips}
        for seq, base in sorted(now - self._shortcuts, key=lambda each: (each[0], -1 if each[1] is None else each[1])):
            yield Event("anchor-seen", {"seq": seq}) if base is None else Event("skip-seen", {"seq": seq, "base": base})
        self._shortcuts = now

    def _collections(self) -> Iterator[Event]:
        floor = self._log.floor()
        if floor > self._floor:
            self._floor = floor
            yield Event("collection-seen", {"floor": floor})

    def _reports(self) -> Iterator[Event]:
        for report in read_reports(self._log.store, self._log.run):
            state = (report.state, report.seq, report.error)
            if self._engines.get(report.reader) != state:
                self._engines[report.reader] = state
                fields = {"reader": report.reader, "state": report.state, "seq": report.seq, "reason": report.error}
                yield Event("engine-seen", fields, report.time)

    def _fleet_changes(self) -> Iterator[Event]:
        fleet = self._fleet.fleet(_ROUNDS)
        for member in fleet.members:
            yield from self._member(member)
        for one in reversed(fleet.rounds):
            yield from self._round(one)
        self._rounds = {one.record.round: one.acknowledged for one in fleet.rounds}

    def _member(self, member: SeenMember) -> Iterator[Event]:
        """Tell of a member that is new, has another version, or leaves. Its other heartbeats are not told."""
        beat = member.beat
        state = (beat.session, beat.state, beat.seq, beat.reason)
        if self._members.get(beat.member) != state:
            self._members[beat.member] = state
            fields = {"member": beat.member, "state": beat.state, "seq": beat.seq, "step": beat.step, "lag": beat.lag}
            yield Event("member-seen", {**fields, "tokens": beat.tokens, "reason": beat.reason}, member.modified)

    def _round(self, seen: SeenRound) -> Iterator[Event]:
        record = seen.record
        names = {"round": record.round, "step": record.for_step}
        if record.round not in self._rounds:
            yield Event("round-seen", {**names, "tasks": record.tasks, "epoch": record.epoch}, record.time / 1000)
        if seen.acknowledged and not self._rounds.get(record.round):
            yield Event("batch-seen", {**names, "results": seen.delivered})

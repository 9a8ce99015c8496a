"""Reads a fleet for the page: heartbeats, rounds, leases, results and acknowledgements.

A look reads only what has changed, and at most a fixed number of records, so a large fleet is read in several looks. Facts about tasks
are kept after the trainer has swept their objects, up to a limit.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from blake3 import blake3

from ..errors import CorruptRecord, LimitExceeded, ObjectMissing, UnsupportedVersion
from ..fleet.fleet_keyring import FleetKeyring
from ..format.records.fleet_files import Accepted
from ..format.records.fleet_parts import AttemptId
from ..format.records.member_records import Heartbeat, Lease
from ..format.records.trainer_records import MAX_BOARD_BYTES, BatchRecord, Board, Rejection, Round
from ..store import fleet_keys
from ..store.base import ObjectInfo, Store
from .fetch_many import RecordFetcher
from .member_history import MemberHistory, Updates, newest_points
from .plain_values import short

MOST_MEMBERS = 1024
MOST_BARS = 2000
"""Tasks that are kept for the timeline."""
MOST_ROUNDS = 200
_HEARTBEATS_A_LOOK = 96
_LEASES_A_LOOK = 192
_BATCHES_A_LOOK = 8
_MOST_LISTED = 10_000
_OPEN_ROUNDS = 8
_ACCEPTED_BYTES = 1 << 20


@dataclass(slots=True)
class SeenMember:
    """A member's last heartbeat that was read, and what was seen of it over time."""

    beat: Heartbeat
    modified: float
    history: MemberHistory = field(default_factory=MemberHistory)


@dataclass(slots=True)
class Bar:
    """One attempt at a task. Times are those of the store's clock."""

    member: str
    start: float
    seq: int
    end: float | None = None
    outcome: str = "working"


@dataclass(slots=True)
class SeenRound:
    """A round and its progress."""

    record: Round
    leased: int = 0
    delivered: int = 0
    step_done: bool = False


class FleetScan:
    """Keeps the members, rounds and tasks of a fleet.

    Parameters
    ----------
    store
        The store. The caller closes it.
    run
        The run's id.
    keyring
        Checks the signatures of the trainer's records.
    """

    def __init__(self, store: Store, run: str, keyring: FleetKeyring) -> None:
        self._fetch = RecordFetcher(store)
        self._run = run
        self._keyring = keyring
        self.board: Board | None = None
        self.board_modified: float | None = None
        self._board_tag: str | None = None
        self.members: dict[str, SeenMember] = {}
        self.listed_members = 0
        self.rounds: OrderedDict[int, SeenRound] = OrderedDict()
        self.bars: OrderedDict[AttemptId, Bar] = OrderedDict()
        self._unread: dict[str, ObjectInfo] = {}
        self._read_batches: set[fleet_keys.BatchKey] = set()
        self.rejections: deque[Rejection] = deque(maxlen=50)
        self._read_rejections: OrderedDict[str, None] = OrderedDict()

    def look(self) -> None:
        """Read what has changed. Raises errors of the store, after which it can be called again."""
        self._read_board()
        self._read_members()
        self._read_rounds()
        for number in list(self.rounds)[-_OPEN_ROUNDS:]:
            if not self.rounds[number].step_done:
                self._read_tasks(number)
        self._read_acknowledged()
        self._read_rejected()
        while len(self.bars) > MOST_BARS:
            self.bars.popitem(last=False)
        while len(self.rounds) > MOST_ROUNDS:
            self.rounds.popitem(last=False)

    def close(self) -> None:
        """Stop the threads."""
        self._fetch.close()

    def is_silent(self, member: SeenMember, now: float) -> bool:
        """Return whether a member wrote nothing for longer than a lease lasts. Only for display."""
        return now - member.modified > (60 if self.board is None else self.board.lease_seconds)

    def plain_members(self, now: float) -> dict[str, Any]:
        """Return the members as plain values, without their history."""
        return {
            "listed": self.listed_members,
            "shown": [_plain_member(one, silent=self.is_silent(one, now)) for _, one in sorted(self.members.items())],
        }

    def count_updates(self, between: Callable[[int, int], Updates], head: int) -> None:
        """Count what the members took since the look before. The parameters are those of `MemberHistory.count`."""
        for one in self.members.values():
            one.history.count(one.beat.seq, between, head)

    def plain_history(self, published: list[tuple[float, int]]) -> dict[str, dict[str, list[Any]]]:
        """Return the lag and the pauses of each member over time.

        The lag is when it changed, and to how many versions: as leases tell, and then as heartbeats were seen to tell.

        Parameters
        ----------
        published
            Time and seq of the newest versions, by rising seq.
        """
        earlier = self._lags_of_leases(published)
        found: dict[str, dict[str, list[Any]]] = {}
        for name, one in sorted(self.members.items()):
            lags, pauses = one.history.lags, list(one.history.pauses)
            first = lags[0][0] if lags else math.inf
            before = [point for point in sorted(earlier.get(name, ())) if point[0] < first]
            points = [*before, *lags]
            changes = [point for index, point in enumerate(points) if index == 0 or points[index - 1][1] != point[1]]
            found[name] = {"lag": newest_points(changes, len(self.members)), "pause": newest_points(pauses, len(self.members))}
        return found

    def _lags_of_leases(self, published: list[tuple[float, int]]) -> dict[str, list[tuple[float, int]]]:
        """Return how many versions each member was behind when it took a lease. Leases of older versions than the first tell nothing."""
        seqs = [seq for _, seq in published]
        times = list(itertools.accumulate((time for time, _ in published), max))
        found: dict[str, list[tuple[float, int]]] = {}
        for bar in self.bars.values():
            if seqs and bar.seq >= seqs[0]:
                lag = max(0, bisect.bisect_right(times, bar.start) - bisect.bisect_right(seqs, bar.seq))
                found.setdefault(bar.member, []).append((round(bar.start, 3), lag))
        return found

    def plain_tasks(self, steps: dict[int, int | None]) -> dict[str, Any]:
        """Return rounds and attempts as plain values.

        Parameters
        ----------
        steps
            The training steps of versions, by seq.
        """
        bars = []
        for key, bar in self.bars.items():
            seen = self.rounds.get(key.round)
            step = steps.get(bar.seq)
            stale = None if seen is None or step is None else max(0, seen.record.for_step - 1 - step)
            bars.append([bar.member, *key, round(bar.start, 3), None if bar.end is None else round(bar.end, 3), bar.outcome, stale])
        rounds = [
            {
                "round": number,
                "step": one.record.for_step,
                "tasks": one.record.tasks,
                "leased": one.leased,
                "delivered": one.delivered,
                "acknowledged": one.step_done,
                "allowed": one.record.for_step - 1 - one.record.oldest_step,
            }
            for number, one in self.rounds.items()
        ]
        return {"rounds": rounds, "bars": bars}

    def _read_board(self) -> None:
        try:
            found = self._fetch.store.get_if_changed(fleet_keys.BOARD, limit=MAX_BOARD_BYTES, tag=self._board_tag)
            if found is None:
                return
            data, self._board_tag = found
            board = Board.parse(data)
            if board.id == self._run and self._keyring.trusts(board):
                self.board = board
                self.board_modified = self._fetch.store.head(fleet_keys.BOARD).modified.timestamp()
        except (ObjectMissing, LimitExceeded, CorruptRecord, UnsupportedVersion):
            return

    def _read_members(self) -> None:
        listed = self._fetch.listed(fleet_keys.MEMBERS, _MOST_LISTED)
        named = {member: info for info in listed if (member := fleet_keys.parse_member_key(info.key)) is not None}
        self.listed_members = len(named)
        shown = dict(list(named.items())[:MOST_MEMBERS])
        self.members = {name: one for name, one in self.members.items() if name in shown}
        self._unread = {name: info for name, info in self._unread.items() if name in shown}
        for name, info in shown.items():
            known = self.members.get(name)
            if known is None or known.modified != info.modified.timestamp():
                self._unread[name] = info  # in its old place if it waits already, so that every member has its turn
        most = MOST_MEMBERS if not self.members else _HEARTBEATS_A_LOOK
        turn = dict(list(self._unread.items())[:most])
        beats = self._fetch.read([info.key for info in turn.values()], Heartbeat.parse)
        for name, info in turn.items():
            del self._unread[name]
            beat = beats.get(info.key)
            if beat is not None and beat.id == self._run and beat.member == name:
                self._note_beat(beat, info.modified.timestamp())

    def _note_beat(self, beat: Heartbeat, modified: float) -> None:
        known = self.members.get(beat.member)
        if known is None:
            known = self.members[beat.member] = SeenMember(beat, modified)
        known.beat, known.modified = beat, modified
        known.history.note(beat, modified)

    def _read_rounds(self) -> None:
        newest = next(reversed(self.rounds), None)
        after = None if newest is None else fleet_keys.round_key(newest)
        listed = self._fetch.listed(fleet_keys.ROUNDS, _MOST_LISTED, after=after)
        numbers = [number for info in listed if (number := fleet_keys.parse_round_key(info.key)) is not None][-MOST_ROUNDS:]
        found = self._fetch.read([fleet_keys.round_key(number) for number in numbers], Round.parse)
        for number in numbers:
            record = found.get(fleet_keys.round_key(number))
            if record is not None and record.id == self._run and record.round == number and self._keyring.trusts(record):
                self.rounds[number] = SeenRound(record)

    def _read_tasks(self, number: int) -> None:
        seen = self.rounds[number]
        leases = self._fetch.listed(fleet_keys.keys_of_round(fleet_keys.LEASES, number), _MOST_LISTED)
        keyed = {key: info for info in leases if (key := fleet_keys.parse_lease_key(info.key)) is not None}
        unread = [key for key in keyed if key not in self.bars][:_LEASES_A_LOOK]
        found = self._fetch.read([keyed[key].key for key in unread], Lease.parse)
        for key in unread:
            lease = found.get(keyed[key].key)
            if lease is not None and lease.id == self._run and (lease.round, lease.task, lease.attempt) == key:
                self.bars[key] = Bar(lease.member, keyed[key].modified.timestamp(), lease.seq)
        results = self._fetch.listed(fleet_keys.keys_of_round(fleet_keys.ROLLOUTS, number), _MOST_LISTED)
        delivered = set()
        for info in results:
            result = fleet_keys.parse_rollout_key(info.key)
            if result is None:
                continue
            delivered.add(result.task)
            bar = self.bars.get(result.attempt_id)
            if bar is not None and bar.end is None:
                bar.end, bar.outcome = info.modified.timestamp(), "uploaded"
        tasks = range(seen.record.tasks)
        seen.leased = len({key.task for key in keyed if key.task in tasks})
        seen.delivered = len({task for task in delivered if task in tasks})

    def _read_acknowledged(self) -> None:
        listed = self._fetch.listed(fleet_keys.BATCHES, _MOST_LISTED)
        found = [key for info in listed if (key := fleet_keys.parse_batch_key(info.key)) is not None]
        unread = sorted((key for key in found if key not in self._read_batches), key=lambda key: key.step)[-_BATCHES_A_LOOK:]
        records = self._fetch.read([fleet_keys.batch_key(*key) for key in unread], BatchRecord.parse)
        self._read_batches = set(found) & self._read_batches | set(unread)
        for key in unread:
            record = records.get(fleet_keys.batch_key(*key))
            if record is not None and record.id == self._run and (record.epoch, record.step) == tuple(key) and self._keyring.trusts(record):
                self._note_acknowledged(record)

    def _note_acknowledged(self, record: BatchRecord) -> None:
        if record.round in self.rounds:
            if not self.rounds[record.round].step_done:
                self._read_tasks(record.round)  # once more: its last results may be newer than the look
            self.rounds[record.round].step_done = True
        accepted = self._accepted(record)
        winners = set() if accepted is None else {AttemptId(record.round, one.task, one.attempt) for one in accepted.results}
        for key, bar in self.bars.items():
            if key.round != record.round:
                continue
            if key in winners:
                bar.outcome = "accepted"
            elif bar.outcome == "uploaded":
                bar.outcome = "unused"
            elif bar.outcome == "working":
                bar.outcome, bar.end = "lost", record.time / 1000

    def _accepted(self, record: BatchRecord) -> Accepted | None:
        def parse(data: bytes) -> Accepted:
            if blake3(data).hexdigest() != record.accepted.blake3:
                raise CorruptRecord(f"{record.accepted.key} does not have the hash in its batch.")
            return Accepted.parse(data)

        return self._fetch.read([record.accepted.key], parse, limit=_ACCEPTED_BYTES).get(record.accepted.key)

    def _read_rejected(self) -> None:
        listed = self._fetch.listed(fleet_keys.REJECTED, _MOST_LISTED)
        names = [info.key for info in listed if fleet_keys.parse_rejected_key(info.key) is not None]
        unread = [key for key in names if key not in self._read_rejections][-_BATCHES_A_LOOK:]
        for key, record in self._fetch.read(unread, Rejection.parse).items():
            parsed = fleet_keys.parse_rejected_key(key)
            if record.id == self._run and self._keyring.trusts(record) and parsed is not None and parsed.step == record.step:
                self.rejections.append(record)
                for task, attempt, _ in record.results:
                    bar = self.bars.get(AttemptId(record.round, task, attempt))
                    if bar is not None:
                        bar.outcome = "rejected"
        self._read_rejections |= dict.fromkeys(unread)
        while len(self._read_rejections) > _MOST_LISTED:
            self._read_rejections.popitem(last=False)


def _plain_member(one: SeenMember, *, silent: bool) -> dict[str, Any]:
    beat, link = one.beat, one.beat.link
    return {
        "name": beat.member,
        "state": "silent" if silent and beat.state != "left" else beat.state,
        "seq": beat.seq,
        "step": beat.step,
        "lag": beat.lag,
        "tokens": beat.tokens,
        "rate": round(1000 * beat.tokens / beat.busy_ms, 1) if beat.busy_ms else None,
        "working": len(beat.working),
        "heard": round(one.modified, 3),
        "goodput": None if link is None else link.goodput,
        "latency_ms": None if link is None else link.latency_ms,
        "failures": 0 if link is None else link.failures,
        "behind_ms": beat.behind_ms,
        "engine": beat.engine,
        "update": None if beat.update is None else beat.update.plain(),
        "taken": asdict(one.history.taken),
        "reason": None if beat.reason is None else short(beat.reason, 300),
    }

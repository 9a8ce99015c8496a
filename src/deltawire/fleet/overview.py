"""A fleet as people see it: its members, rounds and results in the store. Nothing here writes.

Other processes wrote all of this, so records are parsed as strictly as the trainer parses them, and malformed ones are skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from blake3 import blake3

from ..errors import CorruptRollouts, LimitExceeded, ObjectMissing
from ..format.records.canonical import MAX_RECORD_BYTES
from ..format.records.member_records import Heartbeat
from ..format.records.trainer_records import MAX_BOARD_BYTES, Board, Round
from ..format.rollouts import RolloutLimits, Rollouts
from ..store import fleet_keys
from ..store.base import ObjectInfo, Store
from ..store.fleet_keys import RolloutKey
from ..store.requests import Get, Head, List
from .fleet_keyring import FleetKeyring
from .steps.record_steps import parsed_answer, read_acknowledged, read_rejections, read_rounds
from .steps.requests import MOST_TOGETHER, Steps, Together, run_steps

_T = TypeVar("_T")
_EVERY_EPOCH = 10**10
ResultState: TypeAlias = Literal["uploaded", "accepted", "rejected"]


@dataclass(frozen=True, slots=True)
class SeenMember:
    """A member's last heartbeat.

    Parameters
    ----------
    beat
        The heartbeat.
    modified
        When it was written, in seconds since 1970 by the store's clock.
    """

    beat: Heartbeat
    modified: float


@dataclass(frozen=True, slots=True)
class SeenRound:
    """A round and its progress.

    Parameters
    ----------
    record
        The round.
    leased
        How many of its tasks have a lease.
    delivered
        How many of its tasks have a result, valid or not.
    acknowledged
        Whether a trainer acknowledged it.
    """

    record: Round
    leased: int
    delivered: int
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class SeenFleet:
    """A fleet at one moment.

    Parameters
    ----------
    board
        The board; None if there is none that can be read and trusted.
    board_modified
        When the board was written, in seconds since 1970 by the store's clock.
    members
        The members that have a heartbeat.
    rounds
        The rounds, the newest first.
    """

    board: Board | None
    board_modified: float | None
    members: tuple[SeenMember, ...]
    rounds: tuple[SeenRound, ...]


@dataclass(frozen=True, slots=True)
class SeenResult:
    """A result in the store.

    Parameters
    ----------
    key
        Its round, task, attempt and hash.
    round
        The record of its round.
    modified
        When it was written, in seconds since 1970 by the store's clock.
    state
        "accepted" if a trainer acknowledged it, "rejected" if a trainer left it out after that, and otherwise "uploaded".
    why
        Why it was rejected.
    """

    key: RolloutKey
    round: Round
    modified: float
    state: ResultState
    why: str | None = None


class FleetReader:
    """Reads the fleet of a run.

    Parameters
    ----------
    store
        The store. The caller closes it.
    run
        The run's id.
    trusted_keys
        Public keys. With keys, only boards, rounds and batches count that one of them signed.
    """

    def __init__(self, store: Store, run: str, *, trusted_keys: Collection[str] = ()) -> None:
        self._store = store
        self._run = run
        self._keyring = FleetKeyring(trusted_keys=trusted_keys)
        self._pool = ThreadPoolExecutor(MOST_TOGETHER, thread_name_prefix="deltawire-overview")

    def fleet(self, rounds: int = 4) -> SeenFleet:
        """Return the board, the members and the newest rounds.

        Parameters
        ----------
        rounds
            How many rounds to return at most.
        """
        return self._ask(self._fleet(rounds))

    def results(self, *, step: int | None = None) -> Iterator[SeenResult]:
        """Yield the results in the store, the newest rounds first.

        Parameters
        ----------
        step
            Yield only results for this training step.
        """
        found = self._ask(read_rounds(self._run, self._keyring))
        acknowledged = self._ask(read_acknowledged(self._run, _EVERY_EPOCH, -1, self._keyring))
        rejected = self._ask(read_rejections(self._run, _EVERY_EPOCH, -1, self._keyring))
        accepted = {
            RolloutKey(each.record.round, one.task, one.attempt, one.blake3)
            for each in acknowledged.values()
            for one in each.accepted.results
        }
        for number, record in sorted(found.rounds.items(), reverse=True):
            if step is not None and record.for_step != step:
                continue
            listed: list[ObjectInfo] = self._ask(_list(fleet_keys.keys_of_round(fleet_keys.ROLLOUTS, number)))
            keyed = [(info.modified.timestamp(), key) for info in listed if (key := fleet_keys.parse_rollout_key(info.key)) is not None]
            for modified, key in sorted(keyed, reverse=True):
                state: ResultState = "rejected" if key in rejected else "accepted" if key in accepted else "uploaded"
                yield SeenResult(key, record, modified, state, rejected.get(key))

    def read(self, result: SeenResult) -> Rollouts | None:
        """Return the completions of a result; None if it was deleted, is damaged, or does not belong to its key or run.

        Parameters
        ----------
        result
            A result that `results` yielded.
        """
        limits = RolloutLimits()
        try:
            data = self._store.get(fleet_keys.rollout_key(result.key), limit=limits.file_bytes)
            rollouts = Rollouts.parse(data, limits) if blake3(data).hexdigest() == result.key.blake3 else None
        except (ObjectMissing, LimitExceeded, CorruptRollouts):
            return None
        if rollouts is None or rollouts.run != self._run:
            return None
        return rollouts if (rollouts.round, rollouts.task, rollouts.attempt) == result.key[:3] else None

    def close(self) -> None:
        """Stop the threads. The store stays open."""
        self._pool.shutdown()

    def __enter__(self) -> FleetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, steps: Steps[_T]) -> _T:
        return run_steps(steps, self._store, pool=self._pool)

    def _fleet(self, most: int) -> Steps[SeenFleet]:
        board, modified = yield from self._board()
        members = yield from self._members()
        found = yield from read_rounds(self._run, self._keyring)
        newest = [found.rounds[number] for number in sorted(found.rounds, reverse=True)[:most]]
        after = min((record.for_step for record in newest), default=0) - 1
        acknowledged = yield from read_acknowledged(self._run, _EVERY_EPOCH, after, self._keyring)
        closed = {one.record.round for one in acknowledged.values()}
        rounds = []
        for record in newest:
            rounds.append((yield from _progress(record, acknowledged=record.round in closed)))
        return SeenFleet(board, modified, tuple(members), tuple(rounds))

    def _board(self) -> Steps[tuple[Board | None, float | None]]:
        data, info = yield Together((Get(fleet_keys.BOARD, MAX_BOARD_BYTES), Head(fleet_keys.BOARD)))
        board = parsed_answer(Board.parse, data)
        if board is None or board.id != self._run or not self._keyring.trusts(board) or not isinstance(info, ObjectInfo):
            return None, None
        return board, info.modified.timestamp()

    def _members(self) -> Steps[list[SeenMember]]:
        listed: list[ObjectInfo] = yield List(fleet_keys.MEMBERS)
        named = [(member, info) for info in listed if (member := fleet_keys.parse_member_key(info.key)) is not None]
        members = []
        for start in range(0, len(named), MOST_TOGETHER):
            group = named[start : start + MOST_TOGETHER]
            answers = yield Together(tuple(Get(info.key, MAX_RECORD_BYTES) for _, info in group))
            for (member, info), answer in zip(group, answers, strict=True):
                beat = parsed_answer(Heartbeat.parse, answer)
                if beat is not None and beat.id == self._run and beat.member == member:
                    members.append(SeenMember(beat, info.modified.timestamp()))
        return members


def _list(prefix: str) -> Steps[list[ObjectInfo]]:
    listed: list[ObjectInfo] = yield List(prefix)
    return listed


def _progress(record: Round, *, acknowledged: bool) -> Steps[SeenRound]:
    leases = yield from _list(fleet_keys.keys_of_round(fleet_keys.LEASES, record.round))
    results = yield from _list(fleet_keys.keys_of_round(fleet_keys.ROLLOUTS, record.round))
    leased = {key.task for key in map(fleet_keys.parse_lease_key, (info.key for info in leases)) if key is not None}
    delivered = {key.task for key in map(fleet_keys.parse_rollout_key, (info.key for info in results)) if key is not None}
    tasks = set(range(record.tasks))
    return SeenRound(record, len(leased & tasks), len(delivered & tasks), acknowledged)

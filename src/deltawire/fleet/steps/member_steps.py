"""The work of a member of a fleet, as steps (docs/protocol.md §10): read the board, claim a task, generate, upload, and again.

One `MemberState` may have several `member_steps` at the same time, one for each task that the engine can work on at once. It has one
`heartbeat_steps`, which must never wait for them.
"""

from __future__ import annotations

from blake3 import blake3

from ...errors import (
    CorruptRecord,
    CorruptRollouts,
    DataDamaged,
    DeltawireError,
    EngineUnavailable,
    LimitExceeded,
    ObjectMissing,
    OutcomeUnknown,
    StoreError,
    UnsupportedVersion,
)
from ...events import emit
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.fleet_files import MAX_TASKS_BYTES, Row, Tasks
from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Lease
from ...format.records.trainer_records import MAX_BOARD_BYTES, Board, Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys, keys
from ...store.create_rule import create_steps
from ...store.fleet_keys import FIRST_FREE_ATTEMPT, RolloutKey
from ...store.requests import Get, Put, Sleep
from ..rules.staleness import KnownVersion
from .member_state import MemberState, try_to_write_heartbeat
from .requests import Generate, Steps, Sync

_KEPT_ROUNDS = 4
_MOST_TRIED = 4096
"""Largest number of attempts that a member remembers."""
_LAST_TRIES = 3
"""How often a member that is leaving tries to upload its result."""


class TaskFailed(EngineUnavailable):
    """A task failed, and the member has already reported why. It goes on with other work after a pause."""


def member_steps(me: MemberState) -> Steps[None]:
    """Work until the trainer stops the fleet or `me.leaving` is set. Retryable errors are tried again after a pause; others are raised."""
    failures = 0
    yield from try_to_write_heartbeat(me)
    while not me.leaving:
        try:
            worked = yield from _look_and_work(me)
        except DeltawireError as error:
            if not error.retryable:
                raise
            failures += 1
            if not isinstance(error, TaskFailed):
                emit(me.on_event, "member-retrying", member=me.member, failures=failures, error=str(error))
            yield Sleep(me.pause(failures))
            continue
        failures = 0
        if not worked and not me.leaving:
            yield Sleep(me.poll_seconds)


def _look_and_work(me: MemberState) -> Steps[bool]:
    """Look at the board, and do at most one task. Return whether there was a task."""
    board = yield from _read_board(me)
    if board is None:
        yield from _sync(me, 0)  # so that the first board can make us offers
        return False
    me.lease_seconds = board.lease_seconds
    if board.stop and (yield from _is_latest(board)):
        emit(me.on_event, "run-over", member=me.member, step=board.step)
        me.leaving = True
        return False
    yield from _sync(me, board.step)
    for attempt in board.offers.get(me.member, ()):
        if attempt in me.tried or attempt in me.working:
            continue
        task = yield from _read_task(me, attempt)
        if task is None:
            continue
        record, rows = task
        policy = yield from _sync(me, record.oldest_step)
        if policy is None or not record.oldest_step <= policy.step < record.for_step:
            continue  # the trainer would refuse the result
        if attempt in me.tried or attempt in me.working:
            continue  # other steps of this member took the attempt meanwhile
        lease = yield from _claim(me, attempt, policy)
        if lease is not None:
            yield from _work(me, attempt, record, lease, rows)
            return True
    return False


def _read_board(me: MemberState) -> Steps[Board | None]:
    """Return the board; None if there is none that this member may follow."""
    try:
        board = Board.parse((yield Get(fleet_keys.BOARD, MAX_BOARD_BYTES)))
    except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
        return None  # no trainer has written one yet, or another process wrote something else there
    if board.id != me.run:
        return None
    if not me.keyring.trusts(board):
        if not me.distrusted:
            emit(me.on_event, "board-refused", member=me.member, reason="no trusted key has signed the board")
        me.distrusted = True
        return None
    me.distrusted = False
    if me.keyring.trusted:  # an older board may be a copy that an attacker kept; unsigned boards could claim any number
        if (board.epoch, board.number) < me.newest_board:
            return None
        me.newest_board = board.epoch, board.number
    return board


def _is_latest(board: Board) -> Steps[bool]:
    """Return whether no later trainer has taken over the run. If one has, this board no longer decides whether the run is over."""
    try:
        yield Get(keys.epoch_key(board.epoch + 1), MAX_RECORD_BYTES)
    except ObjectMissing:
        return True
    except LimitExceeded:
        pass
    return False


def _sync(me: MemberState, step: int) -> Steps[KnownVersion | None]:
    """Ask the engine for the version of `step` or a later one. Return the version that it has then."""
    before = me.policy
    policy: KnownVersion | None = yield Sync(step)
    me.policy = policy
    if policy is not None and (before is None or before.seq != policy.seq):
        yield from try_to_write_heartbeat(me)  # offers depend on the version, and the next heartbeat may be far away
    return policy


def _read_task(me: MemberState, attempt: AttemptId) -> Steps[tuple[Round, tuple[Row, ...]] | None]:
    """Return the round of an attempt, and the rows of its task; None if the board is wrong. The last rounds are kept in memory."""
    number, task, _ = attempt
    if number not in me.rounds:
        try:
            record = Round.parse((yield Get(fleet_keys.round_key(number), MAX_RECORD_BYTES)))
            data: bytes = yield Get(record.rows.key, min(record.rows.size, MAX_TASKS_BYTES))
            if blake3(data).hexdigest() != record.rows.blake3:
                raise DataDamaged(f"the rows of round {number} are not what its record says.")
            rows = Tasks.parse(data).rows
        except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
            return None
        if record.id != me.run or record.round != number or len(rows) != record.tasks or not me.keyring.trusts(record):
            return None
        me.rounds[number] = (record, rows)
        while len(me.rounds) > _KEPT_ROUNDS:
            me.rounds.popitem(last=False)
    record, every = me.rounds[number]
    return (record, every[task]) if task < len(every) else None


def _claim(me: MemberState, attempt: AttemptId, policy: KnownVersion) -> Steps[Lease | None]:
    """Create the lease. Return it, or None if another member was faster.

    After `OutcomeUnknown`, the same bytes are tried again when the attempt is offered again.
    """
    lease = me.doubtful.get(attempt) or Lease(me.run, *attempt, me.member, me.draw_nonce(), policy.seq, me.clock())
    me.working.add(attempt)
    if attempt.attempt >= FIRST_FREE_ATTEMPT:  # it needs no lease; the heartbeat tells the trainer that we work on it
        _remember(me, attempt)
        yield from try_to_write_heartbeat(me)
        return lease
    me.doubtful[attempt] = lease
    is_ours = False
    try:
        data = lease.to_bytes()
        is_ours = (yield from create_steps(fleet_keys.lease_key(attempt), data)) == data
    except OutcomeUnknown:
        raise
    except BaseException:
        del me.doubtful[attempt]
        raise
    else:
        del me.doubtful[attempt]
    finally:
        if not is_ours:
            me.working.discard(attempt)
    _remember(me, attempt)
    return lease if is_ours else None


def _work(me: MemberState, attempt: AttemptId, record: Round, lease: Lease, rows: tuple[Row, ...]) -> Steps[None]:
    """Generate and upload. If anything fails, the member drops the lease: it expires, and the task goes to another member."""
    started = me.clock()
    try:
        rollouts: Rollouts | None = yield Generate(record, lease, rows)
        if rollouts is None:
            me.leaving = True
            return
        try:
            data = rollouts.to_bytes()
        except CorruptRollouts as error:
            emit(me.on_event, "rollout-unusable", member=me.member, error=str(error))
            return
        key = fleet_keys.rollout_key(RolloutKey(*attempt, blake3(data).hexdigest()))
        yield from _upload(me, key, data)
        me.tokens += rollouts.tokens
        me.busy_ms += max(0, me.clock() - started)
        emit(me.on_event, "rollout-uploaded", member=me.member, round=attempt.round, task=attempt.task, tokens=rollouts.tokens)
    finally:
        me.working.discard(attempt)


def _upload(me: MemberState, key: str, data: bytes) -> Steps[None]:
    """Upload the result, however long the store is unavailable. The key has the hash of the bytes, so repeating does no harm."""
    failures = 0
    while True:
        try:
            yield Put(key, data)
            return
        except StoreError as error:
            failures += 1
            if not error.retryable or (me.leaving and failures >= _LAST_TRIES):
                raise
            emit(me.on_event, "member-retrying", member=me.member, failures=failures, error=str(error))
        yield Sleep(me.pause(failures))


def _remember(me: MemberState, attempt: AttemptId) -> None:
    """Do not try this attempt again. Numbers of free attempts are used again, so only the last one of each task is remembered."""
    if attempt.attempt >= FIRST_FREE_ATTEMPT:
        for other in [each for each in me.tried if each[:2] == attempt[:2] and each.attempt >= FIRST_FREE_ATTEMPT]:
            del me.tried[other]
    me.tried[attempt] = None
    while len(me.tried) > _MOST_TRIED:
        me.tried.popitem(last=False)

"""A member claims tasks, as steps (docs/protocol.md §10): read the board, read the round, create the lease, and queue the task.

A member leases the next task while the engine works on the present one. `work_steps` begin the queued tasks, and `upload_steps` deliver
the results. All of them share one `MemberState`.
"""

from __future__ import annotations

from blake3 import blake3

from ...errors import (
    CorruptRecord,
    DataDamaged,
    DeltawireError,
    LimitExceeded,
    ObjectMissing,
    OutcomeUnknown,
    UnsupportedVersion,
)
from ...events import emit
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.fleet_files import MAX_TASKS_BYTES, Row, Tasks
from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Lease
from ...format.records.trainer_records import MAX_BOARD_BYTES, Board, Round
from ...store import fleet_keys, keys
from ...store.create_rule import create_steps
from ...store.fleet_keys import FIRST_FREE_ATTEMPT
from ...store.requests import Get, Sleep
from ..rules.staleness import KnownVersion, may_work
from .member_state import Claim, MemberState, sync_steps, try_to_write_heartbeat
from .requests import Steps, Wait, Watch

_KEPT_ROUNDS = 4
_MOST_DOUBLINGS = 4
_MOST_TRIED = 4096
"""Largest number of attempts that a member remembers."""


def claim_steps(me: MemberState) -> Steps[None]:
    """Claim tasks until the trainer stops the fleet or the member leaves. Run these steps once for each member.

    Retryable errors are tried again after a pause; others are raised.
    """
    failures = looks = 0
    yield from try_to_write_heartbeat(me)
    while not me.leaving:
        seen = me.changed.count
        if not me.has_room:
            yield Wait(me.changed, seen, me.longest_pause)
            continue
        if (spare := me.seconds_to_spare) > 0:
            yield Wait(me.changed, seen, spare)
            continue
        if looks and me.is_busy:  # the next task is not urgent, so the member looks less and less often until this changes
            yield Wait(me.changed, seen, me.poll_seconds * 2.0 ** min(1 + looks, _MOST_DOUBLINGS))
        try:
            has_claimed = yield from _look_and_claim(me, me.poll_seconds if looks and not me.is_busy else 0.0)
        except DeltawireError as error:
            if not error.retryable:
                raise
            failures += 1
            emit(me.on_event, "member-retrying", member=me.member, failures=failures, error=str(error))
            yield Sleep(me.pause(failures))
            looks = 0
            continue
        failures = 0
        looks = 0 if has_claimed else looks + 1
        if me.board is None and not me.leaving:
            yield Sleep(me.poll_seconds)
            looks = 0


def _look_and_claim(me: MemberState, wait: float) -> Steps[bool]:
    """Look at the board, and claim what it offers, as far as there is room. Return whether the member has claimed anything.

    Wait this many seconds for another board than the last one.
    """
    board = me.board = yield from _read_board(me, wait)
    if board is None:
        yield from sync_steps(me, 0)  # so that the first board can make us offers
        return False
    me.lease_seconds = board.lease_seconds
    if board.stop and (yield from _is_latest(board)):
        emit(me.on_event, "run-over", member=me.member, step=board.step)
        me.leave()
        return False
    yield from sync_steps(me, 0)
    has_claimed = False
    for attempt in board.offers.get(me.member, ()):
        if me.leaving or not me.has_room:
            break
        if attempt in me.tried or attempt in me.working:
            continue
        task = yield from _read_task(me, attempt)
        if task is None:
            continue
        record, rows = task
        policy = yield from sync_steps(me, record.oldest_step)
        if policy is None or not may_work(policy, record):
            continue  # the trainer would refuse the result
        lease = yield from _claim(me, attempt, policy)
        if lease is not None:
            me.queue.append(Claim(attempt, record, lease, rows))
            me.changed.give()
            has_claimed = True
    return has_claimed


def _read_board(me: MemberState, wait: float) -> Steps[Board | None]:
    """Return the board; None if there is none that this member may follow. Wait this many seconds for a new one."""
    tag, me.board_tag = me.board_tag, None
    try:
        found: tuple[bytes, str] | None = yield Watch(fleet_keys.BOARD, MAX_BOARD_BYTES, tag, wait)
        if found is None:
            me.board_tag = tag
            return me.board
        board = Board.parse(found[0])
        me.board_tag = found[1]
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


def _remember(me: MemberState, attempt: AttemptId) -> None:
    """Do not try this attempt again. Numbers of free attempts are used again, so only the last one of each task is remembered."""
    if attempt.attempt >= FIRST_FREE_ATTEMPT:
        for other in [each for each in me.tried if each[:2] == attempt[:2] and each.attempt >= FIRST_FREE_ATTEMPT]:
            del me.tried[other]
    me.tried[attempt] = None
    while len(me.tried) > _MOST_TRIED:
        me.tried.popitem(last=False)

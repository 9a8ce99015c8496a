"""What a member of a fleet does, as steps (docs/protocol.md §10): look at the board, claim a task, generate, upload, and again.

Several `member_steps` of one `MemberState` may run side by side, one for each task that the engine takes at once; and one
`heartbeat_steps`, which must not be held up by any of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

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
from ...events import OnEvent, emit
from ...format.records.chain_records import MAX_RECORD_BYTES
from ...format.records.fleet_files import MAX_TASKS_BYTES, Row, Tasks
from ...format.records.fleet_parts import MAX_WHY, AttemptId
from ...format.records.member_records import MAX_WORKING, Heartbeat, Lease
from ...format.records.trainer_records import MAX_BOARD_BYTES, Board, Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys, keys
from ...store.create_rule import create_steps
from ...store.fleet_keys import FIRST_FREE_ATTEMPT, RolloutKey
from ...store.requests import Get, Put, Sleep
from ..fleet_keyring import FleetKeyring
from ..rules.staleness import KnownVersion
from .requests import Generate, Steps, Sync

_KEPT_ROUNDS = 4
_LONGEST_SILENCE = 60.0
"""Seconds between two heartbeats, whatever the board says about leases."""
_LAST_TRIES = 3
"""So often a member that is leaving tries to get rid of what it has."""


class TaskFailed(EngineUnavailable):
    """A task could not be done, and the member has already reported why. It goes on with other work after a pause."""


@dataclass(slots=True)
class MemberState:
    """One member, shared by all of its steps. `draw` gives numbers in [0, 1), so that members that fail together do not come back together.

    Set `leaving` to have it leave when it has done what it is at; `policy` and `lag` may be set from outside as the engine moves on.
    """

    run: str
    member: str
    session: str
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    draw: Callable[[], float]
    poll_seconds: float = 1.0
    longest_pause: float = 30.0
    lease_seconds: float = 60.0
    on_event: OnEvent | None = None
    keyring: FleetKeyring = field(default_factory=FleetKeyring)
    newest_board: tuple[int, int] = (-1, -1)
    policy: KnownVersion | None = None
    lag: int = 0
    tokens: int = 0
    busy_ms: int = 0
    leaving: bool = False
    left: bool = False
    reason: str | None = None
    distrusted: bool = False
    working: set[AttemptId] = field(default_factory=set)
    told: tuple[str, tuple[AttemptId, ...]] | None = None
    tried: OrderedDict[AttemptId, None] = field(default_factory=OrderedDict)
    doubtful: dict[AttemptId, Lease] = field(default_factory=dict)
    rounds: OrderedDict[int, tuple[Round, tuple[tuple[Row, ...], ...]]] = field(default_factory=OrderedDict)

    def heartbeat(self) -> Heartbeat:
        """How it stands now."""
        state = "left" if self.left else "leaving" if self.leaving else "joining" if self.policy is None else "idle"
        return Heartbeat(
            id=self.run,
            member=self.member,
            session=self.session,
            state="working" if self.working and state in ("idle", "joining") else state,
            seq=None if self.policy is None else self.policy.seq,
            step=None if self.policy is None else self.policy.step,
            lag=self.lag,
            tokens=self.tokens,
            busy_ms=self.busy_ms,
            working=tuple(sorted(self.working)[:MAX_WORKING]),
            time=self.clock(),
            reason=self.reason,
        )

    @property
    def has_news(self) -> bool:
        """Whether its state, or what it works on, is not what its last heartbeat says."""
        beat = self.heartbeat()
        return self.told != (beat.state, beat.working)

    def leave_because(self, error: BaseException) -> None:
        """Have all later heartbeats name the error that it leaves because of."""
        self.reason = reason_text(error)

    def pause(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        return min(self.longest_pause, self.poll_seconds * 2.0 ** min(failures, 16)) * (1 + self.draw()) / 2


def reason_text(error: BaseException) -> str:
    """Say in one line why a member leaves, as heartbeats carry it."""
    words = " ".join(f"{type(error).__name__}: {error}".encode(errors="replace").decode().split())
    return words[:MAX_WHY]


def tell(me: MemberState) -> Steps[None]:
    """Write the heartbeat. Raises what the store does."""
    beat = me.heartbeat()
    yield Put(fleet_keys.member_key(me.member), beat.to_bytes(), durable=False)
    me.told = beat.state, beat.working


def heartbeat_steps(me: MemberState) -> Steps[None]:
    """Write the heartbeat four times in the life of a lease, until the member has left; losses of the store are waited out."""
    while not me.left:
        pause = min(me.lease_seconds / 4, _LONGEST_SILENCE)
        try:
            yield from tell(me)
        except StoreError as error:
            if not error.retryable:
                raise
            pause = min(pause, me.pause(1))
        yield Sleep(pause)


def member_steps(me: MemberState) -> Steps[None]:
    """Work until the trainer stops the fleet or `me.leaving` is set. Losses of store and engine are waited out, others raised."""
    failures = 0
    yield from _tell_if_possible(me)
    while not me.leaving:
        try:
            worked = yield from _turn(me)
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


def leave_steps(me: MemberState) -> Steps[None]:
    """Say goodbye, after all other steps have ended: whatever lease is still held goes to others at once."""
    me.leaving = me.left = True
    me.working.clear()
    yield from _tell_if_possible(me)


def _tell_if_possible(me: MemberState) -> Steps[None]:
    try:
        yield from tell(me)
    except StoreError as error:
        emit(me.on_event, "member-retrying", member=me.member, failures=0, error=str(error))


def _turn(me: MemberState) -> Steps[bool]:
    """One look at the board, and at most one task. Whether there was something to do."""
    board = yield from _board(me)
    if board is None:
        yield from _sync(me, 0)  # so that the first board can have offers for us
        return False
    me.lease_seconds = board.lease_seconds
    if board.stop and (yield from _is_last(board)):
        emit(me.on_event, "run-over", member=me.member, step=board.step)
        me.leaving = True
        return False
    yield from _sync(me, board.step)
    for place in board.offers.get(me.member, ()):
        if place in me.tried or place in me.working:
            continue
        task = yield from _task(me, place)
        if task is None:
            continue
        record, rows = task
        policy = yield from _sync(me, record.oldest_step)
        if policy is None or not record.oldest_step <= policy.step < record.for_step:
            continue  # what we made would not be accepted
        if place in me.tried or place in me.working:
            continue  # other steps of this member were faster, while we looked at the task
        lease = yield from _claim(me, place, policy)
        if lease is not None:
            yield from _work(me, place, record, lease, rows)
            return True
    return False


def _board(me: MemberState) -> Steps[Board | None]:
    try:
        board = Board.parse((yield Get(fleet_keys.BOARD, MAX_BOARD_BYTES)))
    except (ObjectMissing, CorruptRecord, UnsupportedVersion, LimitExceeded):
        return None  # nobody has written one yet, or somebody who should not
    if board.id != me.run:
        return None
    if not me.keyring.trusts(board):
        if not me.distrusted:
            emit(me.on_event, "board-refused", member=me.member, reason="no trusted key has signed the board")
        me.distrusted = True
        return None
    me.distrusted = False
    if me.keyring.trusted:  # an old board may be a copy that somebody kept; unsigned ones could claim any number
        if (board.epoch, board.number) < me.newest_board:
            return None
        me.newest_board = board.epoch, board.number
    return board


def _is_last(board: Board) -> Steps[bool]:
    """Returns whether no later trainer has taken the run over: then what this board says about the end of the run is old."""
    try:
        yield Get(keys.epoch_key(board.epoch + 1), MAX_RECORD_BYTES)
    except ObjectMissing:
        return True
    except LimitExceeded:
        pass
    return False


def _sync(me: MemberState, step: int) -> Steps[KnownVersion | None]:
    before = me.policy
    policy: KnownVersion | None = yield Sync(step)
    me.policy = policy
    if policy is not None and (before is None or before.seq != policy.seq):
        yield from _tell_if_possible(me)  # offers depend on it, and the next heartbeat may be far away
    return policy


def _task(me: MemberState, place: AttemptId) -> Steps[tuple[Round, tuple[Row, ...]] | None]:
    """The round that is offered, and the rows of the task; None if the board is wrong. Both are immutable, and kept."""
    number, task, _ = place
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


def _claim(me: MemberState, place: AttemptId, policy: KnownVersion) -> Steps[Lease | None]:
    """The lease, if it is ours; None if another was faster. After `OutcomeUnknown` the same bytes are tried when it is offered again."""
    lease = me.doubtful.get(place) or Lease(me.run, *place, me.member, me.draw_nonce(), policy.seq, me.clock())
    me.working.add(place)
    if place[2] >= FIRST_FREE_ATTEMPT:  # it needs no lease; the heartbeat tells the trainer that we are at it
        _remember(me, place)
        yield from _tell_if_possible(me)
        return lease
    me.doubtful[place] = lease
    ours = False
    try:
        data = lease.to_bytes()
        ours = (yield from create_steps(fleet_keys.lease_key(AttemptId(*place)), data)) == data
    except OutcomeUnknown:
        raise
    except BaseException:
        del me.doubtful[place]
        raise
    else:
        del me.doubtful[place]
    finally:
        if not ours:
            me.working.discard(place)
    _remember(me, place)
    return lease if ours else None


def _work(me: MemberState, place: AttemptId, record: Round, lease: Lease, rows: tuple[Row, ...]) -> Steps[None]:
    """Generate and upload. Whatever goes wrong, the lease is let go of: it then expires, and the task goes to another."""
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
        key = fleet_keys.rollout_key(RolloutKey(*place, blake3(data).hexdigest()))
        yield from _upload(me, key, data)
        me.tokens += rollouts.tokens
        me.busy_ms += max(0, me.clock() - started)
        emit(me.on_event, "rollout-uploaded", member=me.member, round=place[0], task=place[1], tokens=rollouts.tokens)
    finally:
        me.working.discard(place)


def _upload(me: MemberState, key: str, data: bytes) -> Steps[None]:
    """Put the result, however long the store is away: it may still be wanted. The name is the content's, so repeating does no harm."""
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


def _remember(me: MemberState, place: AttemptId) -> None:
    """Do not try this place again. Numbers of free attempts come round again, so only the last one of each task is remembered."""
    if place[2] >= FIRST_FREE_ATTEMPT:
        for other in [each for each in me.tried if each[:2] == place[:2] and each[2] >= FIRST_FREE_ATTEMPT]:
            del me.tried[other]
    me.tried[place] = None
    while len(me.tried) > 4096:
        me.tried.popitem(last=False)

"""A member works on the tasks that it has claimed, and uploads the results, as steps (docs/protocol.md §10)."""

from __future__ import annotations

from blake3 import blake3

from ...errors import CorruptRollouts, DeltawireError, EngineUnavailable, StoreError
from ...events import emit
from ...format.records.trainer_records import Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.fleet_keys import RolloutKey
from ...store.requests import Put, Sleep
from ..rules.staleness import may_work
from .member_state import Claim, Made, MemberState, sync_steps
from .requests import Generate, Steps, Wait

_LAST_TRIES = 3
"""How often a member that is leaving tries to upload its result."""


class TaskFailed(EngineUnavailable):
    """A task failed, and the member has already reported why. It continues with other work after a pause."""


def work_steps(me: MemberState) -> Steps[None]:
    """Do the tasks of the queue, one after the other, until the member leaves. Run these steps `me.tasks_at_a_time` times.

    If a task fails, the member drops its lease, and continues after a pause. Errors that are not retryable are raised.
    """
    failures = 0
    while True:
        seen = me.changed.count
        if me.leaving:
            return
        task = None if len(me.made) > me.tasks_at_a_time else me.begin_task()  # results that cannot be uploaded must not pile up
        if task is None:
            yield Wait(me.changed, seen, me.longest_pause)
            continue
        claim, began = task
        made: Made | None = None
        try:
            made = yield from _work(me, claim)
            failures = 0
        except DeltawireError as error:
            if not error.retryable:
                raise
            failures += 1
            if not isinstance(error, TaskFailed):
                emit(me.on_event, "member-retrying", member=me.member, failures=failures, error=str(error))
        finally:
            me.end_task(claim, began, made)
        if failures:
            yield Sleep(me.pause(failures))


def upload_steps(me: MemberState) -> Steps[None]:
    """Upload results until the member leaves and has none left. Run these steps once for each member."""
    while True:
        seen = me.changed.count
        if not me.made:
            if me.leaving and not me.begun:
                return
            yield Wait(me.changed, seen, me.longest_pause)
            continue
        made = me.made[0]
        try:
            yield from _deliver(me, made)
        finally:
            me.made.popleft()
            me.working.discard(made.attempt)
            me.changed.give()


def can_begin(me: MemberState, record: Round) -> bool:
    """Return whether the version that the member has at this moment may do a task of a round."""
    return me.policy is not None and may_work(me.policy, record)


def _work(me: MemberState, claim: Claim) -> Steps[Made | None]:
    """Generate. Return None if the task can no longer be done: its lease is dropped, and the task goes to another member."""
    record = claim.record
    yield from sync_steps(me, record.oldest_step)
    if not can_begin(me, record):  # the version has changed since the member leased the task
        emit(me.on_event, "task-dropped", member=me.member, round=claim.attempt.round, task=claim.attempt.task)
        return None
    started = me.ticks()
    rollouts: Rollouts | None = yield Generate(record, claim.lease, claim.rows)
    if rollouts is None:
        me.leave()
        return None
    seconds = max(0.0, me.ticks() - started)
    me.note_duration(seconds)
    return Made(claim.attempt, rollouts, round(1000 * seconds))


def _deliver(me: MemberState, made: Made) -> Steps[None]:
    attempt, rollouts = made.attempt, made.rollouts
    try:
        data = rollouts.to_bytes()
    except CorruptRollouts as error:
        emit(me.on_event, "rollout-unusable", member=me.member, error=str(error))
        return
    yield from _upload(me, fleet_keys.rollout_key(RolloutKey(*attempt, blake3(data).hexdigest())), data)
    me.tokens += rollouts.tokens
    me.busy_ms += made.milliseconds
    emit(me.on_event, "rollout-uploaded", member=me.member, round=attempt.round, task=attempt.task, tokens=rollouts.tokens)


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

"""The trainer reads what members wrote, as steps: heartbeats, leases and results. It judges every result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blake3 import blake3

from ...errors import CorruptRollouts, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...events import emit
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.fleet_files import Accepted
from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Heartbeat, Lease
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.fleet_keys import RolloutKey
from ...store.requests import Get
from ..rules.admission import Demand, Reason, Refusal, judge_content, judge_key, judge_origin, judge_versions, most_bytes
from ..rules.desertion import Desertion
from ..rules.fleet_clock import FleetClock
from ..rules.live_tasks import LIVE_MEMBER
from ..rules.roster import Roster
from ..rules.round_state import RoundState
from ..rules.scheduler import Scheduler
from ..rules.staleness import KnownVersion
from ..rules.training_limits import why_untrainable
from .record_steps import parsed_answer
from .requests import MOST_TOGETHER, FindVersion, Steps, Together
from .trainer_context import TrainerContext

_FILES_PER_LOOK = 512
_BYTES_PER_LOOK = 1 << 30
"""One look reads about this many results and bytes. Then the trainer continues with the rest of its work."""

_FILES_AT_ONCE = MOST_TOGETHER
_BYTES_AT_ONCE = 1 << 29
"""At most this many results and bytes are read at the same time, but always one result."""

_RECORDS_AT_ONCE = 4 * MOST_TOGETHER
"""Number of heartbeats and leases that are in memory at the same time. Each may have up to `MAX_RECORD_BYTES` bytes."""


class Intake:
    """Reads what members write, and accepts or refuses their results. Every refusal is counted in `rejected`, and is an event.

    Parameters
    ----------
    trainer
        The trainer that reads.
    scheduler
        Is told how much work each member delivered.
    clock
        The fleet clock.
    """

    def __init__(self, trainer: TrainerContext, scheduler: Scheduler, clock: FleetClock) -> None:
        self.run = trainer.run
        self._trainer = trainer
        self._scheduler = scheduler
        self._clock = clock
        self.roster = Roster(trainer.run)
        self.desertion = Desertion(trainer.options.patience_seconds, clock.now)
        self.rejected: Counter[Reason] = Counter()
        self.left_out: dict[RolloutKey, str] = {}
        """Results that a trainer rejected after their acknowledgement, each with the reason. They are never accepted again."""
        self.excluded: dict[str, str] = {}
        """Members whose results are refused from now on, each with the reason."""
        self.versions: dict[int, KnownVersion] = {}
        """Versions that the chain has. They do not change while this trainer is the writer, because only a resume abandons versions."""

    def restore(self, state: RoundState, accepted: Accepted) -> Steps[None]:
        """Accept again the results that were acknowledged before, as far as they are still valid. Their leases were checked then."""
        known = [one for one in accepted.results if one.task < len(state.tasks)]
        for start in range(0, len(known), _FILES_AT_ONCE):
            group = known[start : start + _FILES_AT_ONCE]
            keys = [RolloutKey(state.record.round, one.task, one.attempt, one.blake3) for one in group]
            answers = yield Together(tuple(Get(fleet_keys.rollout_key(key), self.most_bytes(state, key)) for key in keys))
            for key, one, answer in zip(keys, group, answers, strict=True):
                if isinstance(answer, DeltawireError) and answer.retryable:
                    raise answer
                rollouts = self._parsed(key, answer)
                refusal = self.rejected_before(key)
                if refusal is None and rollouts is not None:
                    refusal = yield from self.judge_substance(state, key, rollouts)
                if rollouts is not None and refusal is None and rollouts.member != one.member:
                    refusal = Refusal("unleased")
                if rollouts is not None and refusal is None:
                    state.accept(key, one.size, rollouts)
                else:
                    self.refuse(state, key, refusal or Refusal("malformed"), one.member)

    def read_members(
        self, rounds: dict[int, RoundState], members: Sequence[ObjectInfo], leases: Sequence[ObjectInfo], rollouts: Sequence[ObjectInfo]
    ) -> Steps[None]:
        """Read the heartbeats that are new or have changed, and the new leases.

        Leases are read if they are listed, or if their results are, which may be newer than the listing of leases.
        """
        infos = {member: info for info in members if (member := fleet_keys.parse_member_key(info.key)) not in (None, LIVE_MEMBER)}
        times = {key: info.modified.timestamp() for info in leases if (key := fleet_keys.parse_lease_key(info.key)) is not None}
        for info in rollouts:
            result = fleet_keys.parse_rollout_key(info.key)
            if result is not None and result.round in rounds and result not in rounds[result.round].seen:
                times.setdefault(result.attempt_id, info.modified.timestamp())
        wanted: list[str | AttemptId] = [*self.roster.to_read(infos.items(), self._clock.now)]
        wanted += [attempt for attempt in times if attempt.round in rounds and rounds[attempt.round].unknown_leases([attempt])]
        for start in range(0, len(wanted), _RECORDS_AT_ONCE):
            group = wanted[start : start + _RECORDS_AT_ONCE]
            keys = [fleet_keys.member_key(one) if isinstance(one, str) else fleet_keys.lease_key(one) for one in group]
            answers = yield Together(tuple(Get(key, MAX_RECORD_BYTES) for key in keys))
            for one, answer in zip(group, answers, strict=True):
                if isinstance(one, str):
                    self._heard(one, infos[one].modified.timestamp(), answer)
                else:
                    self._leased(rounds[one.round], one, self._clock.since(times[one]), answer)

    def _heard(self, member: str, modified: float, answer: bytes | DeltawireError) -> None:
        """Note a heartbeat. One that could not be read is read again at the next look."""
        if not isinstance(answer, (bytes, LimitExceeded)):
            return
        beat = parsed_answer(Heartbeat.parse, answer)
        since = self._clock.since(modified)
        self.roster.heard(member, beat, modified, since, self._clock.now)
        if beat is not None and (beat.id, beat.member) == (self.run, member):
            why = self.desertion.left(member, beat, since)
            if why is not None:
                emit(self._trainer.on_event, "member-left", member=member, why=why)

    def _leased(self, state: RoundState, attempt: AttemptId, since: float, answer: bytes | DeltawireError) -> None:
        """Note a lease. Raise the error if it could not be read."""
        if isinstance(answer, bytes):
            lease = parsed_answer(Lease.parse, answer)
            is_sound = lease is not None and (lease.round, lease.task, lease.attempt) == attempt
            state.leased(attempt, lease if is_sound else None, since, is_timed=self._clock.is_bounded)
        elif isinstance(answer, LimitExceeded):
            state.leased(attempt, None, since)
        elif not isinstance(answer, ObjectMissing):
            raise answer

    def note_free_attempts(self, rounds: Sequence[RoundState]) -> None:
        """Note which members say in their heartbeats that they work on attempts that need no lease."""
        for state in rounds:
            state.note_free_attempts(self.roster, self._clock.now)

    def admit_all(self, rounds: dict[int, RoundState], listed: Sequence[ObjectInfo]) -> Steps[None]:
        """Judge the new results, in the order of the store's times.

        One look reads a bounded amount, and reads the first result of each attempt before the second result of any other. So a member that
        uploads masses of results delays those of others a little, and never keeps the trainer from writing the board.
        """
        fresh: list[tuple[float, RolloutKey, int]] = []
        for info in listed:
            key = fleet_keys.parse_rollout_key(info.key)
            state = rounds.get(key.round) if key is not None else None
            if key is None or state is None or key in state.seen or key.task in state.live:
                continue
            if key.task >= len(state.tasks):
                self.refuse(state, key, Refusal("malformed"), None)
                continue
            fresh.append((info.modified.timestamp(), key, info.size))
        files = total = 0
        group: list[tuple[float, RolloutKey, int]] = []
        for arrived, key, size in _in_turns(fresh):
            refusal = self._judge_unread(rounds[key.round], key, size)
            if refusal is None and not rounds[key.round].may_be_leased(key.attempt_id):
                refusal = Refusal("unleased")
            if refusal is not None:
                self.refuse(rounds[key.round], key, refusal, None)
                continue
            if len(group) == _FILES_AT_ONCE or (group and sum(each for _, _, each in group) + size > _BYTES_AT_ONCE):
                yield from self._admit_group(rounds, group)
                group = []
            if files >= _FILES_PER_LOOK or total >= _BYTES_PER_LOOK:
                break  # the next look reads the rest
            group.append((arrived, key, size))
            files, total = files + 1, total + size
        yield from self._admit_group(rounds, group)

    def _admit_group(self, rounds: dict[int, RoundState], group: Sequence[tuple[float, RolloutKey, int]]) -> Steps[None]:
        """Read some results at the same time, and judge them one after the other. A result that is larger than listed is malformed."""
        if not group:
            return
        answers = yield Together(tuple(Get(fleet_keys.rollout_key(key), size) for _, key, size in group))
        for (arrived, key, _), answer in zip(group, answers, strict=True):
            if isinstance(answer, bytes):
                yield from self._admit(rounds[key.round], key, self._clock.since(arrived), answer)
            elif isinstance(answer, LimitExceeded):
                self.refuse(rounds[key.round], key, Refusal("malformed"), None)
            elif not isinstance(answer, ObjectMissing):
                raise answer

    def count_losses(self, rounds: Sequence[RoundState]) -> None:
        """Count leases that led to no accepted result as work without tokens. A member that only takes leases is soon offered little."""
        now = self._clock.now
        for state in rounds:
            for lost in state.newly_lost(self.roster, now):
                assert lost.lease is not None
                self._scheduler.delivered(
                    lost.lease.member, tokens=0, offered=lost.offered, leased=lost.since, finished=now, is_timed=lost.is_timed
                )

    def refuse(self, state: RoundState, key: RolloutKey, refusal: Refusal, member: str | None) -> None:
        """Count a result as refused, and emit the event."""
        state.refuse(key, refusal.reason)
        self.rejected[refusal.reason] += 1
        fields = {"round": key.round, "task": key.task, "attempt": key.attempt, "member": member}
        why = {"why": refusal.why} if refusal.why else {}
        emit(self._trainer.on_event, "rollout-rejected", reason=refusal.reason, step=state.record.for_step, **fields, **why)

    def _judge_unread(self, state: RoundState, key: RolloutKey, size: int) -> Refusal | None:
        """Judge a result by its key and size alone."""
        reason = judge_key(key, state.tasks[key.task].accepted, closed=not state.is_accepting)
        if reason is not None:
            return Refusal(reason)
        most = self.most_bytes(state, key)
        if size > most:
            return Refusal("malformed", f"it has {size:,} bytes; a result of this task has at most {most:,}")
        return self.rejected_before(key)

    def most_bytes(self, state: RoundState, key: RolloutKey) -> int:
        """Return how many bytes of a result are read at most: as many as a result of the task can have, within the limit of all files."""
        most = most_bytes(self._demand(state, key))
        limit = self._trainer.options.limits.file_bytes
        return limit if most is None else min(most, limit)

    def _demand(self, state: RoundState, key: RolloutKey) -> Demand:
        rows, prompts = state.rows[key.task], state.prompts[key.task] if state.prompts is not None else None
        trainer = self._trainer
        added = trainer.options.environment_tokens
        return Demand(state.record, len(rows), trainer.budget, prompts, added, trainer.training.routers, key.task in state.live)

    def rejected_before(self, key: RolloutKey) -> Refusal | None:
        """Return the refusal of a result that a trainer rejected after its acknowledgement; None for any other result."""
        return Refusal("untrainable", self.left_out[key]) if key in self.left_out else None

    def _admit(self, state: RoundState, key: RolloutKey, arrived: float, data: bytes) -> Steps[None]:
        """Judge a result that was read, and accept or refuse it."""
        if blake3(data).hexdigest() != key.blake3:  # the bytes may have been damaged on the way here, so they are read once more
            data = yield Get(fleet_keys.rollout_key(key), self.most_bytes(state, key))
        rollouts = self._parsed(key, data)
        held = state.tasks[key.task].leases.get(key.attempt)
        lease = held.lease if held is not None else None
        refusal: Refusal | None = Refusal("malformed")
        if rollouts is not None:
            is_free = key.attempt >= fleet_keys.FIRST_FREE_ATTEMPT and state.may_deliver_freely(key.attempt_id, rollouts.member)
            if is_free and held is None:  # the result arrived before the heartbeat that names the attempt
                state.hold_free_attempt(key.attempt_id, rollouts.member, arrived, is_timed=False)
                held = state.tasks[key.task].leases[key.attempt]
                lease = held.lease
            # The key is judged again, because another result of the task may have been accepted since.
            refusal = self._judge_unread(state, key, len(data))
            if refusal is None and (reason := judge_origin(rollouts, key, lease, self.run, is_free=is_free)) is not None:
                refusal = Refusal(reason)
            if refusal is None and rollouts.member in self.excluded:
                refusal = Refusal("excluded", self.excluded[rollouts.member])
            if refusal is None:
                refusal = yield from self.judge_substance(state, key, rollouts)
        if held is not None and lease is not None and (refusal is None or refusal.reason not in ("duplicate", "late", "unleased")):
            tokens = rollouts.tokens if rollouts is not None and refusal is None else 0
            self._scheduler.delivered(
                lease.member, tokens=tokens, offered=held.offered, leased=held.since, finished=arrived, is_timed=held.is_timed
            )
        if rollouts is None or refusal is not None:
            self.refuse(state, key, refusal or Refusal("malformed"), lease.member if lease is not None else None)
            return
        state.accept(key, len(data), rollouts)
        self.desertion.accepted()
        emit(
            self._trainer.on_event,
            "rollout-accepted",
            round=key.round,
            task=key.task,
            attempt=key.attempt,
            member=rollouts.member,
            tokens=rollouts.tokens,
            step=state.record.for_step,
        )

    def judge_substance(self, state: RoundState, key: RolloutKey, rollouts: Rollouts) -> Steps[Refusal | None]:
        """Judge what a result holds: its run, prompts, completions, versions, and whether it can be trained on."""
        if rollouts.run != self.run:
            return Refusal("wrong-run")
        demand = self._demand(state, key)
        refusal = judge_content(rollouts, demand)
        if refusal is not None:
            return refusal
        versions: dict[int, KnownVersion | None] = {}
        for seq in rollouts.versions:
            versions[seq] = self.versions.get(seq) or (yield FindVersion(seq))
            found = versions[seq]
            if found is None:
                return Refusal("future")
            self.versions[seq] = found
        reason = judge_versions(rollouts, demand, versions)
        if reason is not None:
            return Refusal(reason)
        why = why_untrainable(rollouts, self._trainer.training)
        return None if why is None else Refusal("untrainable", why)

    def _parsed(self, key: RolloutKey, data: object) -> Rollouts | None:
        if not isinstance(data, bytes) or blake3(data).hexdigest() != key.blake3:
            return None
        try:
            return Rollouts.parse(data, self._trainer.options.limits)
        except (CorruptRollouts, UnsupportedVersion):
            return None


def _in_turns(fresh: Sequence[tuple[float, RolloutKey, int]]) -> list[tuple[float, RolloutKey, int]]:
    """Sort results by time, but the first result of every attempt before the second result of any."""
    turns: Counter[AttemptId] = Counter()
    ordered = []
    for arrived, key, size in sorted(fresh):
        ordered.append((turns[key.attempt_id], arrived, key, size))
        turns[key.attempt_id] += 1
    return [(arrived, key, size) for _, arrived, key, size in sorted(ordered)]

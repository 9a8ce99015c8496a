"""What comes in from a fleet, as steps: heartbeats, leases and results are read, and results judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blake3 import blake3

from ...errors import CorruptRollouts, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ...events import OnEvent, emit
from ...format.records.chain_records import MAX_RECORD_BYTES
from ...format.records.fleet_files import Accepted
from ...format.records.member_records import Heartbeat, Lease
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.base import ObjectInfo
from ...store.fleet_keys import RolloutKey
from ...store.requests import Get
from ..options import FleetOptions
from ..rules.admission import Demand, Reason, Refusal, judge_content, judge_key, judge_origin, judge_versions, most_bytes
from ..rules.desertion import Desertion
from ..rules.fleet_clock import FleetClock
from ..rules.roster import Roster
from ..rules.round_state import RoundState
from ..rules.scheduler import Scheduler
from ..rules.staleness import KnownVersion, StalenessBudget
from ..rules.training_limits import TrainingLimits, why_untrainable
from .requests import MOST_TOGETHER, FindVersion, Steps, Together
from .resume_steps import parsed_answer

_FILES_A_LOOK = 512
_BYTES_A_LOOK = 1 << 30
"""About so much of what members uploaded is read before the trainer goes on with the rest of its work."""

_FILES_AT_ONCE = 8
"""Results that are read side by side: each may be as large as `RolloutLimits.file_bytes`."""


class Intake:
    """Reads what members write. `rejected` counts what was refused, by reason; every refusal is an event, too."""

    def __init__(
        self,
        run: str,
        budget: StalenessBudget,
        scheduler: Scheduler,
        options: FleetOptions,
        clock: FleetClock,
        training: TrainingLimits | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.run = run
        self.budget = budget
        self.scheduler = scheduler
        self.options = options
        self.roster = Roster(run)
        self.training = training or TrainingLimits()
        self.rejected: Counter[Reason] = Counter()
        self.left_out: dict[RolloutKey, str] = {}
        """Results that a trainer rejected after they were acknowledged, and why: none of them is accepted again."""
        self.versions: dict[int, KnownVersion] = {}
        """Versions that the chain is known to have. While this trainer is the writer, no rewind changes what they are."""
        self.clock = clock
        self.desertion = Desertion(options.patience_seconds, clock.now)
        self._on_event = on_event

    def take_up(self, state: RoundState, accepted: Accepted) -> Steps[None]:
        """Accept again what was acknowledged before, as far as it holds. That it was leased was checked then."""
        known = [one for one in accepted.results if one.task < len(state.tasks)]
        for start in range(0, len(known), _FILES_AT_ONCE):
            part = known[start : start + _FILES_AT_ONCE]
            places = [RolloutKey(state.record.round, one.task, one.attempt, one.blake3) for one in part]
            answers = yield Together(tuple(Get(fleet_keys.rollout_key(place), self._most_bytes(state, place)) for place in places))
            for place, one, answer in zip(places, part, answers, strict=True):
                if isinstance(answer, DeltawireError) and answer.retryable:
                    raise answer
                rollouts = self._parsed(place, answer)
                refusal = self._rejected_before(place)
                if refusal is None and rollouts is not None:
                    refusal = yield from self._judge_substance(state, place, rollouts)
                if rollouts is not None and refusal is None and rollouts.member != one.member:
                    refusal = Refusal("unleased")
                if rollouts is not None and refusal is None:
                    state.accept(place, one.size, rollouts)
                else:
                    self.refuse(state, place, refusal or Refusal("malformed"), one.member)

    def read_heartbeats(self, listed: Sequence[ObjectInfo]) -> Steps[None]:
        infos = {member: info for info in listed if (member := fleet_keys.parse_member_key(info.key)) is not None}
        unread = self.roster.to_read(infos.items(), self.clock.now)
        for start in range(0, len(unread), MOST_TOGETHER):
            part = unread[start : start + MOST_TOGETHER]
            answers = yield Together(tuple(Get(fleet_keys.member_key(member), MAX_RECORD_BYTES) for member in part))
            for member, answer in zip(part, answers, strict=True):
                if isinstance(answer, (bytes, LimitExceeded)):
                    modified = infos[member].modified.timestamp()
                    beat = parsed_answer(Heartbeat.parse, answer)
                    since = self.clock.since(modified)
                    self.roster.heard(member, beat, modified, since, self.clock.now)
                    if beat is not None and (beat.id, beat.member) == (self.run, member):
                        why = self.desertion.left(member, beat, since)
                        if why is not None:
                            emit(self._on_event, "member-left", member=member, why=why)

    def read_leases(self, rounds: dict[int, RoundState], leases: Sequence[ObjectInfo], rollouts: Sequence[ObjectInfo]) -> Steps[None]:
        """Those that are listed; and those of results, which may be newer than the listing."""
        times = {key: info.modified.timestamp() for info in leases if (key := fleet_keys.parse_lease_key(info.key)) is not None}
        for info in rollouts:
            place = fleet_keys.parse_rollout_key(info.key)
            if place is not None and place.round in rounds and place not in rounds[place.round].seen:
                times.setdefault(place.attempt_id, info.modified.timestamp())
        wanted = [key for key in times if key.round in rounds and rounds[key.round].unknown_leases([key])]
        for start in range(0, len(wanted), MOST_TOGETHER):
            part = wanted[start : start + MOST_TOGETHER]
            answers = yield Together(tuple(Get(fleet_keys.lease_key(key), MAX_RECORD_BYTES) for key in part))
            for key, answer in zip(part, answers, strict=True):
                if isinstance(answer, bytes):
                    lease = parsed_answer(Lease.parse, answer)
                    sound = lease is not None and (lease.round, lease.task, lease.attempt) == tuple(key)
                    rounds[key.round].leased(key, lease if sound else None, self.clock.since(times[key]))
                elif isinstance(answer, LimitExceeded):
                    rounds[key.round].leased(key, None, self.clock.since(times[key]))
                elif not isinstance(answer, ObjectMissing):
                    raise answer

    def note_free_attempts(self, rounds: Sequence[RoundState]) -> None:
        """Learn from heartbeats who works on attempts that need no lease."""
        for state in rounds:
            state.note_free_attempts(self.roster, self.clock.now)

    def admit_all(self, rounds: dict[int, RoundState], listed: Sequence[ObjectInfo]) -> Steps[None]:
        """Judge what is new, in the order of the store's times.

        One look reads a bounded amount, and of each attempt the first result before the second of any other. So results that somebody
        uploads in masses delay those of others a little, and never keep the trainer from writing the board.
        """
        fresh: list[tuple[float, RolloutKey, int]] = []
        for info in listed:
            place = fleet_keys.parse_rollout_key(info.key)
            state = rounds.get(place.round) if place is not None else None
            if place is None or state is None or place in state.seen:
                continue
            if place.task >= len(state.tasks):
                self.refuse(state, place, Refusal("malformed"), None)
                continue
            fresh.append((info.modified.timestamp(), place, info.size))
        fresh = _taking_turns(fresh)
        files = total = 0
        for start in range(0, len(fresh), _FILES_AT_ONCE):
            if files >= _FILES_A_LOOK or total >= _BYTES_A_LOOK:
                return  # the rest is still there at the next look
            part = []
            for arrived, place, size in fresh[start : start + _FILES_AT_ONCE]:
                refusal = self._judge_unread(rounds[place.round], place, size)
                if refusal is None and not rounds[place.round].may_be_leased(place.attempt_id):
                    refusal = Refusal("unleased")
                if refusal is None:
                    part.append((arrived, place))
                    files, total = files + 1, total + size
                else:
                    self.refuse(rounds[place.round], place, refusal, None)
            if not part:
                continue
            wanted = [Get(fleet_keys.rollout_key(place), self._most_bytes(rounds[place.round], place)) for _, place in part]
            answers = yield Together(tuple(wanted))
            for (arrived, place), answer in zip(part, answers, strict=True):
                if isinstance(answer, bytes):
                    yield from self._admit(rounds[place.round], place, self.clock.since(arrived), answer)
                elif not isinstance(answer, (ObjectMissing, LimitExceeded)):
                    raise answer
                elif isinstance(answer, LimitExceeded):
                    self.refuse(rounds[place.round], place, Refusal("malformed"), None)

    def count_losses(self, rounds: Sequence[RoundState]) -> None:
        """Leases that came to nothing are work without tokens: who only takes is soon offered little."""
        for state in rounds:
            for lost in state.newly_lost(self.roster, self.clock.now):
                assert lost.lease is not None
                self.scheduler.delivered(lost.lease.member, tokens=0, offered=lost.offered, leased=lost.since, finished=self.clock.now)

    def _judge_unread(self, state: RoundState, place: RolloutKey, size: int) -> Refusal | None:
        reason = judge_key(place, state.tasks[place.task].accepted, closed=not state.taking)
        if reason is not None:
            return Refusal(reason)
        most = self._most_bytes(state, place)
        if size > most:
            return Refusal("malformed", f"it has {size:,} bytes; a result of this task has at most {most:,}")
        return self._rejected_before(place)

    def _most_bytes(self, state: RoundState, place: RolloutKey) -> int:
        """How large a result may be that is read at all: what the task can take, and never more than the limit of all files."""
        most = most_bytes(self._demand(state, place))
        return self.options.limits.file_bytes if most is None else min(most, self.options.limits.file_bytes)

    def _demand(self, state: RoundState, place: RolloutKey) -> Demand:
        rows, prompts = state.rows[place.task], state.prompts[place.task] if state.prompts is not None else None
        return Demand(state.record, len(rows), self.budget, prompts, self.options.environment_tokens)

    def _rejected_before(self, place: RolloutKey) -> Refusal | None:
        return Refusal("untrainable", self.left_out[place]) if place in self.left_out else None

    def _admit(self, state: RoundState, place: RolloutKey, arrived: float, data: bytes) -> Steps[None]:
        if blake3(data).hexdigest() != place.blake3:  # perhaps only on the way here: look again before somebody's work is thrown away
            data = yield Get(fleet_keys.rollout_key(place), self._most_bytes(state, place))
        rollouts = self._parsed(place, data)
        held = state.tasks[place.task].leases.get(place.attempt)
        lease = held.lease if held is not None else None
        refusal: Refusal | None = Refusal("malformed")
        if rollouts is not None:
            # Two results of one task may have been read side by side.
            is_free = place.attempt >= fleet_keys.FIRST_FREE_ATTEMPT and state.may_deliver_freely(place.attempt_id, rollouts.member)
            if is_free and held is None:  # it was faster than its heartbeat
                state.hold_free_attempt(place.attempt_id, rollouts.member, arrived)
                held = state.tasks[place.task].leases[place.attempt]
                lease = held.lease
            refusal = self._judge_unread(state, place, len(data))
            if refusal is None and (reason := judge_origin(rollouts, place, lease, self.run, is_free=is_free)) is not None:
                refusal = Refusal(reason)
            if refusal is None:
                refusal = yield from self._judge_substance(state, place, rollouts)
        if held is not None and lease is not None and (refusal is None or refusal.reason not in ("duplicate", "late", "unleased")):
            tokens = rollouts.tokens if rollouts is not None and refusal is None else 0
            self.scheduler.delivered(lease.member, tokens=tokens, offered=held.offered, leased=held.since, finished=arrived)
        if rollouts is None or refusal is not None:
            self.refuse(state, place, refusal or Refusal("malformed"), lease.member if lease is not None else None)
            return
        state.accept(place, len(data), rollouts)
        self.desertion.accepted()
        emit(
            self._on_event,
            "rollout-accepted",
            round=place.round,
            task=place.task,
            attempt=place.attempt,
            member=rollouts.member,
            tokens=rollouts.tokens,
            step=state.record.for_step,
        )

    def _judge_substance(self, state: RoundState, place: RolloutKey, rollouts: Rollouts) -> Steps[Refusal | None]:
        if rollouts.run != self.run:
            return Refusal("wrong-run")
        demand = self._demand(state, place)
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
        why = why_untrainable(rollouts, self.training)
        return None if why is None else Refusal("untrainable", why)

    def _parsed(self, place: RolloutKey, data: object) -> Rollouts | None:
        if not isinstance(data, bytes) or blake3(data).hexdigest() != place.blake3:
            return None
        try:
            return Rollouts.parse(data, self.options.limits)
        except (CorruptRollouts, UnsupportedVersion):
            return None

    def refuse(self, state: RoundState, place: RolloutKey, refusal: Refusal, member: str | None) -> None:
        """Count a result as refused, and tell."""
        state.refuse(place, refusal.reason)
        self.rejected[refusal.reason] += 1
        fields = {"round": place.round, "task": place.task, "attempt": place.attempt, "member": member}
        why = {"why": refusal.why} if refusal.why else {}
        emit(self._on_event, "rollout-rejected", reason=refusal.reason, step=state.record.for_step, **fields, **why)


def _taking_turns(fresh: Sequence[tuple[float, RolloutKey, int]]) -> list[tuple[float, RolloutKey, int]]:
    """Sort by time, the first of each attempt before the second of any."""
    turns: Counter[tuple[int, int, int]] = Counter()
    ordered = []
    for arrived, place, size in sorted(fresh):
        ordered.append((turns[place[:3]], arrived, place, size))
        turns[place[:3]] += 1
    return [(arrived, place, size) for _, arrived, place, size in sorted(ordered)]

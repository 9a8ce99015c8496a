"""What comes in from a fleet, as steps: heartbeats, leases and results are read, and results judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blake3 import blake3

from ..errors import CorruptRollouts, DeltawireError, LimitExceeded, ObjectMissing, UnsupportedVersion
from ..events import OnEvent, emit
from ..format.fleet_files import Accepted
from ..format.fleet_records import Heartbeat, Lease
from ..format.records import MAX_RECORD_BYTES
from ..format.rollouts import Rollouts
from ..store import fleet_keys
from ..store.base import ObjectInfo
from ..store.fleet_keys import RolloutKey
from .admission import Demand, Reason, judge_content, judge_origin, judge_place, judge_versions
from .fleet_clock import FleetClock
from .options import FleetOptions
from .resume_steps import parsed_answer
from .roster import Roster
from .round_state import RoundState
from .scheduler import Scheduler
from .staleness import StalenessBudget
from .steps import MOST_TOGETHER, FindVersion, Get, KnownVersion, Steps, Together

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
        on_event: OnEvent | None = None,
    ) -> None:
        self.run = run
        self.budget = budget
        self.scheduler = scheduler
        self.options = options
        self.roster = Roster(run)
        self.rejected: Counter[Reason] = Counter()
        self.versions: dict[int, KnownVersion] = {}
        """Versions that the chain is known to have. While this trainer is the writer, no rewind changes what they are."""
        self.clock = clock
        self._on_event = on_event

    def take_up(self, state: RoundState, accepted: Accepted) -> Steps[None]:
        """Accept again what was acknowledged before, as far as it holds. That it was leased was checked then."""
        known = [one for one in accepted.results if one.task < len(state.tasks)]
        for start in range(0, len(known), _FILES_AT_ONCE):
            part = known[start : start + _FILES_AT_ONCE]
            places = [RolloutKey(state.record.round, one.task, one.attempt, one.blake3) for one in part]
            answers = yield Together(tuple(Get(fleet_keys.rollout_key(place), self.options.limits.file_bytes) for place in places))
            for place, one, answer in zip(places, part, answers, strict=True):
                if isinstance(answer, DeltawireError) and answer.retryable:
                    raise answer
                rollouts = self._parsed(place, answer)
                reason: Reason | None = "malformed" if rollouts is None else None
                if rollouts is not None:
                    reason = (yield from self._judge_substance(state, place, rollouts)) or (
                        "unleased" if rollouts.member != one.member else None
                    )
                if rollouts is not None and reason is None:
                    state.accept(place, one.size, rollouts)
                elif reason is not None:
                    self._refuse(state, place, reason, one.member)

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
                    self.roster.heard(member, beat, modified, self.clock.since(modified), self.clock.now)

    def read_leases(self, rounds: dict[int, RoundState], leases: Sequence[ObjectInfo], rollouts: Sequence[ObjectInfo]) -> Steps[None]:
        """Those that are listed; and those of results, which may be newer than the listing."""
        times = {key: info.modified.timestamp() for info in leases if (key := fleet_keys.parse_lease_key(info.key)) is not None}
        for info in rollouts:
            place = fleet_keys.parse_rollout_key(info.key)
            if place is not None and place.round in rounds and place not in rounds[place.round].seen:
                times.setdefault(place.lease, info.modified.timestamp())
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

    def admit_all(self, rounds: dict[int, RoundState], listed: Sequence[ObjectInfo]) -> Steps[None]:
        """Judge what is new, in the order of the store's times."""
        fresh: list[tuple[float, RolloutKey, int]] = []
        for info in listed:
            place = fleet_keys.parse_rollout_key(info.key)
            state = rounds.get(place.round) if place is not None else None
            if place is None or state is None or place in state.seen:
                continue
            if place.task >= len(state.tasks):
                self._refuse(state, place, "malformed", None)
                continue
            fresh.append((info.modified.timestamp(), place, info.size))
        fresh.sort()
        for start in range(0, len(fresh), _FILES_AT_ONCE):
            part = []
            for arrived, place, size in fresh[start : start + _FILES_AT_ONCE]:
                reason = self._judge_unread(rounds[place.round], place, size)
                if reason is None:
                    part.append((arrived, place))
                else:
                    self._refuse(rounds[place.round], place, reason, None)
            if not part:
                continue
            limit = self.options.limits.file_bytes
            answers = yield Together(tuple(Get(fleet_keys.rollout_key(place), limit) for _, place in part))
            for (arrived, place), answer in zip(part, answers, strict=True):
                if isinstance(answer, bytes):
                    yield from self._admit(rounds[place.round], place, self.clock.since(arrived), answer)
                elif not isinstance(answer, (ObjectMissing, LimitExceeded)):
                    raise answer
                elif isinstance(answer, LimitExceeded):
                    self._refuse(rounds[place.round], place, "malformed", None)

    def count_losses(self, rounds: Sequence[RoundState]) -> None:
        """Leases that came to nothing are work without tokens: who only takes is soon offered little."""
        for state in rounds:
            for lost in state.newly_lost(self.roster, self.clock.now):
                assert lost.lease is not None
                self.scheduler.delivered(lost.lease.member, tokens=0, offered=lost.offered, leased=lost.since, finished=self.clock.now)

    def _judge_unread(self, state: RoundState, place: RolloutKey, size: int) -> Reason | None:
        reason = judge_place(place, state.tasks[place.task].accepted, closed=not state.taking)
        return "malformed" if reason is None and size > self.options.limits.file_bytes else reason

    def _admit(self, state: RoundState, place: RolloutKey, arrived: float, data: bytes) -> Steps[None]:
        if blake3(data).hexdigest() != place.blake3:  # perhaps only on the way here: look again before somebody's work is thrown away
            data = yield Get(fleet_keys.rollout_key(place), self.options.limits.file_bytes)
        rollouts = self._parsed(place, data)
        held = state.tasks[place.task].leases.get(place.attempt)
        lease = held.lease if held is not None else None
        reason: Reason | None = "malformed"
        if rollouts is not None:
            # Two results of one task may have been read side by side.
            reason = self._judge_unread(state, place, len(data)) or judge_origin(rollouts, place, lease, self.run)
            if reason is None:
                reason = yield from self._judge_substance(state, place, rollouts)
        if held is not None and lease is not None and reason not in ("duplicate", "late", "unleased"):
            tokens = rollouts.tokens if rollouts is not None and reason is None else 0
            self.scheduler.delivered(lease.member, tokens=tokens, offered=held.offered, leased=held.since, finished=arrived)
        if rollouts is None or reason is not None:
            self._refuse(state, place, reason or "malformed", lease.member if lease is not None else None)
            return
        state.accept(place, len(data), rollouts)
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

    def _judge_substance(self, state: RoundState, place: RolloutKey, rollouts: Rollouts) -> Steps[Reason | None]:
        if rollouts.run != self.run:
            return "wrong-run"
        demand = Demand(state.record, len(state.rows[place.task]), self.budget)
        reason = judge_content(rollouts, demand)
        if reason is not None:
            return reason
        versions: dict[int, KnownVersion | None] = {}
        for seq in rollouts.versions:
            versions[seq] = self.versions.get(seq) or (yield FindVersion(seq))
            found = versions[seq]
            if found is None:
                return "future"
            self.versions[seq] = found
        return judge_versions(rollouts, demand, versions)

    def _parsed(self, place: RolloutKey, data: object) -> Rollouts | None:
        if not isinstance(data, bytes) or blake3(data).hexdigest() != place.blake3:
            return None
        try:
            return Rollouts.parse(data, self.options.limits)
        except (CorruptRollouts, UnsupportedVersion):
            return None

    def _refuse(self, state: RoundState, place: RolloutKey, reason: Reason, member: str | None) -> None:
        state.refuse(place, reason)
        self.rejected[reason] += 1
        fields = {"round": place.round, "task": place.task, "attempt": place.attempt, "member": member}
        emit(self._on_event, "rollout-rejected", reason=reason, step=state.record.for_step, **fields)

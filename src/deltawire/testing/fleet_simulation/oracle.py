"""What must hold, judged from outside by an observer who sees everything, with none of the code that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...fleet.rules.staleness import StalenessBudget
from ...format.records.fleet_files import Accepted, AcceptedResult
from ...format.records.fleet_parts import AttemptId
from ...format.records.member_records import Lease
from ...format.records.trainer_records import BatchRecord, Rejection, Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.fleet_keys import RolloutKey
from .chain_model import ChainModel
from .store_model import Objects


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Line:
    """One line of history: what the weights of a trainer at `step` were trained on. Copied into checkpoints, and out of them."""

    step: int = 0
    trained: dict[tuple[int, int], int] = field(default_factory=dict)

    def copy(self) -> Line:
        return Line(self.step, dict(self.trained))


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A batch record as it landed."""

    epoch: int
    step: int
    round: int
    results: tuple[AcceptedResult, ...]
    writer_epoch: int
    """The chain's epoch at that moment: above `epoch`, a zombie wrote it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A result that a trainer rejected after it was acknowledged. `in_time`: no other trainer had taken over when that was written."""

    epoch: int
    place: RolloutKey
    in_time: bool


class Oracle:
    """Watches the store and the trainers. Raises `Violation`."""

    def __init__(self, run: str, chain: ChainModel, objects: Objects, budget: StalenessBudget) -> None:
        self._run = run
        self._chain = chain
        self._objects = objects
        self._budget_steps = budget.steps
        self.acknowledged: dict[tuple[int, int], Acknowledged] = {}
        self.rejected: list[Rejected] = []
        self.accepted = 0
        self.tokens = 0
        objects.created = self._created

    def _created(self, key: str, data: bytes) -> None:
        if (rejection := fleet_keys.parse_rejected_key(key)) is not None:
            record = Rejection.parse(data)
            in_time = rejection.epoch == self._chain.epoch
            self.rejected += [Rejected(rejection.epoch, RolloutKey(record.round, *one), in_time) for one in record.results]
        place = fleet_keys.parse_batch_key(key)
        if place is None:
            return
        batch = BatchRecord.parse(data)
        listed = self._objects.read(batch.accepted.key)
        if listed is None:
            raise Violation(f"step {place.step} of epoch {place.epoch} is acknowledged, and what it trains on is listed nowhere.")
        accepted = Accepted.parse(listed)
        self.acknowledged[place] = Acknowledged(place.epoch, place.step, batch.round, accepted.results, self._chain.epoch)

    def trains(self, line: Line, epoch: int, step: int, rollouts: Sequence[Rollouts]) -> None:
        """A trainer of this epoch is about to train a step on these. Whatever a zombie trains is judged as well, in its own line."""
        what = f"step {step} of epoch {epoch}"
        ack = self.acknowledged.get((epoch, step))
        if ack is None:
            raise Violation(f"{what} is trained and was not acknowledged.")
        if step != line.step + 1:
            raise Violation(f"{what} is trained after step {line.step}.")
        results = self._not_rejected(ack, what)
        if sorted((one.task, one.attempt, one.member) for one in rollouts) != [(r.task, r.attempt, r.member) for r in results]:
            raise Violation(f"{what} is trained on other rollouts than were acknowledged.")
        self._judge_round(ack.round, step, what)
        by_task = {one.task: one for one in rollouts}
        for result in results:
            self._judge(by_task[result.task], result, ack, what, zombie=epoch != self._chain.epoch)
            before = line.trained.get((ack.round, result.task))
            if before is not None:
                raise Violation(f"{what} trains on task {result.task} of round {ack.round}, as step {before} of the same line did.")
        self._judge_loss(line, ack, what)
        for result in results:
            line.trained[ack.round, result.task] = step
        line.step = step
        self.accepted += len(results)
        self.tokens += sum(one.tokens for one in rollouts)

    def _not_rejected(self, ack: Acknowledged, what: str) -> list[AcceptedResult]:
        """What an acknowledgement leaves to train on. Results that an earlier trainer rejected in time must not be in it at all."""
        places = {RolloutKey(ack.round, result.task, result.attempt, result.blake3): result for result in ack.results}
        for one in self.rejected:
            if one.place in places and one.in_time and one.epoch < ack.epoch:
                raise Violation(f"{what} acknowledges task {one.place.task} of round {ack.round}, which epoch {one.epoch} had rejected.")
        own = {one.place for one in self.rejected if one.epoch == ack.epoch}
        return [result for place, result in places.items() if place not in own]

    def _judge_round(self, number: int, step: int, what: str) -> None:
        record = self._objects.read(fleet_keys.round_key(number))
        if record is None or Round.parse(record).for_step != step:
            raise Violation(f"{what} trains on round {number}, which is not for it.")

    def _judge(self, rollouts: Rollouts, result: AcceptedResult, ack: Acknowledged, what: str, *, zombie: bool) -> None:
        place = f"task {result.task} of round {ack.round}, by {result.member}"
        data = self._objects.read(fleet_keys.rollout_key(RolloutKey(ack.round, result.task, result.attempt, result.blake3)))
        if data is None and not zombie:
            raise Violation(f"{what} acknowledges {place}, which is not in the store.")
        if data is not None and Rollouts.parse(data).versions != rollouts.versions:
            raise Violation(f"{what} trains on something else than lies in the store for {place}.")
        if rollouts.run != self._run:
            raise Violation(f"{what} trains on a rollout of another run: {place}.")
        lease = self._objects.read(fleet_keys.lease_key(AttemptId(ack.round, result.task, result.attempt)))
        if result.attempt >= 16:  # needs no lease, but only once all leases of the task are taken
            taken = [self._objects.read(fleet_keys.lease_key(AttemptId(ack.round, result.task, attempt))) for attempt in range(16)]
            if None in taken and not zombie:
                raise Violation(f"{what} trains on {place}, which has no lease and did not have to do without.")
            lease = None
        if lease is not None and (Lease.parse(lease).member, Lease.parse(lease).nonce) != (rollouts.member, rollouts.nonce):
            raise Violation(f"{what} trains on {place}, whose lease was somebody else's.")
        for seq, claimed in rollouts.versions.items():
            version = self._chain.find(seq)
            if version is None or version.digest != claimed.digest or version.step != claimed.step:
                raise Violation(f"{what} trains on {place}, made by a version {seq} that the chain does not have.")
            if not self._young_enough(ack.step, version.step):
                raise Violation(f"{what} trains on {place}, made by the version of step {version.step}: out of the budget.")
            if not version.live and not zombie:
                raise Violation(f"{what} trains on {place}, made by version {seq}, which was abandoned.")

    def _judge_loss(self, line: Line, ack: Acknowledged, what: str) -> None:
        """What an earlier writer acknowledged for this step is trained on again, as far as it is still of this history and young enough."""
        earlier = [one for (epoch, step), one in self.acknowledged.items() if step == ack.step and epoch < ack.epoch]
        if not earlier or ack.epoch != self._chain.epoch or any(one.writer_epoch != one.epoch for one in earlier):
            return
        newest = max(earlier, key=lambda one: one.epoch)
        kept = {(ack.round, result.task, result.blake3) for result in ack.results}
        kept |= {(one.place.round, one.place.task, one.place.blake3) for one in self.rejected if one.epoch <= ack.epoch}
        for result in newest.results:
            if (newest.round, result.task, result.blake3) not in kept and self._still_valid(newest, result, line):
                lost = f"task {result.task} of round {newest.round}, by {result.member}"
                raise Violation(f"{what} lost {lost}, which epoch {newest.epoch} had acknowledged for it and which still holds.")

    def _still_valid(self, ack: Acknowledged, result: AcceptedResult, line: Line) -> bool:
        data = self._objects.read(fleet_keys.rollout_key(RolloutKey(ack.round, result.task, result.attempt, result.blake3)))
        if (ack.round, result.task) in line.trained:
            return False
        if data is None:
            raise Violation(f"a rollout that epoch {ack.epoch} acknowledged for step {ack.step} was deleted while it could be needed.")
        versions = [self._chain.find(seq) for seq in Rollouts.parse(data).versions]
        return all(version is not None and version.live and self._young_enough(ack.step, version.step) for version in versions)

    def _young_enough(self, step: int, made_by: int) -> bool:
        return step - 1 - self._budget_steps <= made_by <= step - 1

"""Judges whether the rules hold. The judge sees everything, and uses none of the code that it judges."""

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
    """A rule was broken that must always hold."""


@dataclass(slots=True)
class History:
    """One line of history: what the weights of a trainer at `step` were trained on. Checkpoints keep copies of it."""

    step: int = 0
    trained: dict[tuple[int, int], int] = field(default_factory=dict)

    def copy(self) -> History:
        return History(self.step, dict(self.trained))


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A batch record, when it was written."""

    epoch: int
    step: int
    round: int
    results: tuple[AcceptedResult, ...]
    writer_epoch: int
    """The chain's epoch at that moment. If it is above `epoch`, a replaced trainer wrote the record."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A result that a trainer rejected after its acknowledgement. `in_time` says that no other trainer had taken over before."""

    epoch: int
    key: RolloutKey
    in_time: bool


class Oracle:
    """Watches the store and the trainers. Raises `Violation` when a rule is broken.

    Parameters
    ----------
    run
        The run's id.
    chain
        The chain.
    objects
        The content of the store.
    budget
        The staleness budget of the run.
    trainers_own
        The name of results that trainers make themselves, without a lease. None: there are none.
    """

    def __init__(self, run: str, chain: ChainModel, objects: Objects, budget: StalenessBudget, *, trainers_own: str | None = None) -> None:
        self._trainers_own = trainers_own
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
        acknowledged = fleet_keys.parse_batch_key(key)
        if acknowledged is None:
            return
        epoch, step = acknowledged
        batch = BatchRecord.parse(data)
        listed = self._objects.read(batch.accepted.key)
        if listed is None:
            raise Violation(f"step {step} of epoch {epoch} is acknowledged, but the list of its results does not exist.")
        accepted = Accepted.parse(listed)
        self.acknowledged[epoch, step] = Acknowledged(epoch, step, batch.round, accepted.results, self._chain.epoch)

    def trains(self, history: History, epoch: int, step: int, rollouts: Sequence[Rollouts]) -> None:
        """Judge what a trainer of this epoch is about to train on in this step.

        A trainer that was replaced without noticing is judged too, within its own line of history.
        """
        what = f"step {step} of epoch {epoch}"
        ack = self.acknowledged.get((epoch, step))
        if ack is None:
            raise Violation(f"{what} is trained, but was not acknowledged.")
        if step != history.step + 1:
            raise Violation(f"{what} is trained after step {history.step}.")
        results = self._not_rejected(ack, what)
        if sorted((one.task, one.attempt, one.member) for one in rollouts) != [(r.task, r.attempt, r.member) for r in results]:
            raise Violation(f"{what} is trained on other rollouts than were acknowledged.")
        self._judge_round(ack.round, step, what)
        by_task = {one.task: one for one in rollouts}
        for result in results:
            self._judge(by_task[result.task], result, ack, what, replaced=epoch != self._chain.epoch)
            before = history.trained.get((ack.round, result.task))
            if before is not None:
                raise Violation(
                    f"{what} trains on task {result.task} of round {ack.round}, as step {before} of the same line of history did."
                )
        self._judge_loss(history, ack, what)
        for result in results:
            history.trained[ack.round, result.task] = step
        history.step = step
        self.accepted += len(results)
        self.tokens += sum(one.tokens for one in rollouts)

    def _not_rejected(self, ack: Acknowledged, what: str) -> list[AcceptedResult]:
        """Return the acknowledged results without the rejected ones. None of them may be one that an earlier trainer rejected in time."""
        by_key = {RolloutKey(ack.round, result.task, result.attempt, result.blake3): result for result in ack.results}
        for one in self.rejected:
            if one.key in by_key and one.in_time and one.epoch < ack.epoch:
                raise Violation(f"{what} acknowledges task {one.key.task} of round {ack.round}, which epoch {one.epoch} had rejected.")
        own = {one.key for one in self.rejected if one.epoch == ack.epoch}
        return [result for key, result in by_key.items() if key not in own]

    def _judge_round(self, number: int, step: int, what: str) -> None:
        record = self._objects.read(fleet_keys.round_key(number))
        if record is None or Round.parse(record).for_step != step:
            raise Violation(f"{what} trains on round {number}, which is not for it.")

    def _judge(self, rollouts: Rollouts, result: AcceptedResult, ack: Acknowledged, what: str, *, replaced: bool) -> None:
        which = f"task {result.task} of round {ack.round}, by {result.member}"
        data = self._objects.read(fleet_keys.rollout_key(RolloutKey(ack.round, result.task, result.attempt, result.blake3)))
        if data is None and not replaced:
            raise Violation(f"{what} acknowledges {which}, which is not in the store.")
        if data is not None and Rollouts.parse(data).versions != rollouts.versions:
            raise Violation(f"{what} trains on other bytes than the store has for {which}.")
        if rollouts.run != self._run:
            raise Violation(f"{what} trains on a rollout of another run: {which}.")
        lease = self._objects.read(fleet_keys.lease_key(AttemptId(ack.round, result.task, result.attempt)))
        if result.attempt >= 16:  # such an attempt needs no lease, but only after all leases of the task were taken
            taken = [self._objects.read(fleet_keys.lease_key(AttemptId(ack.round, result.task, attempt))) for attempt in range(16)]
            if None in taken and not replaced and result.member != self._trainers_own:
                raise Violation(f"{what} trains on {which}, which has no lease, while leases of its task were free.")
            lease = None
        if lease is not None and (Lease.parse(lease).member, Lease.parse(lease).nonce) != (rollouts.member, rollouts.nonce):
            raise Violation(f"{what} trains on {which}, whose lease belongs to another member.")
        for seq, claimed in rollouts.versions.items():
            version = self._chain.find(seq)
            if version is None or version.digest != claimed.digest or version.step != claimed.step:
                raise Violation(f"{what} trains on {which}, made by a version {seq} that the chain does not have.")
            if not self._is_within_budget(ack.step, version.step):
                raise Violation(f"{what} trains on {which}, made by the version of step {version.step}, which is outside the budget.")
            if not version.live and not replaced:
                raise Violation(f"{what} trains on {which}, made by version {seq}, which was abandoned.")

    def _judge_loss(self, history: History, ack: Acknowledged, what: str) -> None:
        """Check that the step trains again on all that an earlier trainer acknowledged for it, as far as that is still valid."""
        earlier = [one for (epoch, step), one in self.acknowledged.items() if step == ack.step and epoch < ack.epoch]
        if not earlier or ack.epoch != self._chain.epoch or any(one.writer_epoch != one.epoch for one in earlier):
            return
        newest = max(earlier, key=lambda one: one.epoch)
        kept = {(ack.round, result.task, result.blake3) for result in ack.results}
        kept |= {(one.key.round, one.key.task, one.key.blake3) for one in self.rejected if one.epoch <= ack.epoch}
        for result in newest.results:
            if (newest.round, result.task, result.blake3) not in kept and self._still_valid(newest, result, history):
                lost = f"task {result.task} of round {newest.round}, by {result.member}"
                raise Violation(f"{what} lost {lost}, which epoch {newest.epoch} had acknowledged for it, and which is still valid.")

    def _still_valid(self, ack: Acknowledged, result: AcceptedResult, history: History) -> bool:
        data = self._objects.read(fleet_keys.rollout_key(RolloutKey(ack.round, result.task, result.attempt, result.blake3)))
        if (ack.round, result.task) in history.trained:
            return False
        if data is None:
            raise Violation(f"a rollout that epoch {ack.epoch} acknowledged for step {ack.step} was deleted while it could be needed.")
        versions = [self._chain.find(seq) for seq in Rollouts.parse(data).versions]
        return all(version is not None and version.live and self._is_within_budget(ack.step, version.step) for version in versions)

    def _is_within_budget(self, step: int, made_by: int) -> bool:
        return step - 1 - self._budget_steps <= made_by <= step - 1

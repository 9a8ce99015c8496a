"""The trainer acknowledges batches, rejects results after that, and takes over the batches of earlier trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from ...events import emit
from ...format.records.fleet_files import Accepted, AcceptedResult, Row
from ...format.records.fleet_parts import ObjectRef
from ...format.records.trainer_records import BatchRecord, Round
from ...format.rollouts import Rollouts
from ...store import fleet_keys
from ...store.create_rule import create_steps
from ...store.fleet_keys import RolloutKey
from ...store.requests import Put
from ..rules.admission import Reason
from ..rules.round_state import RoundState
from .intake_steps import Intake
from .record_steps import Acknowledged, write_rejections
from .requests import Steps
from .trainer_context import TrainerContext


@dataclass(frozen=True, slots=True)
class Batch:
    """The results that one training step trains on. They are acknowledged, so a trainer that takes over uses them too.

    Parameters
    ----------
    step
        The training step.
    round
        The round that the results were made for.
    rows
        `rows[i]` are the rows that `rollouts[i]` was made from.
    rollouts
        The completions of each result.
    results
        `results[i]` names the object in the store that holds `rollouts[i]`, and the member that made it.
    rejected
        How many results for this step were refused, by reason.
    """

    step: int
    round: Round
    rows: tuple[tuple[Row, ...], ...]
    rollouts: tuple[Rollouts, ...]
    results: tuple[AcceptedResult, ...]
    rejected: Counter[Reason]

    def without(self, left_out: Collection[int]) -> Batch:
        """Return the batch without some of its results.

        Parameters
        ----------
        left_out
            The indices of the results to leave out.
        """
        kept = [index for index in range(len(self.results)) if index not in left_out]
        return replace(
            self,
            rows=tuple(self.rows[index] for index in kept),
            rollouts=tuple(self.rollouts[index] for index in kept),
            results=tuple(self.results[index] for index in kept),
        )


class BatchWriter:
    """Writes the acknowledgements and rejections of one trainer.

    Parameters
    ----------
    trainer
        The trainer that trains on the batches.
    intake
        Reads the results, and remembers the rejected ones.
    """

    def __init__(self, trainer: TrainerContext, intake: Intake) -> None:
        self._trainer = trainer
        self._intake = intake

    def acknowledge(self, state: RoundState) -> Steps[Batch]:
        """Record which results the step trains on, and return them. The trainer may train on them only after that."""
        trainer = self._trainer
        step = state.record.for_step
        if state.acknowledgement is not None:
            yield from trainer.look_for_fence()
        else:
            accepted = Accepted(state.record.round, _accepted_results(state)).to_bytes()
            digest = blake3(accepted).hexdigest()
            reference = ObjectRef(fleet_keys.accepted_key(state.record.round, digest), len(accepted), digest)
            yield from trainer.look_for_fence(Put(reference.key, accepted))  # nothing refers to this object yet
            record = BatchRecord(trainer.run, trainer.epoch, step, state.record.round, trainer.draw_nonce(), reference, trainer.clock())
            state.acknowledgement = trainer.keyring.sign(record).to_bytes()
        found = yield from create_steps(fleet_keys.batch_key(trainer.epoch, step), state.acknowledgement)
        if found != state.acknowledgement:
            trainer.halt(trainer.epoch)
        state.closed = True
        taken = [(one, task.rollouts) for task in state.tasks if (one := task.accepted) is not None and task.rollouts is not None]
        rollouts = tuple(made for _, made in taken)
        results = tuple(one for one, _ in taken)
        emit(trainer.on_event, "batch-acknowledged", step=step, round=state.record.round, results=len(rollouts))
        return Batch(step, state.record, tuple(state.rows[one.task] for one in results), rollouts, results, Counter(state.rejected))

    def restore(self, state: RoundState, found: Acknowledged) -> Steps[None]:
        """Accept again what an earlier trainer acknowledged for the round, as far as it is still valid.

        An acknowledgement of this trainer's own epoch stays in force, and results that are no longer valid are rejected. For an earlier
        epoch's, this trainer writes a new one as soon as the open tasks have results.
        """
        yield from self._intake.restore(state, found.accepted)
        if found.record.epoch != self._trainer.epoch:
            return
        kept = _accepted_results(state)
        lost = [one for one in found.accepted.results if one not in kept]
        lost = [one for one in lost if RolloutKey(found.record.round, one.task, one.attempt, one.blake3) not in self._intake.left_out]
        if lost:
            yield from self.reject(found.record.step, found.record.round, lost, "it no longer passes the trainer's checks")
        state.acknowledgement = found.data

    def reject(self, step: int, number: int, results: Sequence[AcceptedResult], why: str) -> Steps[None]:
        """Record that these results of round `number` are left out of training step `step`."""
        trainer = self._trainer
        named = [(one.task, one.attempt, one.blake3) for one in results]
        yield from write_rejections(trainer.run, trainer.epoch, step, number, named, why, trainer.clock(), trainer.keyring)
        self._intake.left_out |= {RolloutKey(number, *one): why for one in named}


def _accepted_results(state: RoundState) -> tuple[AcceptedResult, ...]:
    return tuple(task.accepted for task in state.tasks if task.accepted is not None)

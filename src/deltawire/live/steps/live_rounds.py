"""Opens rounds with live tasks: the moment at which interactions are joined for good (docs/protocol.md §13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import StoreError
from ...events import emit
from ...fleet.rules.live_tasks import LiveRow
from ...fleet.steps.coordinator_steps import CoordinatorSteps
from ...fleet.steps.requests import Steps
from ...format.records.fleet_files import Row
from ...format.records.trainer_records import Round, Sampling
from ..rules.join import Pending
from .joiner_steps import JoinerSteps

_SWEEP_EVERY = 16
"""Files are swept after this many rounds."""


class LiveRounds:
    """Opens the rounds of one trainer with interactions of its run.

    Parameters
    ----------
    joiner
        Joins interactions and feedback.
    fits
        Tells whether training can use an interaction.
    """

    def __init__(self, joiner: JoinerSteps, fits: Callable[[Pending], bool] = lambda pending: True) -> None:
        self.joiner = joiner
        self._fits = fits
        self._reserved: dict[int, list[LiveRow]] = {}
        self._opened = 0

    def open(
        self,
        fleet: CoordinatorSteps,
        others: Callable[[int], Sequence[Sequence[Row]]],
        *,
        for_step: int,
        sampling: Sampling,
        most: int,
        least: int = 0,
    ) -> Steps[Round | None]:
        """Open a round for a training step, or return the one that is open. Return None if too few interactions have their rewards.

        Once rows were chosen for a step, a call that is repeated after an error chooses the same rows. So two rounds that name the same
        interaction are for the same step.

        Parameters
        ----------
        fleet
            The coordinator's steps.
        others
            Called with the number of live tasks. Returns the rows of the other tasks.
        for_step
            The training step.
        sampling
            How members draw completions.
        most
            The most live tasks.
        least
            The fewest live tasks with which a round is opened.
        """
        if for_step in fleet.rounds:
            return fleet.rounds[for_step].record
        if for_step not in self._reserved:
            yield from fleet.live_tasks.learn()
            owners = fleet.open_rounds.owners
            yield from self.joiner.look(owners)
            rows = yield from self.joiner.take(
                most,
                step=for_step,
                oldest_step=fleet.trainer.budget.oldest_step(for_step),
                newest_step=fleet.newest.step,
                owners=owners,
                reserved={row.item for each in self._reserved.values() for row in each},
                fits=self._fits,
            )
            if len(rows) < least:
                return None
            self._reserved[for_step] = rows
        chosen = self._reserved[for_step]
        tasks = [*others(len(chosen)), *([row.plain()] for row in chosen)]
        if not tasks:
            del self._reserved[for_step]
            return None
        record = yield from fleet.open_round(tasks, for_step=for_step, sampling=sampling)
        del self._reserved[for_step]
        yield from fleet.live_tasks.learn()  # another trainer may have opened a round just before, with the same interactions
        self.joiner.taken([row for row in chosen if fleet.open_rounds.owners.allows(row, for_step)])
        emit(fleet.trainer.on_event, "live-joined", round=record.round, step=for_step, results=len(chosen))
        self._opened += 1
        if self._opened % _SWEEP_EVERY == 1:
            try:
                yield from fleet.trainer.look_for_fence()
                yield from self.joiner.sweep(fleet.open_rounds.owners)
            except StoreError as error:
                emit(fleet.trainer.on_event, "sweep-failed", error=str(error))
        return record

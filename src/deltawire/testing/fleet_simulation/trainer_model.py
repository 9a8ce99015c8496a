"""A trainer around the real coordinator: it opens rounds, collects, trains, publishes and saves checkpoints.

It may die or be replaced at any point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import DeltawireError
from ...fleet.options import FleetOptions
from ...fleet.rules.scheduler import Scheduler
from ...fleet.rules.staleness import KnownVersion, StalenessBudget
from ...fleet.steps.coordinator_steps import CoordinatorSteps
from ...fleet.steps.trainer_context import TrainerContext
from ...format.records.trainer_records import Sampling
from ...store import keys
from ...store.requests import Create, Sleep
from .chain_model import ChainModel
from .oracle import History, Oracle
from .store_model import Objects

_SAMPLING = Sampling(samples=2, max_tokens=16)


@dataclass(frozen=True, slots=True)
class ExternalAction:
    """Do something outside this process after `seconds`. The answer is what `action` returns. Fails with what it raises."""

    seconds: float
    action: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run.

    Parameters
    ----------
    run
        The run's id.
    last_step
        The last training step.
    tasks
        How many tasks each round has.
    rows
        How many rows each task has.
    budget
        The staleness budget.
    options
        How the trainer runs the fleet.
    train_seconds
        How long training a step takes.
    checkpoint_every
        After how many steps a checkpoint is saved.
    polls_while_training
        Whether the trainer polls the fleet while it trains.
    untrainable
        How many of 16 results fail in training, and are rejected after their acknowledgement.
    scheduler
        Makes what decides how many tasks each member is offered.
    """

    run: str
    last_step: int
    tasks: int
    rows: int
    budget: StalenessBudget
    options: FleetOptions
    train_seconds: float
    checkpoint_every: int
    polls_while_training: bool = True
    untrainable: int = 0
    scheduler: Callable[[], Scheduler] = Scheduler


@dataclass(slots=True)
class TrainerModel:
    """One trainer process. `checkpoints` remain when it dies."""

    plan: Plan
    chain: ChainModel
    objects: Objects
    oracle: Oracle
    checkpoints: dict[int, History]
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    ticks: Callable[[], float]
    coordinator: CoordinatorSteps | None = None

    def program(self, resume_step: int) -> Generator[Any, Any, None]:
        """Run the trainer until the last step is published."""
        history = self.checkpoints[resume_step].copy() if self.checkpoints else History()
        epoch = yield ExternalAction(0.1, self._claim_epoch)
        newest: KnownVersion | None = yield ExternalAction(0.2, lambda: self.chain.fence(epoch, resume_step))
        for step in [step for step in self.checkpoints if step > resume_step]:
            del self.checkpoints[step]
        if newest is None:
            newest = yield ExternalAction(0.2, lambda: self.chain.publish(epoch, 0))
            self.checkpoints[0] = history.copy()
        trainer = TrainerContext(
            run=self.plan.run,
            epoch=epoch,
            draw_nonce=self.draw_nonce,
            clock=self.clock,
            budget=self.plan.budget,
            options=self.plan.options,
        )
        fleet = self.coordinator = CoordinatorSteps(trainer, newest=newest, ticks=self.ticks, scheduler=self.plan.scheduler())
        yield from self._retry(fleet.resume)
        while history.step < self.plan.last_step:
            yield from self._train(fleet, history)
        yield from self._retry(fleet.stop)

    def _train(self, fleet: CoordinatorSteps, history: History) -> Generator[Any, Any, None]:
        """Do one training step: open its round and those ahead, collect, train, publish, and save a checkpoint."""
        step = history.step + 1
        for ahead in range(step, min(self.plan.budget.newest_open(history.step), self.plan.last_step) + 1):
            yield from self._retry(partial(fleet.open_round, self._rows(), for_step=ahead, sampling=_SAMPLING))
        batch = yield from self._retry(partial(fleet.collect, step))
        untrainable = [index for index in range(len(batch.results)) if int(self.draw_nonce()[0], 16) < self.plan.untrainable]
        if untrainable:
            batch = yield from self._retry(partial(fleet.reject, batch, untrainable, "training on it failed"))
        self.oracle.trains(history, fleet.epoch, step, batch.rollouts)
        yield from self._wait_for_training(fleet)
        version = yield ExternalAction(0.2, partial(self.chain.publish, fleet.epoch, step))
        fleet.published(version)
        saves = step % self.plan.checkpoint_every == 0 or step == self.plan.last_step
        if saves and fleet.epoch == self.chain.claimed:  # a replaced trainer does not overwrite the checkpoints of its successor
            self.checkpoints[step] = history.copy()

    def _wait_for_training(self, fleet: CoordinatorSteps) -> Generator[Any, Any, None]:
        """Wait while a step is trained. Poll the fleet meanwhile, as `Coordinator` does in the background, and ignore errors there."""
        end = self.ticks() + self.plan.train_seconds
        while (left := end - self.ticks()) > 0:
            yield Sleep(min(left, self.plan.options.poll_seconds))
            if self.plan.polls_while_training:
                with contextlib.suppress(DeltawireError):
                    yield from fleet.poll()

    def _retry(self, steps: Callable[[], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
        """Run steps, and run them again after every retryable error."""
        while True:
            try:
                return (yield from steps())
            except DeltawireError as error:
                if not error.retryable:
                    raise
            yield Sleep(1.0)

    def _claim_epoch(self) -> int:
        """Claim an epoch as a publisher does, and write its record, which the fleet looks for."""
        epoch = self.chain.claim()
        self.objects.perform(Create(keys.epoch_key(epoch), b"{}"))
        return epoch

    def _rows(self) -> list[list[dict[str, Any]]]:
        return [[{"prompt": "1"}] * self.plan.rows for _ in range(self.plan.tasks)]

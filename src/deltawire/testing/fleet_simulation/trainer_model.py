"""A trainer around the real coordinator: it opens rounds, collects, trains, publishes and saves checkpoints.

It may die or be replaced at any point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import DeltawireError, Fenced, FleetTimeout
from ...fleet.options import FleetOptions
from ...fleet.rules.scheduler import Scheduler
from ...fleet.rules.staleness import KnownVersion, StalenessBudget
from ...fleet.steps.batch_steps import Batch
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

    `options.keep_steps` must be at least `checkpoint_every` (ValueError). A trainer that dies before it has saved the checkpoint of the
    newest version is resumed from the one before, and finds what was acknowledged only as far back as `keep_steps`
    (docs/protocol.md §10, "Sweeping"). `GrpoTrainer` refuses settings of which it does not find everything, too.

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
    publishes_beside
        Whether the trainer collects for the next step while it publishes a version.
    upload_seconds
        How long the trainer encodes and uploads a version.
    commit_seconds
        How long the commit takes after that, and how long until the trainer knows that it landed.
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
    publishes_beside: bool = False
    upload_seconds: float = 0.0
    commit_seconds: float = 0.2

    def __post_init__(self) -> None:
        if self.options.keep_steps < self.checkpoint_every:
            raise ValueError(f"keep_steps={self.options.keep_steps} must be at least checkpoint_every={self.checkpoint_every}")


@dataclass(slots=True)
class _InFlight:
    """A version that is being published, and the history that its checkpoint will hold."""

    history: History
    version: KnownVersion | None = None
    error: Fenced | None = None

    @property
    def is_over(self) -> bool:
        return self.version is not None or self.error is not None


@dataclass(slots=True)
class TrainerModel:
    """One trainer process. `checkpoints` remain when it dies. `spawn` runs steps in another thread of the process."""

    plan: Plan
    chain: ChainModel
    objects: Objects
    oracle: Oracle
    checkpoints: dict[int, History]
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    ticks: Callable[[], float]
    spawn: Callable[[Generator[Any, Any, None]], Any]
    coordinator: CoordinatorSteps | None = None
    _in_flight: _InFlight | None = None

    def program(self, resume_step: int) -> Generator[Any, Any, None]:
        """Run the trainer until the last step is published."""
        history = self.checkpoints[resume_step].copy() if self.checkpoints else self.first_history()
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
        fleet = self.coordinator = CoordinatorSteps(
            trainer, newest=newest, ticks=self.ticks, scheduler=self.plan.scheduler(), ask_newest=self._newest
        )
        yield from self._retry(fleet.resume)
        while history.step < self.plan.last_step:
            yield from self._train(fleet, history)
        yield from self._retry(fleet.stop)

    def _train(self, fleet: CoordinatorSteps, history: History) -> Generator[Any, Any, None]:
        """Do one training step: open its round and those ahead, collect, train, publish, and save a checkpoint."""
        step = history.step + 1
        batch = yield from self._collect(fleet, step)
        untrainable = [index for index in range(len(batch.results)) if int(self.draw_nonce()[0], 16) < self.plan.untrainable]
        if untrainable:
            batch = yield from self._retry(partial(fleet.reject, batch, untrainable, "training on it failed"))
        self.judge(history, fleet.epoch, step, batch)
        yield from self._wait_for_training(fleet, step)
        yield from self._settle(fleet)  # only one version is in flight
        self._in_flight = flight = _InFlight(history.copy())
        publication = self._publish(flight, fleet.epoch, step)
        if self.plan.publishes_beside and self.plan.budget.steps > 0 and step < self.plan.last_step:
            self.spawn(publication)
        else:
            yield from publication
            yield from self._settle(fleet)

    def first_history(self) -> History:
        """Return the history of a run that has not trained yet."""
        return History()

    def judge(self, history: History, epoch: int, step: int, batch: Batch) -> None:
        """Let the oracle judge what this trainer is about to train on."""
        self.oracle.trains(history, epoch, step, batch.rollouts)

    def _collect(self, fleet: CoordinatorSteps, step: int) -> Generator[Any, Any, Any]:
        """Collect the results of a step. Note versions that are published meanwhile, and open rounds as soon as the budget allows."""
        while True:
            if self._has_news():
                yield from self._settle(fleet)
            yield from self._open_rounds(fleet, step, further=0 if self.plan.polls_while_training else 1)
            try:
                return (yield from self._retry(partial(fleet.collect, step, stop=self._has_news)))
            except FleetTimeout:
                pass

    def _open_rounds(self, fleet: CoordinatorSteps, step: int, *, further: int) -> Generator[Any, Any, None]:
        for ahead in range(step, min(self.plan.budget.newest_open(fleet.newest.step) + further, self.plan.last_step) + 1):
            yield from self._retry(partial(fleet.open_round, self._rows(), for_step=ahead, sampling=_SAMPLING))

    def _publish(self, flight: _InFlight, epoch: int, step: int) -> Generator[Any, Any, None]:
        """Publish a version. Keep the error for the trainer's own thread."""
        try:
            yield Sleep(self.plan.upload_seconds)
            flight.version = yield ExternalAction(self.plan.commit_seconds, partial(self.chain.publish, epoch, step))
        except Fenced as error:
            flight.error = error

    def _settle(self, fleet: CoordinatorSteps) -> Generator[Any, Any, None]:
        """Wait until the version in flight is published, and save a checkpoint."""
        while self._in_flight is not None and not self._in_flight.is_over:
            yield Sleep(self.plan.commit_seconds / 4)
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if flight.error is not None:
            raise flight.error
        assert flight.version is not None
        fleet.published(flight.version)
        step = flight.version.step
        saves = step % self.plan.checkpoint_every == 0 or step == self.plan.last_step
        if saves and fleet.epoch == self.chain.claimed:  # a replaced trainer does not overwrite the checkpoints of its successor
            self.checkpoints[step] = flight.history

    def _has_news(self) -> bool:
        return self._in_flight is not None and self._in_flight.is_over

    def _newest(self) -> KnownVersion | None:
        return None if self._in_flight is None else self._in_flight.version

    def _wait_for_training(self, fleet: CoordinatorSteps, step: int) -> Generator[Any, Any, None]:
        """Wait while a step is trained. Poll the fleet meanwhile, as `Coordinator` does in the background, and ignore errors there.

        One round is opened ahead of its turn, as `GrpoTrainer` does.
        """
        end = self.ticks() + self.plan.train_seconds
        while (left := end - self.ticks()) > 0:
            yield Sleep(min(left, self.plan.options.poll_seconds))
            if self.plan.polls_while_training:
                with contextlib.suppress(DeltawireError):
                    yield from fleet.poll()
                if self._has_news():
                    yield from self._settle(fleet)
                yield from self._open_rounds(fleet, step + 1, further=1)

    def _retry(self, steps: Callable[[], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
        """Run steps, and run them again after every retryable error, except if they were told to stop."""
        while True:
            try:
                return (yield from steps())
            except FleetTimeout:
                raise
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

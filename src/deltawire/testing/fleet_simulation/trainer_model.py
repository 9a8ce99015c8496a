"""A trainer around the real coordinator: opens rounds, collects, trains, publishes, checkpoints. It may die, or be replaced, anywhere."""

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
from ...format.records.trainer_records import Sampling
from ...store import keys
from ...store.requests import Create, Sleep
from .chain_model import ChainModel
from .oracle import Line, Oracle
from .store_model import Objects

_SAMPLING = Sampling(samples=2, max_tokens=16)


@dataclass(frozen=True, slots=True)
class Do:
    """→ what the action returns, or raises: something that takes place outside this process, after so many seconds."""

    seconds: float
    action: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do."""

    run: str
    last_step: int
    tasks: int
    rows: int
    budget: StalenessBudget
    options: FleetOptions
    train_seconds: float
    checkpoint_every: int
    looked_after: bool = True
    spoiled: int = 0
    """How many of 16 results fail in training, and are rejected after their acknowledgement."""


@dataclass(slots=True)
class TrainerModel:
    """One trainer process, from its start on. `checkpoints` outlives it."""

    plan: Plan
    chain: ChainModel
    objects: Objects
    oracle: Oracle
    checkpoints: dict[int, Line]
    draw_nonce: Callable[[], str]
    clock: Callable[[], int]
    ticks: Callable[[], float]
    coordinator: CoordinatorSteps | None = None

    def program(self, resume_step: int) -> Generator[Any, Any, None]:
        """Everything that it does. Returns when the last step is published."""
        line = self.checkpoints[resume_step].copy() if self.checkpoints else Line()
        epoch = yield Do(0.1, self._claim_epoch)
        newest: KnownVersion | None = yield Do(0.2, lambda: self.chain.fence(epoch, resume_step))
        for step in [step for step in self.checkpoints if step > resume_step]:
            del self.checkpoints[step]
        if newest is None:
            newest = yield Do(0.2, lambda: self.chain.publish(epoch, 0))
            self.checkpoints[0] = line.copy()
        fleet = self.coordinator = CoordinatorSteps(
            run=self.plan.run,
            epoch=epoch,
            newest=newest,
            draw_nonce=self.draw_nonce,
            clock=self.clock,
            ticks=self.ticks,
            budget=self.plan.budget,
            scheduler=Scheduler(),
            options=self.plan.options,
        )
        yield from self._until_it_works(fleet.resume)
        while line.step < self.plan.last_step:
            yield from self._train(fleet, line)
        yield from self._until_it_works(fleet.stop)

    def _train(self, fleet: CoordinatorSteps, line: Line) -> Generator[Any, Any, None]:
        """One step of training, from opening its round, and those that may be opened with it, to the checkpoint."""
        step = line.step + 1
        for ahead in range(step, min(self.plan.budget.newest_open(line.step), self.plan.last_step) + 1):
            yield from self._until_it_works(partial(fleet.open_round, self._rows(), for_step=ahead, sampling=_SAMPLING))
        batch = yield from self._until_it_works(partial(fleet.collect, step))
        spoiled = [index for index in range(len(batch.results)) if int(self.draw_nonce()[0], 16) < self.plan.spoiled]
        if spoiled:
            batch = yield from self._until_it_works(partial(fleet.reject, batch, spoiled, "training on it failed"))
        self.oracle.trains(line, fleet.epoch, step, batch.rollouts)
        yield from self._while_training(fleet)
        version = yield Do(0.2, partial(self.chain.publish, fleet.epoch, step))
        fleet.published(version)
        saves = step % self.plan.checkpoint_every == 0 or step == self.plan.last_step
        if saves and fleet.epoch == self.chain.claimed:  # where zombies keep their checkpoints is not the fleet's business
            self.checkpoints[step] = line.copy()

    def _while_training(self, fleet: CoordinatorSteps) -> Generator[Any, Any, None]:
        """The fleet is looked after meanwhile, as `Coordinator` does in the background: what goes wrong there stays there."""
        left = self.plan.train_seconds
        while left > 0:
            pause = min(left, self.plan.options.poll_seconds)
            yield Sleep(pause)
            left -= pause
            if self.plan.looked_after:
                with contextlib.suppress(DeltawireError):
                    yield from fleet.poll()

    def _until_it_works(self, steps: Callable[[], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
        while True:
            try:
                return (yield from steps())
            except DeltawireError as error:
                if not error.retryable:
                    raise
            yield Sleep(1.0)

    def _claim_epoch(self) -> int:
        """What a publisher does first, told to the store as the fleet will look for it."""
        epoch = self.chain.claim()
        self.objects.perform(Create(keys.epoch_key(epoch), b"{}"))
        return epoch

    def _rows(self) -> list[list[dict[str, Any]]]:
        return [[{"prompt": "1"}] * self.plan.rows for _ in range(self.plan.tasks)]

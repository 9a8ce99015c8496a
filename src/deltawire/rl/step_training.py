"""Train on the results of one step. Results that fail are rejected, so that the step continues without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import TrainingFailed
from ..events import OnEvent, emit
from ..fleet.coordinator import Coordinator
from ..fleet.steps.batch_steps import Batch
from .batches import TrainingBatch
from .settings import GrpoSettings
from .update import PolicyUpdate, Updated, one_line


class StepTraining:
    """Updates the policy with the results of each step, and rejects the results that it cannot train on.

    Parameters
    ----------
    update
        Updates the policy.
    coordinator
        Records the results that are rejected.
    optimizer
        The optimizer of the policy.
    lr_scheduler
        Is stepped once after each trained step.
    settings
        How to train.
    sets_learning_rate
        Set the optimizer's learning rate from the settings, with warm-up. False for an optimizer of the caller.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        update: PolicyUpdate,
        coordinator: Coordinator,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        settings: GrpoSettings,
        *,
        sets_learning_rate: bool,
        on_event: OnEvent | None,
    ) -> None:
        self._update = update
        self._coordinator = coordinator
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._settings = settings
        self._sets_learning_rate = sets_learning_rate
        self._on_event = on_event
        self._skipped = 0

    def train(self, collected: Batch) -> tuple[Batch, TrainingBatch | None, Updated | None]:
        """Train on the acknowledged results that work. Rejected results are recorded in the store before the others are trained on.

        Raises `TrainingFailed` if too many steps in a row had no usable result, or if the weights are not finite. The rollouts are rejected
        first in both cases, so that a restarted trainer continues without them.
        """
        why = "no result was left"
        while collected.rollouts:
            self._set_learning_rate(collected.step)
            try:
                batch = self._update.batch(collected.rollouts, collected.step)
                updated = self._update.apply(batch)
            except TrainingFailed as error:
                self._coordinator.reject(collected, range(len(collected.results)), error.message)
                raise
            except Exception as error:
                why = one_line(error)  # only the text: a traceback would keep the batch in memory
            else:
                if self._lr_scheduler is not None:
                    self._lr_scheduler.step()
                if updated.skipped is not None:
                    emit(self._on_event, "iterations-skipped", step=collected.step, why=updated.skipped)
                self._skipped = 0
                return collected, batch, updated
            failing = self._update.failing_alone(collected.rollouts, collected.step)
            if not failing:
                failing = dict.fromkeys(range(len(collected.results)), f"training on all results together failed: {why}")
            collected = self._reject(collected, failing)
        self._skipped += 1
        emit(self._on_event, "step-skipped", step=collected.step, why=why)
        if self._skipped > self._settings.max_skipped_steps:
            raise TrainingFailed(f"training failed on the rollouts of {self._skipped} steps in a row; the last time: {why}.")
        return collected, None, None

    def _reject(self, collected: Batch, failing: Mapping[int, str]) -> Batch:
        """Record that the step rejects results, given by index and reason. Return the batch without them."""
        rejected = collected.rejected
        for why in sorted(set(failing.values())):
            which = [index for index, each in failing.items() if each == why]
            rejected = self._coordinator.reject(collected, which, why).rejected
        return replace(collected.without(failing.keys()), rejected=rejected)

    def _set_learning_rate(self, step: int) -> None:
        if self._sets_learning_rate:
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * min(1.0, step / max(1, self._settings.warmup_steps))

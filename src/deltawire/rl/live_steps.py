"""The part of live traffic in the rounds of a GRPO trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..events import OnEvent
from ..fleet.coordinator import Coordinator
from ..fleet.rules.training_limits import TrainingLimits
from ..fleet.steps.coordinator_steps import CoordinatorSteps
from ..fleet.steps.requests import Steps
from ..format.records.fleet_files import Row
from ..format.records.trainer_records import Round, Sampling
from ..live import LiveTraffic, Pending
from ..live.steps.live_rounds import LiveRounds
from .settings import GrpoSettings


class LiveShare:
    """Opens rounds of which a part comes from live traffic.

    Parameters
    ----------
    traffic
        The live traffic of the run.
    share
        The part of a step's completions that comes from live traffic, above 0 and at most 1.
    coordinator
        The trainer's coordinator.
    settings
        How to train.
    limits
        What the model can be trained on.
    on_event
        Called with every event.
    """

    def __init__(
        self,
        traffic: LiveTraffic,
        share: float,
        coordinator: Coordinator,
        settings: GrpoSettings,
        limits: TrainingLimits,
        on_event: OnEvent | None,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError("live_share must be above 0 and at most 1")
        self._traffic = traffic
        self._coordinator = coordinator
        self._settings = settings
        self._limits = limits
        self._on_event = on_event
        self._rounds: LiveRounds | None = None
        self.is_all = share == 1
        """True if nothing comes from members."""
        self._most = max(1, round(share * settings.prompts * settings.num_generations))

    def last_open(self, step: int, newest_open: int) -> int:
        """Return the last step to open a round for. Interactions are joined late, so that as many versions as possible are admitted.

        Parameters
        ----------
        step
            The last trained step.
        newest_open
            The last step that the staleness budget allows.
        """
        return min(newest_open, step + (1 if self.is_all else 2))

    def open_round(self, rows: Sequence[Row], *, for_step: int, sampling: Sampling) -> Round | None:
        """Open a round with the interactions that have their rewards. The rest of it is made of these rows.

        Returns None if the round is only for live traffic, and too few interactions have their rewards.

        Parameters
        ----------
        rows
            The rows of a whole step.
        for_step
            The training step.
        sampling
            How members draw completions.
        """

        def others(live: int) -> list[list[Row]]:
            if self.is_all:
                return []
            prompts = max(1, self._settings.prompts - live // self._settings.num_generations)
            tasks = min(self._settings.tasks, prompts)
            return [list(rows[:prompts][task::tasks]) for task in range(tasks)]

        def begin(fleet: CoordinatorSteps) -> Steps[Round | None]:
            if self._rounds is None:
                self._rounds = yield from self._opened(fleet)
            least = self._most if self.is_all else 0
            opened = yield from self._rounds.open(fleet, others, for_step=for_step, sampling=sampling, most=self._most, least=least)
            return opened

        return self._coordinator.perform(begin)

    def _opened(self, fleet: CoordinatorSteps) -> Steps[LiveRounds]:
        trainer = fleet.trainer
        joiner = yield from self._traffic.open(trainer.run, trainer.keyring, ticks=time.monotonic, on_event=self._on_event)
        return LiveRounds(joiner, self._fits)

    def _fits(self, pending: Pending) -> bool:
        """Return whether an interaction can be trained on: it was sampled as the trainer assumes, and is not too long."""
        length = pending.prompt_tokens + pending.tokens
        return (
            (pending.temperature, pending.top_p) == (self._settings.temperature, self._settings.top_p)
            and pending.tokens <= self._settings.max_completion_length
            and (self._limits.positions is None or length <= self._limits.positions)
        )

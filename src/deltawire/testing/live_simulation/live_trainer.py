"""A trainer around the real coordinator and the real joiner of live traffic."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import FleetTimeout
from ...fleet.steps.coordinator_steps import CoordinatorSteps
from ...format.records.fleet_files import Row
from ...format.records.trainer_records import Sampling
from ...live.steps.joiner_steps import JoinerOptions, JoinerSteps
from ...live.steps.live_rounds import LiveRounds
from ...store.requests import Sleep
from ..fleet_simulation.trainer_model import TrainerModel
from .users import METRICS

_SAMPLING = Sampling(samples=2, max_tokens=16)


@dataclass(slots=True)
class LiveTrainerModel(TrainerModel):
    """One trainer process that learns from users, and from members if the plan has tasks for them.

    Parameters
    ----------
    most
        The most interactions of a step.
    retention
        Seconds after which files are deleted.
    """

    most: int = 4
    retention: float = 300.0
    rounds: LiveRounds | None = None

    def _collect(self, fleet: CoordinatorSteps, step: int) -> Generator[Any, Any, Any]:
        while True:
            if self._has_news():
                yield from self._settle(fleet)
            yield from self._open_rounds(fleet, step, further=0)
            if step not in fleet.rounds:
                yield Sleep(3.0)
                continue
            try:
                return (yield from self._retry(partial(fleet.collect, step, stop=self._has_news)))
            except FleetTimeout:
                pass

    def _open_rounds(self, fleet: CoordinatorSteps, step: int, *, further: int) -> Generator[Any, Any, None]:
        if self.rounds is None:
            joiner = JoinerSteps(self.plan.run, METRICS, JoinerOptions(retention=self.retention), self.ticks)
            self.rounds = LiveRounds(joiner)
        last = min(self.plan.budget.newest_open(fleet.newest.step) + further, self.plan.last_step, step + 1)
        for ahead in range(step, last + 1):
            opening = partial(self.rounds.open, fleet, self._others, for_step=ahead, sampling=_SAMPLING, most=self.most, least=1)
            yield from self._retry(opening)

    def _others(self, live: int) -> list[list[Row]]:
        return [[{"prompt": "1"}] for _ in range(self.plan.tasks)]

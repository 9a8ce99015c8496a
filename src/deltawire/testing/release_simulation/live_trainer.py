"""A trainer that learns from live traffic, around the real coordinator and the real joiner."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...fleet.fleet_keyring import FleetKeyring
from ...fleet.steps.batch_steps import Batch
from ...fleet.steps.coordinator_steps import CoordinatorSteps
from ...format.records.live_records import Metric
from ...format.records.trainer_records import Round, Sampling
from ...live.steps.joiner_steps import JoinerOptions, JoinerSteps
from ...live.steps.live_rounds import LiveRounds
from ...live.steps.metric_steps import declare_metrics
from ...store.requests import Sleep
from ..fleet_simulation.oracle import History
from ..fleet_simulation.trainer_model import TrainerModel
from .live_oracle import LiveHistory, LiveOracle

_SAMPLING = Sampling(samples=2, max_tokens=16)


@dataclass(slots=True)
class LiveTrainerModel(TrainerModel):
    """A trainer process whose rounds have live tasks.

    Parameters
    ----------
    live
        Judges what holds for live traffic.
    metrics
        The metrics that the trainer declares.
    retention
        Seconds after which it deletes files of live traffic.
    most
        How many live tasks each step has. There are no other tasks.
    """

    live: LiveOracle = field(kw_only=True)
    metrics: Sequence[Metric] = field(kw_only=True)
    retention: float = field(kw_only=True)
    most: int = field(kw_only=True)
    _rounds: LiveRounds | None = None

    def first_history(self) -> History:
        return LiveHistory()

    def judge(self, history: History, epoch: int, step: int, batch: Batch) -> None:
        assert isinstance(history, LiveHistory)
        self.live.trains(history, epoch, step, batch.rows, batch.rollouts)

    def _collect(self, fleet: CoordinatorSteps, step: int) -> Generator[Any, Any, Any]:
        while step not in fleet.rounds:
            if self._has_news():
                yield from self._settle(fleet)
            yield from self._open_rounds(fleet, step, further=0)
            if step not in fleet.rounds:  # too few interactions have their rewards
                yield Sleep(5.0)
        return (yield from TrainerModel._collect(self, fleet, step))

    def _open_rounds(self, fleet: CoordinatorSteps, step: int, *, further: int) -> Generator[Any, Any, None]:
        newest = self.plan.budget.newest_open(fleet.newest.step) + further
        for ahead in range(step, min(newest, step, self.plan.last_step) + 1):
            yield from self._retry(partial(self._open, fleet, ahead))

    def _open(self, fleet: CoordinatorSteps, step: int) -> Generator[Any, Any, Round | None]:
        if self._rounds is None:
            declared = yield from declare_metrics(self.plan.run, self.metrics, FleetKeyring(), self.draw_nonce, self.clock)
            joiner = JoinerSteps(self.plan.run, declared.metrics, JoinerOptions(retention=self.retention), self.ticks)
            self._rounds = LiveRounds(joiner)
        opening = self._rounds.open(fleet, lambda live: [], for_step=step, sampling=_SAMPLING, most=self.most, least=self.most)
        return (yield from opening)

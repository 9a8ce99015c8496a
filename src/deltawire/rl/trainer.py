"""A small GRPO trainer whose rollouts come from a fleet: open rounds, collect, train, publish, and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..chain.log import ChainLog
from ..chain.version import Version
from ..errors import FleetTimeout
from ..events import OnEvent, emit
from ..fleet.batch import Batch
from ..fleet.coordinator import Coordinator
from ..fleet.options import FleetOptions
from ..fleet.scheduler import Scheduler
from ..fleet.staleness import StalenessBudget
from ..format.fleet_files import Row
from ..format.fleet_records import Sampling
from ..publish import PendingVersion, Publisher
from ..publish.attachments import Attachments
from ..state import state_digest
from ..store import Store, open_store
from ..trainers import WeightSource
from .batches import TrainingBatch, training_batch
from .checkpoints import TrainerCheckpoints
from .grpo import GrpoLoss, token_logprobs
from .resume_point import resume_point


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """A step trains on `samples` completions of each of `prompts` prompts, which the fleet gets as `tasks` tasks.

    `updates` is how many times the optimizer steps on each batch, `rows_at_once` how many completions go through the model together.
    `staleness` 0 is the synchronous mode; with 1 or more the fleet works for the next steps while this one is trained and published. A
    checkpoint is written every `checkpoint_every` steps; a trainer that dies goes on from the last one.
    """

    prompts: int = 8
    samples: int = 8
    tasks: int = 4
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    largest_gradient: float = 1.0
    updates: int = 1
    rows_at_once: int = 64
    loss: GrpoLoss = field(default_factory=GrpoLoss)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    staleness: int = 1
    checkpoint_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tasks <= self.prompts:
            raise ValueError("a step needs at least one task, and each task a prompt")
        if self.samples < 2:
            raise ValueError("GRPO compares completions of one prompt: at least 2 samples are needed")
        if min(self.updates, self.rows_at_once, self.checkpoint_every) < 1:
            raise ValueError("updates, rows_at_once and checkpoint_every are at least 1")


class GrpoTrainer:
    """Trains `model` (fp32 weights) on `rows`, with rollouts from whatever members follow the chain at `url`.

    >>> with GrpoTrainer(model, rows, "s3://bucket/run", checkpoints="checkpoints", attachments="model-directory") as trainer:
    ...     trainer.train(until=1000)
    ...     trainer.stop_members()

    Each step's weights are published as `wire_dtype`, under the number of the step; what it started with is step 0. It may be killed at any
    point. Opened again with the same arguments, it goes on from the newest checkpoint: versions after that are abandoned, rollouts that
    were acknowledged for later steps and are still valid are used. `attachments` (config.json, tokenizer) are what members build their
    model from. Every step is an event "trained", once its version is out.
    """

    def __init__(
        self,
        model: Any,
        rows: Sequence[Row],
        url: str | Path | Store,
        *,
        settings: GrpoSettings | None = None,
        checkpoints: str | Path | None = None,
        attachments: Attachments | None = None,
        fleet: FleetOptions | None = None,
        scheduler: Scheduler | None = None,
        wire_dtype: torch.dtype = torch.bfloat16,
        on_event: OnEvent | None = None,
        **publisher: Any,
    ) -> None:
        self.settings = settings or GrpoSettings()
        if len(rows) < self.settings.prompts:
            raise ValueError(f"{len(rows)} rows are fewer than the {self.settings.prompts} prompts of one step")
        self._model = model
        self._rows = rows
        self._device = next(model.parameters()).device
        self._on_event = on_event
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings.learning_rate, weight_decay=0.0)
        self._source = WeightSource(model, dtype=wire_dtype)
        self._checkpoints = None if checkpoints is None else TrainerCheckpoints(checkpoints)
        self._budget = StalenessBudget(self.settings.staleness)
        back = self.settings.checkpoint_every + self.settings.staleness + 1
        fleet = fleet or FleetOptions(keep_steps=max(back, FleetOptions().keep_steps))
        if checkpoints is not None and fleet.keep_steps < back:
            raise ValueError(f"resuming may go back by {back} steps; with keep_steps={fleet.keep_steps} it would not find its rollouts")
        self._patience = fleet.poll_seconds
        with ExitStack() as opened:  # undone in reverse if anything below fails, and by close()
            self._store = open_store(url)
            if self._store is not url:
                opened.callback(self._store.close)
            step = self._checkpoints.load_newest(model, self._optimizer) if self._checkpoints else None
            self.step = step or 0
            """The last step that was trained."""
            digest = state_digest(self._source.snapshot())
            rewind = resume_point(ChainLog(self._store), step, digest)
            if self._checkpoints is not None and step is None:
                self._checkpoints.save(0, model, self._optimizer)
            self._publisher = opened.enter_context(
                Publisher(self._store, resume_from=rewind, attachments=attachments, background=True, on_event=on_event, **publisher)
            )
            version = self._publisher.version
            if rewind is not None or version is None or version.step != self.step or version.digest != digest:
                version = _landed(self._publish())  # after a rewind too: that is what abandons the versions in between
            self._coordinator = Coordinator(
                self._store,
                epoch=self._publisher.epoch,
                signing_key=self._publisher.signing_key,
                trusted_keys=self._publisher.trusted_keys,
                budget=self._budget,
                scheduler=scheduler,
                options=fleet,
                on_event=on_event,
            )
            opened.callback(self._coordinator.close)
            self.version: Version = version
            """The newest version that is published."""
            self._on_its_way: _OnItsWay | None = None
            self._coordinator.resume()
            self._opened = opened.pop_all()

    @property
    def coordinator(self) -> Coordinator:
        """For views: who is in the fleet, and what was rejected."""
        return self._coordinator

    def train(self, *, until: int, stop: Callable[[], bool] | None = None) -> None:
        """Train up to step `until`, or until `stop` says so: then what is collected is kept for the next call, or the next trainer.

        Waits for members as long as it takes. `Fenced` if another trainer has taken over.
        """
        while self.step < until and not (stop is not None and stop()):
            started = time.monotonic()
            batch = self._collect(until, stop)
            if batch is None:
                break
            self._step(batch, idle=time.monotonic() - started)
        self._settle()

    def stop_members(self) -> None:
        """Tell all members that the run is over."""
        self._coordinator.stop()

    def close(self) -> None:
        """Let go of everything. Members wait for whoever trains next. Doing so twice is fine."""
        self._opened.close()

    def __enter__(self) -> GrpoTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    def _collect(self, until: int, stop: Callable[[], bool] | None) -> Batch | None:
        """What the next step trains on; None if `stop` came first. Meanwhile further rounds are opened as soon as they may be."""
        while True:
            if self._on_its_way is not None and self._on_its_way.version.done():
                self._settle()
            self._open_rounds(until)
            try:
                timeout = None if self._on_its_way is None else self._patience
                return self._coordinator.collect(self.step + 1, timeout=timeout, stop=stop)
            except FleetTimeout:
                if stop is not None and stop():
                    return None

    def _open_rounds(self, until: int) -> None:
        """As many as the staleness budget allows: that is all the difference between synchronous and pipelined training."""
        settings = self.settings
        assert self.version.step is not None
        for step in range(self.step + 1, min(until, self._budget.newest_open(self.version.step)) + 1):
            rows = self._rows_of(step)
            sampling = Sampling(settings.samples, settings.max_tokens, settings.temperature, settings.top_p, seed=settings.seed + step)
            self._coordinator.open_round([rows[task :: settings.tasks] for task in range(settings.tasks)], for_step=step, sampling=sampling)

    def _rows_of(self, step: int) -> list[Row]:
        """Drawn anew for each step, and the same for whoever trains it."""
        return random.Random(f"{self.settings.seed}/{step}").sample(self._rows, self.settings.prompts)

    def _step(self, collected: Batch, *, idle: float) -> None:
        started = time.monotonic()
        batch = training_batch(collected.rollouts, for_step=collected.step, weights=self.settings.reward_weights)
        measured = self._update(batch)
        self.step = collected.step
        if self._checkpoints is not None and self.step % self.settings.checkpoint_every == 0:
            self._checkpoints.save(self.step, self._model, self._optimizer)  # before it is published: see resume_point
        facts: dict[str, float] = {
            "reward": batch.rewards.nanmean().item(),
            "reward_spread": batch.rewards[~batch.rewards.isnan()].std(correction=0).item(),
            **measured,
            "tokens": batch.tokens,
            "completions": len(batch.rewards),
            "mixed": batch.mixed,
            "lag": batch.lag,
            "rejected": sum(collected.rejected.values()),
            "idle_seconds": idle,
            "train_seconds": time.monotonic() - started,
        }
        self._settle()  # one at a time, so that none is superseded
        self._on_its_way = _OnItsWay(self._publish(), time.monotonic(), facts)
        if self._budget.newest_open(self.step - 1) == self.step:
            self._settle()  # synchronous: nothing can be done without it

    def _settle(self) -> None:
        """Wait until the version that is on its way is out, and tell."""
        if self._on_its_way is None:
            return
        on_its_way, self._on_its_way = self._on_its_way, None
        self.version = version = _landed(on_its_way.version)
        self._coordinator.published(version)
        emit(
            self._on_event,
            "trained",
            step=version.step,
            seq=version.seq,
            **on_its_way.facts,
            changed=version.changed,
            bytes=version.bytes,
            state_bytes=version.state_bytes,
            publish_seconds=time.monotonic() - on_its_way.since,
        )

    def _update(self, batch: TrainingBatch) -> dict[str, float]:
        """Step the optimizer, and say what happened, averaged over all tokens of all updates."""
        settings = self.settings
        self._model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (self.step + 1) / max(1, settings.warmup_steps))
        parts = list(batch.parts(settings.rows_at_once, self._device))
        olds = [None if settings.updates == 1 else self._logprobs(part).detach() for part in parts]
        totals = {"loss": 0.0, "clip_share": 0.0, "truncated_share": 0.0, "importance": 0.0, "gradient": 0.0}
        tokens = max(1, batch.tokens)
        for _ in range(settings.updates):
            self._optimizer.zero_grad()
            for part, old in zip(parts, olds, strict=True):
                terms = settings.loss(self._logprobs(part), part.behaviour, part.advantages, part.mask, old=old, tokens=tokens)
                terms.loss.backward()
                totals["loss"] += terms.loss.item()
                totals["clip_share"] += terms.clipped / tokens
                totals["truncated_share"] += terms.truncated / tokens
                totals["importance"] += terms.weight / tokens
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.largest_gradient)
            totals["gradient"] += float(norm)
            self._optimizer.step()
        return {name: total / settings.updates for name, total in totals.items()}

    def _logprobs(self, part: TrainingBatch) -> torch.Tensor:
        return token_logprobs(self._model, part.ids, part.attention, temperature=self.settings.temperature)

    def _publish(self) -> PendingVersion:
        pending = self._source.publish(self._publisher, step=self.step)
        assert isinstance(pending, PendingVersion)
        return pending


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """The version of a step that is trained, since when it is being published, and what there is to tell of the step."""

    version: PendingVersion
    since: float
    facts: Mapping[str, float]


def _landed(pending: PendingVersion) -> Version:
    version = pending.result()
    assert version is not None  # only one is ever on its way, so it cannot have been superseded
    return version

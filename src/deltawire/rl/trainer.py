"""A small GRPO trainer whose rollouts come from a fleet: open rounds, collect, train, publish, and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch

from ..chain.log import ChainLog
from ..chain.version import Version
from ..engines.model_limits import load_prompts
from ..errors import FleetTimeout, TrainingFailed
from ..events import OnEvent, emit
from ..fleet.batch import Batch
from ..fleet.coordinator import Coordinator
from ..fleet.options import FleetOptions
from ..fleet.rules.scheduler import Scheduler
from ..fleet.rules.staleness import StalenessBudget
from ..format.records.fleet_files import Row
from ..format.records.fleet_records import Sampling
from ..format.records.signing import SigningKey
from ..publish import PendingVersion, Publisher
from ..publish.attachments.read_files import Attachments
from ..store import Store, open_store
from ..tensors.state import state_digest
from ..trainers import WeightSource
from .batches import TrainingBatch
from .checkpoints import TrainerCheckpoints
from .metrics import shown, step_metrics
from .preflight import check_rows, files_with_tokenizer, read_files, training_limits
from .report import StepReporter
from .resume_point import resume_point
from .settings import GrpoSettings
from .update import PolicyUpdate, told

Evaluate: TypeAlias = Callable[[Any, int], Mapping[str, float]]
"""Called with the model, in evaluation mode and without gradients, and the step; returns numbers by name."""


class GrpoTrainer:
    """Trains `model` (fp32 weights) on `rows`, with rollouts from whatever members follow the chain at `url`.

    >>> with GrpoTrainer(model, rows, "s3://bucket/run", checkpoints="checkpoints", attachments="model-directory") as trainer:
    ...     trainer.train(until=1000)
    ...     trainer.stop_members()

    Each step's weights are published as `dtype`, under the number of the step; what it started with is step 0. It may be killed at any
    point. Opened again with the same arguments, it goes on from the newest checkpoint: versions after that are abandoned, rollouts that
    were acknowledged for later steps and are still valid are used.

    `settings`: how to train. `checkpoints`: a directory to resume from. `attachments`: config.json and tokenizer, which members build
    their model from. `optimizer`: AdamW with the settings' learning rate if not given. `lr_scheduler`: of that optimizer, stepped once
    after each step that was trained. `evaluate`: called every `eval_steps` steps; its numbers are an event "evaluated". `fleet`,
    `scheduler`: how the fleet is run. `on_event`: called with every event; without it one line for each step is printed to the
    standard error. `tokenizer`: instead of its files, published with the model's config. Further arguments go to `Publisher`.

    Results that cannot be trained on are refused, or rejected after all and named by the event "rollout-rejected"; a step of which nothing
    is left is skipped ("step-skipped"), and the run goes on. Every step is an event "trained", once its version is out.

    Raises `UnusableRows`, `UnusableSettings` and `UnusableModelFiles` before anything is published.
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
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        evaluate: Evaluate | None = None,
        fleet: FleetOptions | None = None,
        scheduler: Scheduler | None = None,
        dtype: torch.dtype = torch.bfloat16,
        on_event: OnEvent | None = None,
        **publisher: Any,
    ) -> None:
        self.settings = settings or GrpoSettings()
        if lr_scheduler is not None and optimizer is None:
            raise ValueError("an lr_scheduler needs the optimizer that it was made for: pass both")
        self._model = model
        self._rows = rows
        self._on_event = on_event = on_event or StepReporter()
        self._own_rate = optimizer is None
        self._optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=self.settings.learning_rate, weight_decay=0.0)
        self._lr_scheduler = lr_scheduler
        self._evaluate = evaluate
        self._source = WeightSource(model)
        self._update = PolicyUpdate(model, self._optimizer, self.settings, dtype)
        self._skipped = 0
        self._checkpoints = None if checkpoints is None else TrainerCheckpoints(checkpoints)
        self._budget = StalenessBudget(self.settings.max_staleness)
        back = self.settings.save_steps + self.settings.max_staleness + 1
        fleet = fleet or FleetOptions(keep_steps=max(back, FleetOptions().keep_steps))
        if checkpoints is not None and fleet.keep_steps < back:
            raise ValueError(f"resuming may go back by {back} steps; with keep_steps={fleet.keep_steps} it would not find its rollouts")
        self._patience = fleet.poll_seconds
        if (tokenizer := publisher.pop("tokenizer", None)) is not None:
            attachments = files_with_tokenizer(model, tokenizer, attachments, dtype)
        with ExitStack() as opened:  # undone in reverse if anything below fails, and by close()
            self._store = open_store(url, on_event=on_event)
            if self._store is not url:
                opened.callback(self._store.close)
            files = read_files(self._store, attachments, run=publisher.get("run"), trusted_keys=_keys_to_trust(**publisher))
            self._prompts = load_prompts(files)
            limits = training_limits(model, self._prompts)
            check_rows(rows, limits, self.settings.max_completion_length)
            if len(rows) < self.settings.prompts:
                raise ValueError(f"{len(rows)} rows are fewer than the {self.settings.prompts} prompts of one step")
            step = self._checkpoints.load_newest(model, self._optimizer, lr_scheduler) if self._checkpoints else None
            self.step = step or 0
            """The last step that was trained."""
            if not self._update.weights_are_finite():
                raise TrainingFailed("the weights to begin with are not finite.")
            digest = state_digest(WeightSource(model, dtype=dtype).snapshot())
            rewind = resume_point(ChainLog(self._store), step, digest)
            if self._checkpoints is not None and step is None:
                self._checkpoints.save(0, model, self._optimizer, lr_scheduler)
            self._publisher = opened.enter_context(
                Publisher(
                    self._store,
                    resume_from=rewind,
                    attachments=attachments,
                    dtype=dtype,
                    background=True,
                    on_event=on_event,
                    **{"refuse_nonfinite": True, **publisher},
                )
            )
            version = self._publisher.version
            if rewind is not None or version is None or version.step != self.step or version.digest != digest:
                version = _landed(self._publish())  # after a rewind too: that is what abandons the versions in between
            self._coordinator = Coordinator(
                self._store,
                epoch=self._publisher.epoch,
                run=self._publisher.run,
                signing_key=self._publisher.signing_key,
                trusted_keys=self._publisher.trusted_keys,
                budget=self._budget,
                scheduler=scheduler,
                options=fleet,
                training=limits,
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

        Waits for members as long as it takes. `FleetDeserted` if members leave because of errors and nobody comes back; `TrainingFailed` if
        nothing can be trained on, or the weights are spoilt; `Fenced` if another trainer has taken over.
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
            sampling = Sampling(
                settings.num_generations, settings.max_completion_length, settings.temperature, settings.top_p, seed=settings.seed + step
            )
            self._coordinator.open_round([rows[task :: settings.tasks] for task in range(settings.tasks)], for_step=step, sampling=sampling)

    def _rows_of(self, step: int) -> list[Row]:
        """Drawn anew for each step, and the same for whoever trains it."""
        return random.Random(f"{self.settings.seed}/{step}").sample(self._rows, self.settings.prompts)

    def _step(self, collected: Batch, *, idle: float) -> None:
        started = time.monotonic()
        collected, batch, measured = self._learn(collected)
        self.step = collected.step
        if self._checkpoints is not None and self.step % self.settings.save_steps == 0:
            # Before it is published: see resume_point.
            self._checkpoints.save(self.step, self._model, self._optimizer, self._lr_scheduler)
        facts: dict[str, float | None] = {
            **({"reward": None, "completions": 0, "tokens": 0} if batch is None else step_metrics(batch)),
            **measured,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "rejected": sum(collected.rejected.values()),
            "idle_seconds": idle,
            "train_seconds": time.monotonic() - started,
        }
        self._settle()  # one at a time, so that none is superseded
        self._on_its_way = _OnItsWay(self._publish(), time.monotonic(), facts)
        self._tell_completions(collected)
        if self._evaluate is not None and self.step % self.settings.eval_steps == 0:
            self._run_evaluation(self._evaluate)
        if self._budget.newest_open(self.step - 1) == self.step:
            self._settle()  # synchronous: nothing can be done without it

    def _learn(self, collected: Batch) -> tuple[Batch, TrainingBatch | None, dict[str, float]]:
        """Train on what was acknowledged, less what fails. What is left out is recorded in the store before the rest is trained on.

        `TrainingFailed` if nothing could be trained on for too many steps in a row, or the weights themselves are spoilt. Also then the
        rollouts are rejected first, so that a trainer that is started again goes on without them.
        """
        why = "no result was left"
        while collected.rollouts:
            self._set_learning_rate()
            try:
                batch = self._update.batch(collected.rollouts, collected.step)
                updated = self._update.apply(batch)
            except TrainingFailed as error:
                self._coordinator.reject(collected, range(len(collected.results)), error.message)
                raise
            except Exception as error:
                why = told(error)  # and no more of it: a traceback would hold on to the memory of the batch
            else:
                if self._lr_scheduler is not None:
                    self._lr_scheduler.step()
                if updated.skipped is not None:
                    emit(self._on_event, "iterations-skipped", step=collected.step, why=updated.skipped)
                self._skipped = 0
                return collected, batch, updated.measured
            failing = self._update.failing_alone(collected.rollouts, collected.step)
            if not failing:
                failing = dict.fromkeys(range(len(collected.results)), f"training on all results together failed: {why}")
            collected = self._reject(collected, failing)
        self._skipped += 1
        emit(self._on_event, "step-skipped", step=collected.step, why=why)
        if self._skipped > self.settings.max_skipped_steps:
            raise TrainingFailed(f"training failed on the rollouts of {self._skipped} steps in a row; the last time: {why}.")
        return collected, None, {}

    def _reject(self, collected: Batch, failing: Mapping[int, str]) -> Batch:
        """Record that the step leaves results out, given by their indices with what is wrong, and return the rest."""
        rejected = collected.rejected
        for why in sorted(set(failing.values())):
            which = [index for index, each in failing.items() if each == why]
            rejected = self._coordinator.reject(collected, which, why).rejected
        return replace(collected.without(failing.keys()), rejected=rejected)

    def _set_learning_rate(self) -> None:
        if self._own_rate:
            for group in self._optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * min(1.0, (self.step + 1) / max(1, self.settings.warmup_steps))

    def _tell_completions(self, collected: Batch) -> None:
        """Show some completions, spread over the step's results."""
        left = self.settings.num_completions_to_print
        for rows, rollouts in zip(collected.rows, collected.rollouts, strict=True):
            for one in rollouts.completions[: max(0, min(1, left))]:
                left -= 1
                (text,) = self._prompts.decode([rows[one.prompt]], [one.tokens.tolist()])
                named = {f"rewards/{name}": reward for name, reward in zip(rollouts.reward_names, one.rewards, strict=True)}
                told_prompt, told_text = shown(rows[one.prompt]["prompt"]), shown(text)
                emit(
                    self._on_event, "completion", step=self.step, member=rollouts.member, prompt=told_prompt, completion=told_text, **named
                )

    def _run_evaluation(self, evaluate: Evaluate) -> None:
        self._model.eval()
        with torch.no_grad():
            numbers = evaluate(self._model, self.step)
        emit(self._on_event, "evaluated", **{**{name: float(number) for name, number in numbers.items()}, "step": self.step})

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

    def _publish(self) -> PendingVersion:
        pending = self._source.publish(self._publisher, step=self.step)
        assert isinstance(pending, PendingVersion)
        return pending


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """The version of a step that is trained, since when it is being published, and what there is to tell of the step."""

    version: PendingVersion
    since: float
    facts: Mapping[str, float | None]


def _keys_to_trust(*, signing_key: SigningKey | None = None, trusted_keys: Collection[str] = (), **_: Any) -> set[str]:
    """Return the keys that a publisher with these options trusts."""
    return {*trusted_keys, *([] if signing_key is None else [signing_key.public])}


def _landed(pending: PendingVersion) -> Version:
    version = pending.result()
    assert version is not None  # only one is ever on its way, so it cannot have been superseded
    return version

"""A GRPO trainer whose rollouts come from a fleet. Each step opens rounds, collects results, trains and publishes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch

from ..chain.log import ChainLog
from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..engines.model_limits import load_prompts
from ..errors import DeltawireError, FleetTimeout, TrainingFailed
from ..events import OnEvent, emit
from ..fleet.coordinator import Coordinator
from ..fleet.options import FleetOptions
from ..fleet.rules.scheduler import Scheduler
from ..fleet.rules.staleness import StalenessBudget
from ..fleet.steps.batch_steps import Batch
from ..format.records.fleet_files import Row
from ..format.records.trainer_records import Sampling
from ..live import LiveTraffic
from ..publish import PendingVersion, Publisher, WriterOptions
from ..publish.attachments.read_files import Attachments
from ..publish.publish_warnings import continues
from ..publish.quantising import record_of
from ..publish.snapshots import SnapshotDevice
from ..quantise import Recipe
from ..store import Store, open_store
from ..trainers import WeightSource
from .checkpoints import TrainerCheckpoints
from .live_steps import LiveShare
from .metrics import mismatch_metrics, printed_completions, published_metrics, step_metrics
from .mismatch import TokenMismatch, mismatch_groups
from .mismatch_alarm import MismatchAlarm
from .preflight import check_rows, files_with_tokenizer, read_files, training_limits
from .report import StepReporter
from .resume_point import digest_like, resume_point
from .settings import GrpoSettings
from .step_training import StepTraining
from .update import PolicyUpdate

Evaluate: TypeAlias = Callable[[Any, int], Mapping[str, float]]
"""Called with the model (in evaluation mode, without gradients) and the step. Returns numbers by name."""


class GrpoTrainer:
    """Trains a model on rollouts from the members that follow the chain at `url`.

    >>> with GrpoTrainer(model, rows, "s3://bucket/run", checkpoints="checkpoints", attachments="model-directory") as trainer:
    ...     trainer.train(until=1000)
    ...     trainer.stop_members()

    The trainer publishes the weights after each step as one version with the number of the step. The initial weights are step 0.
    The trainer may be killed at any time. Open it again with the same arguments: it continues from the newest checkpoint. Versions after
    that checkpoint are abandoned. Rollouts that were acknowledged for later steps are used if they are still valid.

    The trainer refuses results that it cannot train on, or rejects them later (event "rollout-rejected"). It skips a step for which no
    result is left (event "step-skipped") and continues. It emits an event "trained" when the version of a step is published.

    The constructor raises `UnusableRows`, `UnusableSettings`, `UnusableModelFiles` or `UnsupportedRouting` before it publishes anything.

    Parameters
    ----------
    model
        The model to train, usually with float32 weights.
    rows
        The dataset: mappings with a `prompt` and the columns that the rewards need. It may be empty if `live_share` is 1.
    url
        The location of the chain: a URL, a directory, or an open `Store`.
    settings
        How to train.
    checkpoints
        The directory of the trainer's own checkpoints. Without it the trainer cannot resume.
    attachments
        Further files of each version: a directory, or names with bytes or paths. Pass the model's directory, or its config.json
        and tokenizer files. Members build their model from these files.
    optimizer
        The optimizer of the model's parameters. The default is AdamW with the learning rate of `settings`.
    lr_scheduler
        A scheduler of `optimizer`. It is stepped once after each trained step.
    evaluate
        Called every `eval_steps` steps. Its numbers become an event "evaluated".
    live
        Live traffic to learn from (docs/live.md). Set `max_staleness` to at least the number of steps for which a version answers users.
    live_share
        The part of a step's completions that comes from live traffic. With 1 the trainer needs no members, and waits until enough
        interactions have their rewards. With less, members make the rest, and all that live traffic lacks.
    fleet
        How the fleet is run.
    scheduler
        How many tasks each member is offered.
    dtype
        The type that the engines serve. Weights are published as this type.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. The fleet
        serves the quantised policy. `dtype` is the type of the other weights then. See `Publisher`.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`). The default is a name made from `url`.
    tokenizer
        A tokenizer whose files are published with the model. The model's config is published, too, so `attachments` is not needed.
    snapshot
        Where copies of weights on a GPU are kept: "host", in pinned memory of the host, or "device", on the GPU itself. See
        `Publisher`.
    refuse_nonfinite
        Raise `NonFiniteWeights` instead of publishing weights that are NaN or infinite.
    starts_full
        Publish the first version as a full checkpoint, and do not read the newest one back. Use it if the newest version is damaged.
    options
        How versions are written: signing key, anchors, skips, garbage collection, threads, store.
    on_event
        Called with every event. Without it the trainer prints one line per step to the standard error.
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
        live: LiveTraffic | None = None,
        live_share: float = 0.5,
        fleet: FleetOptions | None = None,
        scheduler: Scheduler | None = None,
        dtype: torch.dtype = torch.bfloat16,
        quantise: str | Recipe | None = None,
        run: str | None = None,
        tokenizer: Any = None,
        snapshot: SnapshotDevice = "host",
        refuse_nonfinite: bool = True,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or WriterOptions()
        self.settings = settings or GrpoSettings()
        if lr_scheduler is not None and optimizer is None:
            raise ValueError("an lr_scheduler needs its optimizer: pass both")
        self._model = model
        self._rows = rows
        self._on_event = on_event = on_event or StepReporter()
        self._optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=self.settings.learning_rate, weight_decay=0.0)
        self._lr_scheduler = lr_scheduler
        self._evaluate = evaluate
        self._source = WeightSource(model)
        self._checkpoints = None if checkpoints is None else TrainerCheckpoints(checkpoints)
        self._budget = StalenessBudget(self.settings.max_staleness)
        back = self.settings.save_steps + self.settings.max_staleness + 1
        fleet = fleet or FleetOptions(keep_steps=max(back, FleetOptions().keep_steps))
        if checkpoints is not None and fleet.keep_steps < back:
            raise ValueError(
                f"resuming may go back by {back} steps, but keep_steps={fleet.keep_steps} keeps fewer. Set keep_steps={back} or more"
            )
        if tokenizer is not None:
            attachments = files_with_tokenizer(model, tokenizer, attachments, dtype)
        with ExitStack() as opened:  # undone in reverse if anything below fails, and by close()
            update = PolicyUpdate(model, self._optimizer, self.settings, dtype)
            opened.callback(update.close)
            self._store = open_store(url, options=options.store, on_event=on_event)
            if self._store is not url:
                opened.callback(self._store.close)
            reading = ReaderOptions(run=run, trusted_keys=options.accepted_keys)
            files = read_files(self._store, attachments, options=reading)
            self._prompts = load_prompts(files)
            limits = training_limits(model, self._prompts)
            check_rows(rows, limits, self.settings.max_completion_length)
            if len(rows) < self.settings.prompts and (live is None or live_share < 1):
                raise ValueError(f"the dataset has {len(rows)} rows, but one step needs {self.settings.prompts} prompts")
            step = self._checkpoints.load_newest(model, self._optimizer, lr_scheduler) if self._checkpoints else None
            self.step = step or 0
            """The last trained step."""
            if not update.weights_are_finite():
                raise TrainingFailed("the initial weights are not finite.")
            threads = None if options is None else options.threads
            log = ChainLog(self._store)
            point = resume_point(log, step, lambda commit: digest_like(log, commit, model, dtype, threads))
            if self._checkpoints is not None and step is None:
                self._checkpoints.save(0, model, self._optimizer, lr_scheduler)
            self._publisher = opened.enter_context(
                Publisher(
                    self._store,
                    run,
                    background=True,
                    snapshot=snapshot,
                    dtype=dtype,
                    quantise=quantise,
                    refuse_nonfinite=refuse_nonfinite,
                    attachments=attachments,
                    resume_from_seq=point.rewind_to,
                    starts_full=starts_full,
                    options=options,
                    on_event=on_event,
                )
            )
            version = self._publisher.version
            recipe = None if quantise is None else record_of(Recipe.of(quantise))
            if version is None or version.seq != point.seq or not continues(recipe, version.recipe):
                version = _published(self._publish())  # after a rewind too: this commit abandons the versions in between
            self.version: Version = version
            """The newest published version."""
            self._in_flight: _InFlight | None = None
            self._last_step = self.step
            self._progress = threading.RLock()
            self._is_training = False
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
                meanwhile=self._prepare_while_training,
                ask_newest=self._published_in_background,
                on_event=on_event,
            )
            opened.callback(self._coordinator.close)
            self._poll_seconds = fleet.poll_seconds
            self._live = None
            if live is not None:
                self._live = LiveShare(live, live_share, self._coordinator, self.settings, limits, on_event)
            self._training = StepTraining(
                update,
                self._coordinator,
                self._optimizer,
                lr_scheduler,
                self.settings,
                sets_learning_rate=optimizer is None,
                on_event=on_event,
            )
            self._alarm = MismatchAlarm(self.settings.mismatch_alarm)
            self._coordinator.resume()
            self._opened = opened.pop_all()

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, which knows the members and the rejected results."""
        return self._coordinator

    def train(self, *, until: int, stop: Callable[[], bool] | None = None) -> None:
        """Train up to step `until`, and wait for members as long as that takes.

        Raises `FleetDeserted` if members leave because of errors and none comes back, `TrainingFailed` if no result can be trained on or
        the weights are not finite, and `Fenced` if another trainer has taken over.

        Parameters
        ----------
        until
            The last step to train.
        stop
            Asked between requests to the store. When it returns true, training ends early. Collected results are kept for the next call
            and for the next trainer.
        """
        self._last_step = until
        while self.step < until and not (stop is not None and stop()):
            started = time.monotonic()
            batch = self._collect(stop)
            if batch is None:
                break
            self._step(batch, idle=time.monotonic() - started)
        self._settle()

    def stop_members(self) -> None:
        """Tell all members that the run is over."""
        self._coordinator.stop()

    def close(self) -> None:
        """Close the publisher and the coordinator. Members wait for the next trainer. A second call does nothing."""
        self._opened.close()

    def __enter__(self) -> GrpoTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, trace)

    def _collect(self, stop: Callable[[], bool] | None) -> Batch | None:
        """Return the batch of the next step, or None if `stop` ended the wait. Open further rounds as soon as the budget allows."""
        while True:
            with self._progress:
                if self._in_flight is not None and self._in_flight.version.done():
                    self._settle()
                self._open_rounds()
                awaited = None if self._in_flight is None else self._in_flight.version
            if self._live is not None and not self._coordinator.is_open(self.step + 1):  # too little live traffic has its rewards
                if stop is not None and stop():
                    return None
                time.sleep(self._poll_seconds)
                continue
            try:
                return self._coordinator.collect(self.step + 1, stop=partial(_has_news, stop, awaited))
            except FleetTimeout:
                if stop is not None and stop():
                    return None

    def _published_in_background(self) -> Version | None:
        """Return the version that was in flight, if it is published. `_settle` reports it later."""
        in_flight = self._in_flight
        return None if in_flight is None else in_flight.version.published()

    def _prepare_while_training(self) -> None:
        """Note that a version is published, and open the next rounds, although the trainer trains. Errors are left to its own thread.

        This also opens one round more than the budget allows, which members are offered as soon as the next version is published.
        """
        if not self._is_training or not self._progress.acquire(blocking=False):
            return
        try:
            in_flight = self._in_flight
            if in_flight is not None and in_flight.version.done():
                try:
                    self._settle()
                except Exception:
                    self._in_flight = in_flight
                    return
            with contextlib.suppress(DeltawireError):
                self._open_rounds(further=1)
        finally:
            self._progress.release()

    def _open_rounds(self, *, further: int = 0) -> None:
        """Open as many rounds as the staleness budget allows, and some further ones.

        With a budget of 0 training is synchronous, with more it is pipelined.
        """
        settings = self.settings
        assert self.version.step is not None
        last = self._budget.newest_open(self.version.step) + further
        if self._live is not None:
            last = self._live.last_open(self.step, last)
        for step in range(self.step + 1, min(self._last_step, last) + 1):
            rows = [] if self._live is not None and self._live.is_all else self._rows_of(step)
            sampling = Sampling(
                settings.num_generations, settings.max_completion_length, settings.temperature, settings.top_p, seed=settings.seed + step
            )
            if self._live is not None:
                self._live.open_round(rows, for_step=step, sampling=sampling)
                continue
            self._coordinator.open_round([rows[task :: settings.tasks] for task in range(settings.tasks)], for_step=step, sampling=sampling)

    def _rows_of(self, step: int) -> list[Row]:
        """Draw the rows of a step. Every trainer draws the same rows for the same step."""
        return random.Random(f"{self.settings.seed}/{step}").sample(self._rows, self.settings.prompts)

    def _step(self, collected: Batch, *, idle: float) -> None:
        started = time.monotonic()
        self._is_training = True
        try:
            collected, batch, updated = self._training.train(collected)
        finally:
            self._is_training = False
        self.step = collected.step
        if self._checkpoints is not None and self.step % self.settings.save_steps == 0:
            # The checkpoint comes before the version: see resume_point.
            self._checkpoints.save(self.step, self._model, self._optimizer, self._lr_scheduler)
        facts: dict[str, float | None] = {
            **({"reward": None, "completions": 0, "tokens": 0} if batch is None else step_metrics(batch)),
            **({} if updated is None else {**updated.measured, **mismatch_metrics(updated.tokens.measure())}),
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "rejected": sum(collected.rejected.values()),
            "idle_seconds": idle,
            "train_seconds": time.monotonic() - started,
        }
        if batch is not None and updated is not None:
            self._tell_mismatch(updated.tokens, batch.members)
        with self._progress:
            self._settle()  # only one version is in flight, so that none is superseded
            self._in_flight = _InFlight(self._publish(published_metrics(facts)), time.monotonic(), facts)
        for one in printed_completions(collected, self._prompts, self.settings.num_completions_to_print):
            emit(self._on_event, "completion", step=self.step, **one)
        if self._evaluate is not None and self.step % self.settings.eval_steps == 0:
            self._run_evaluation(self._evaluate)
        if self._budget.newest_open(self.step - 1) == self.step:
            self._settle()  # synchronous: the next round needs this version

    def _tell_mismatch(self, tokens: TokenMismatch, members: tuple[str, ...]) -> None:
        """Emit the mismatch of the step, overall and in parts, and an alarm for each member that begins to stand out."""
        engines = {one.member: one.engine.partition(" ")[0] for one in self._coordinator.members() if one.engine is not None}
        for group in mismatch_groups(tokens, members, engines):
            emit(self._on_event, "mismatch", step=self.step, by=group.by, group=group.name, **group.mismatch.fields)
        for one in self._alarm.note(tokens, members):
            emit(self._on_event, "mismatch-alarm", step=self.step, member=one.member, kl=one.kl, others=one.others, tokens=one.tokens)
            if self.settings.mismatch_alarm.exclude:
                why = f"its mismatch stands out: {one.kl:.2g} nats per token, others have {one.others:.2g}"
                self._coordinator.exclude(one.member, why)
                self._alarm.forget(one.member)

    def _run_evaluation(self, evaluate: Evaluate) -> None:
        self._model.eval()
        with torch.no_grad():
            numbers = evaluate(self._model, self.step)
        emit(self._on_event, "evaluated", **{**{name: float(number) for name, number in numbers.items()}, "step": self.step})

    def _settle(self) -> None:
        """Wait until the version in flight is published, and report the step."""
        with self._progress:
            if self._in_flight is None:
                return
            in_flight, self._in_flight = self._in_flight, None
            self.version = version = _published(in_flight.version)
            self._coordinator.published(version)
            emit(
                self._on_event,
                "trained",
                step=version.step,
                seq=version.seq,
                **in_flight.facts,
                changed=version.changed,
                bytes=version.bytes,
                state_bytes=version.state_bytes,
                publish_seconds=time.monotonic() - in_flight.since,
            )

    def _publish(self, meta: Mapping[str, str] | None = None) -> PendingVersion:
        pending = self._source.publish(self._publisher, step=self.step, meta=meta)
        assert isinstance(pending, PendingVersion)
        return pending


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The version of a trained step, when its publication began, and the metrics of the step."""

    version: PendingVersion
    since: float
    facts: Mapping[str, float | None]


def _published(pending: PendingVersion) -> Version:
    version = pending.result()
    assert version is not None  # only one version is in flight, so it cannot have been superseded
    return version


def _has_news(stop: Callable[[], bool] | None, awaited: PendingVersion | None) -> bool:
    """Return whether collecting should be interrupted: it is told to stop, or the version in flight is published."""
    return (stop is not None and stop()) or (awaited is not None and awaited.done())

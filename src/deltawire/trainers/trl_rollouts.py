"""Train with TRL's `AsyncGRPOTrainer` on a fleet. Samples come from members anywhere, through the store, not from one vLLM server.

>>> transfer = DeltaWireTransfer("s3://bucket/run", engines=0, attachments="model/")
>>> AsyncGRPOTrainer(
...     ..., args=AsyncGRPOConfig(..., token_budget=0, per_device_train_batch_size=64, max_staleness=2),
...     weight_transfer=transfer, rollout_worker=FleetRolloutWorker(transfer, dataset, groups=8, samples=8, max_tokens=512)
... )

Start members with `deltawire member`. They compute the rewards, so TRL's `reward_funcs` are not used. TRL asks no vLLM server for anything
if `token_budget` is set.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chain.reader_options import ReaderOptions
from ..chain.version import Version
from ..engines.model_limits import limits_of_files
from ..errors import FleetTimeout
from ..events import OnEvent
from ..fleet import Batch, Completion, Coordinator, FleetOptions, Rollouts, Sampling, StalenessBudget
from ..subscribe.model_files import read_model_files
from .trl import DeltaWireTransfer
from .trl_samples import NO_VERSION, LabelledSample

_POLL_SECONDS = 0.5
"""How often a worker that waits for a round checks for a new version, or for the end."""


class FleetRolloutWorker:
    """Gets samples from a fleet. Pass it as `AsyncGRPOTrainer(rollout_worker=…)`, with a `DeltaWireTransfer(engines=0)`.

    Each sync opens one round: `groups` rows of the dataset, in order and from the start again at its end, with `samples` completions each.
    Let TRL train on `groups` × `samples` samples between two syncs. TRL's number is `per_device_train_batch_size` ×
    `gradient_accumulation_steps` × processes × `weight_sync_steps`, with `token_budget=0`. If TRL asks for more, `check_health` raises,
    because trainer and fleet would wait for each other. If TRL takes fewer, samples accumulate until TRL drops them as stale.

    Results that were acknowledged before a trainer died are trained on by the next one if they are still valid. Prompts and completions are
    checked with the config and tokenizer that the transfer publishes. Without these, `check_health` raises `UnusableModelFiles`.

    Parameters
    ----------
    transfer
        The transfer that publishes the weights.
    dataset
        The rows: mappings with a `prompt` and the columns that the rewards need.
    groups
        The number of rows in a round.
    samples
        The number of completions of each row.
    max_tokens
        The largest number of tokens in a completion.
    temperature
        The temperature of sampling.
    top_p
        The probability mass that tokens are sampled from.
    seed
        The seed of sampling.
    rows_per_task
        The number of rows in a task, which one member does.
    budget
        How many syncs members may be behind. TRL's `max_staleness` must not be smaller.
    options
        How the fleet is run.
    dismiss
        Tell members to leave when training ends, even if it fails.
    tokenizer
        Decodes completions for TRL's traces. It is not used for anything else.
    on_event
        Called with every event.
    """

    def __init__(
        self,
        transfer: DeltaWireTransfer,
        dataset: Sequence[Mapping[str, Any]] | Any,
        *,
        groups: int,
        samples: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        rows_per_task: int = 1,
        budget: StalenessBudget | None = None,
        options: FleetOptions | None = None,
        dismiss: bool = True,
        tokenizer: Any = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if groups < 1 or rows_per_task < 1 or not len(dataset):
            raise ValueError("groups and rows_per_task must be at least 1, and the dataset must have rows")
        self.rollout_buffer: queue.Queue[LabelledSample] = queue.Queue()
        """The samples for TRL. The budget bounds how many rounds it can hold."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._transfer = transfer
        self._dataset = dataset
        self._groups = groups
        self._rows_per_task = rows_per_task
        self._sampling = Sampling(samples, max_tokens, temperature, top_p, seed)
        self._budget = budget or StalenessBudget()
        self._options = options
        self._dismiss = dismiss
        self._tokenizer = tokenizer
        self._on_event = on_event
        self._news: queue.Queue[Version] = queue.Queue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waits_for_version = threading.Event()
        self._ticked = time.monotonic()
        self._group = 0

    def start(self) -> None:
        """Begin to offer work. TRL calls it after the first sync."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="deltawire-trl-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the worker. TRL calls it before it closes the transfer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Note that the transfer has published another version. TRL calls it after each sync.

        Parameters
        ----------
        model_version
            TRL's number of the version. It is not used: the transfer knows the version.
        """
        if self._transfer.versions:
            self._news.put(self._transfer.versions[-1])

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the worker has failed, or if no more samples will come. TRL calls it while it waits for samples.

        Parameters
        ----------
        stale_after_s
            Raise if the worker has made no progress for this many seconds.
        """
        if self._error is not None:
            raise RuntimeError(f"the fleet's rollout worker has failed: {self._error}") from self._error
        if self._waits_for_version.is_set() and self._news.empty() and self.rollout_buffer.empty():
            have = self._groups * self._sampling.samples
            raise RuntimeError(
                f"TRL wants more than {have} samples between two syncs, but a round has only that many. Raise `groups`, or lower "
                "per_device_train_batch_size, gradient_accumulation_steps or weight_sync_steps."
            )
        if (age := time.monotonic() - self._ticked) > stale_after_s:
            raise RuntimeError(f"the fleet's rollout worker has made no progress for {age:.0f} seconds.")

    # On the worker's thread

    def _run(self) -> None:
        try:
            options = ReaderOptions(run=self._transfer.publisher.run, trusted_keys=self._transfer.publisher.trusted_keys)
            limits = limits_of_files(read_model_files(self._transfer.store, options=options))
            with Coordinator(
                self._transfer.store,
                epoch=self._transfer.publisher.epoch,
                run=self._transfer.publisher.run,
                signing_key=self._transfer.publisher.signing_key,
                trusted_keys=self._transfer.publisher.trusted_keys,
                budget=self._budget,
                options=self._options,
                training=limits,
                on_event=self._on_event,
            ) as fleet:
                self._produce(fleet)
                if self._dismiss:
                    fleet.stop()
        except BaseException as error:
            if not self._stop.is_set():
                self._error = error

    def _produce(self, fleet: Coordinator) -> None:
        published = self._newest()
        step = published + 1
        fleet.resume()
        while not self._stop.is_set():
            published = self._take_news(fleet, published)
            newest_open = self._budget.newest_open(published)
            for ahead in range(max(step, published + 1), newest_open + 1):
                fleet.open_round(self._tasks(ahead), for_step=ahead, sampling=self._sampling)
            if step > newest_open:
                self._wait_for_version()
                continue
            try:
                batch = fleet.collect(step, timeout=_POLL_SECONDS, stop=self._stop.is_set)
            except FleetTimeout:
                continue
            self._hand_over(batch)
            alive = sum(member.alive for member in fleet.members())
            self.metrics_queue.put({"fleet/members": float(alive), "fleet/rejected": float(fleet.rejected.total())})
            step += 1

    def _newest(self) -> int:
        step = self._transfer.versions[-1].step
        assert step is not None  # the transfer counts them
        return step

    def _take_news(self, fleet: Coordinator, published: int) -> int:
        self._ticked = time.monotonic()
        while not self._news.empty():
            version = self._news.get()
            fleet.published(version)
            assert version.step is not None
            published = version.step
        return published

    def _wait_for_version(self) -> None:
        self._waits_for_version.set()
        while self._news.empty() and not self._stop.wait(0.01):
            self._ticked = time.monotonic()
        self._waits_for_version.clear()

    def _tasks(self, step: int) -> list[list[dict[str, Any]]]:
        """Return the tasks of a step. The step determines the rows, so a resumed trainer continues with the right ones."""
        first = (step - 1) * self._groups
        rows = [dict(self._dataset[(first + number) % len(self._dataset)]) for number in range(self._groups)]
        return [rows[start : start + self._rows_per_task] for start in range(0, len(rows), self._rows_per_task)]

    def _hand_over(self, batch: Batch) -> None:
        published = [version.seq for version in self._transfer.versions]
        for rows, rollouts in zip(batch.rows, batch.rollouts, strict=True):
            for row, group in _groups(rows, rollouts):
                self._group += 1
                for sample in self._samples(row, rollouts, group, published):
                    self.rollout_buffer.put(sample)

    def _samples(
        self, row: Mapping[str, Any], rollouts: Rollouts, group: Sequence[Completion], published: Sequence[int]
    ) -> Iterator[LabelledSample]:
        rewards = np.array([[np.nan if reward is None else reward for reward in one.rewards] for one in group], float)
        totals, spread, advantages = _advantages(rewards)
        for index, one in enumerate(group):
            prompt = rollouts.prompts[one.prompt]
            made_by = np.concatenate([np.full(span.end - span.start, span.seq, np.int64) for span in one.spans])
            named = {f"rewards/{name}": float(rewards[index, column]) for column, name in enumerate(rollouts.reward_names)}
            yield LabelledSample(
                prompt=_messages("user", row["prompt"]),
                completion=_messages("assistant", self._text(one)),
                input_ids=np.concatenate([prompt, one.tokens]).astype(np.int64),
                completion_mask=_after(prompt, one.mask, 0, np.int64),
                old_log_probs=_after(prompt, one.logprobs, 0.0, np.float32),
                advantage=float(advantages[index]),
                model_version=bisect_right(published, min(span.seq for span in one.spans)),
                group_id=self._group,
                metrics={"reward": float(totals[index]), "reward_std": spread, **named},
                enqueued_at=time.time(),
                experts=one.experts,
                made_by=_after(prompt, np.where(one.mask != 0, made_by, NO_VERSION), NO_VERSION, np.int64),
            )

    def _text(self, one: Completion) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(one.tokens.tolist(), skip_special_tokens=True))


def _groups(rows: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> Iterator[tuple[Mapping[str, Any], list[Completion]]]:
    """Yield each row with the completions of its prompt."""
    for prompt, row in enumerate(rows):
        yield row, [one for one in rollouts.completions if one.prompt == prompt]


def _advantages(rewards: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Return the rewards summed over functions, their standard deviation, and the advantages, as TRL defines them.

    An advantage is the distance from the group's mean in standard deviations. A completion that no function has scored has the reward NaN
    and the advantage 0.
    """
    totals = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards, axis=1))
    scored = ~np.isnan(totals)
    advantages = np.zeros(len(totals))
    if not scored.any():
        return totals, float("nan"), advantages
    known = totals[scored]
    advantages[scored] = (known - known.mean()) / (known.std() + 1e-8)
    return totals, float(known.std()), advantages


def _after(prompt: NDArray[Any], values: NDArray[Any], filler: float, dtype: Any) -> NDArray[Any]:
    """Return the values of a completion's tokens, preceded by one filler for each token of the prompt."""
    return np.concatenate([np.full(len(prompt), filler, dtype), values.astype(dtype)])


def _messages(role: str, content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"role": role, "content": content}]

"""Label the samples of TRL's `AsyncGRPOTrainer`: each token gets the version of the chain that made it.

>>> trainer = AsyncGRPOTrainer(..., weight_transfer=DeltaWireTransfer("s3://bucket/run"))
>>> label_samples(trainer)
>>> trainer.train()

TRL itself tags a group of samples with the number of syncs at the time when the first of them began. It does not notice that a sample was
generated during a swap, or by a restarted server that had its initial weights for a while. Here the server says which weights made each
token (deltawire/engines/vllm/driver/token_route.py), so it must run with `--enable-scale-out`. Samples that weights of no known version
made are discarded and generated again.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample, _AsyncRolloutLoop

from ..engines.vllm import OLDEST_VLLM
from ..engines.vllm.driver.token_route import NEEDED_FLAG, TOKEN_ROUTE, LabelledTokens, read_choice, token_request
from ..errors import EngineError, EngineRefused
from .trl import DeltaWireTransfer

NO_VERSION = -1
"""In `LabelledSample.made_by`: marks a token that no version made, such as a token of the prompt."""

_TRIES = 30
"""How often a request is tried. TRL tries its own requests as often."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One request to a vLLM server that returns routed experts.

    Parameters
    ----------
    tokens
        The number of tokens of its prompt and completion together. They are the first tokens of the sample.
    experts
        Their experts, as the server sent them.
    """

    tokens: int
    experts: Any


@dataclass(slots=True)
class LabelledSample(RolloutSample):  # type: ignore[misc]
    """A sample that knows which versions made it. Its `model_version`, which TRL uses, is that of the oldest one."""

    made_by: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """For each token of `input_ids`, the `seq` of the version that made it, or `NO_VERSION`."""
    experts: NDArray[np.integer[Any]] | None = None
    """The recorded experts [tokens, layers, top k] of an MoE model, −1 where none were recorded. None if the sample has none."""
    turns: tuple[RecordedTurn, ...] = ()
    """The turns of the sample for which the server sent its experts."""

    @property
    def versions(self) -> list[int]:
        """The `seq` of each version that made tokens of the sample, the oldest first."""
        return [int(seq) for seq in np.unique(self.made_by[self.made_by != NO_VERSION])]


def label_samples(trainer: Any, on_sample: Callable[[LabelledSample], Any] = lambda sample: None) -> None:
    """Make a trainer label its samples. Call it before `train`, in every rank.

    TRL then measures staleness by the oldest token of a sample. Raises `EngineRefused` if the trainer's `weight_transfer` is not a
    `DeltaWireTransfer`, or its rollout worker is not TRL's own.

    Parameters
    ----------
    trainer
        TRL's `AsyncGRPOTrainer`.
    on_sample
        Called in the trainer's process with each sample that the trainer takes, including those that it then drops as stale.
    """
    if trainer.rollout_worker is None:  # another rank has it
        return
    if not isinstance(trainer.weight_transfer, DeltaWireTransfer):
        raise EngineRefused("the trainer's weight_transfer is not a DeltaWireTransfer, so its versions are not those of a chain.")
    worker = trainer.rollout_worker
    if not isinstance(worker, AsyncRolloutWorker) or worker._loop_cls is not _AsyncRolloutLoop:
        raise EngineRefused("only TRL's own rollout worker can be made to label its samples.")
    worker._loop_cls = LabellingLoop
    trainer.rollout_queue = _CountedSamples(trainer, trainer.rollout_queue, on_sample)


class LabellingLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop, which runs in a process of TRL. It asks for completions by a route that tells which weights made each token."""

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "n": 1,
            "seed": secrets.randbits(63),  # a new seed for each request, as in TRL; otherwise several servers would draw the same tokens
        }
        if self.min_p is not None:
            sampling["min_p"] = self.min_p
        body = token_request(self._request_model, prompt_ids, sampling)
        drawn, seqs = await self._retry(lambda: self._draw(body), label=f"vllm {TOKEN_ROUTE}", max_attempts=_TRIES)
        turn = _Turn([*prompt_ids, *drawn.tokens], drawn.experts)
        return drawn.tokens, [_Drawn(logprob, seq, turn) for logprob, seq in zip(drawn.logprobs, seqs, strict=True)]

    async def _draw(self, body: dict[str, Any]) -> tuple[LabelledTokens, list[int]]:
        timeout = aiohttp.ClientTimeout(total=self.request_timeout)
        async with self.session.post(f"{self.vllm_server_url}{TOKEN_ROUTE}", json=body, timeout=timeout) as response:
            if response.status in (403, 404):
                raise EngineRefused(f"the vLLM server does not tell which weights made which token. Start it with {NEEDED_FLAG}.")
            response.raise_for_status()
            answer = await response.json()
        try:
            drawn = read_choice(answer["choices"][0])
        except EngineError as error:
            if not error.retryable:
                raise
            raise _UnusableCompletion(str(error)) from error
        if drawn.spans is None:
            raise EngineRefused(f"the vLLM server does not label tokens. It must be vLLM {OLDEST_VLLM} or later.")
        labels = drawn.labels()
        if unknown := {label for label in labels if not label.isdecimal()}:
            raise _UnusableCompletion(f"weights of no known version made tokens; the server calls them {sorted(unknown)}")
        return drawn, [int(label) for label in labels]

    async def _score_group(self, group: Any) -> list[LabelledSample]:
        samples = await super()._score_group(group)
        rows = [row for conversation in group.completions_sequences for row in conversation]
        return [_labelled(sample, row.old_log_probs) for sample, row in zip(samples, rows, strict=True)]


class _UnusableCompletion(aiohttp.ClientError):  # type: ignore[misc]
    """Raised for a completion that must not be trained on. TRL's loop repeats the request after errors of this type."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """The token ids of a request and its completion, and their experts as the server sent them, if it did."""

    ids: list[int]
    experts: Any


class _Drawn(float):
    """The log-prob of a token, which knows the version that drew the token, and the request.

    TRL joins the turns of a conversation, and separates them again if their tokens do not match. Each token keeps its log-prob through all
    of that, so the log-prob also carries both.
    """

    __slots__ = ("seq", "turn")

    def __new__(cls, logprob: float, seq: int, turn: _Turn | None = None) -> _Drawn:
        drawn = super().__new__(cls, logprob)
        drawn.seq, drawn.turn = seq, turn
        return drawn

    seq: int
    turn: _Turn | None


def _labelled(sample: RolloutSample, logprobs: list[float]) -> LabelledSample:
    made_by = np.array([logprob.seq if isinstance(logprob, _Drawn) else NO_VERSION for logprob in logprobs], np.int64)
    if made_by.shape != sample.completion_mask.shape or (made_by[sample.completion_mask != 0] == NO_VERSION).any():
        raise EngineError("this release of TRL assembles samples in a way that loses which version made a token.")
    labelled = LabelledSample(**{each.name: getattr(sample, each.name) for each in fields(RolloutSample)}, made_by=made_by)
    labelled.metrics["sample/versions"] = float(len(labelled.versions))
    labelled.turns = tuple(_recorded_turns(sample.input_ids.tolist(), logprobs))
    return labelled


def _recorded_turns(ids: list[int], logprobs: list[float]) -> Iterator[RecordedTurn]:
    """Yield the turns that have experts, in order. A turn whose tokens are not those of the sample is left out."""
    turns = dict.fromkeys(logprob.turn for logprob in logprobs if isinstance(logprob, _Drawn))
    for turn in turns:
        if turn is not None and turn.experts is not None and ids[: len(turn.ids)] == turn.ids:
            yield RecordedTurn(len(turn.ids), turn.experts)


class _CountedSamples:
    """Wraps TRL's queue of samples in the trainer's process. It converts versions of the chain to TRL's count of syncs."""

    def __init__(self, trainer: Any, samples: Any, on_sample: Callable[[LabelledSample], Any]) -> None:
        self._trainer = trainer
        self._samples = samples
        self._on_sample = on_sample

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._samples.get(*args, **kwargs)
        oldest = sample.versions[:1]
        if oldest:
            # The thread that makes syncs calls this between two of them, so TRL has counted all published versions.
            published = [version.seq for version in self._trainer.weight_transfer.versions]
            sample.model_version = self._trainer.model_version - len(published) + bisect_right(published, oldest[0])
        self._on_sample(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

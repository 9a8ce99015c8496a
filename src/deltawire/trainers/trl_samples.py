"""TRL's `AsyncGRPOTrainer`: every sample carries the versions of the chain that made it, token by token.

>>> trainer = AsyncGRPOTrainer(..., weight_transfer=DeltaWireTransfer("s3://bucket/run"))
>>> label_samples(trainer)
>>> trainer.train()

By itself TRL tags a group of samples with the number of syncs at the time when the first of them was begun. A sample that is generated
across a swap, or by a server that was restarted and has the weights of the start for a while, is not told apart. Here every token is
attributed to what the server says has made it (deltawire/engines/vllm/token_route.py), so the server has to run with `--enable-scale-out`;
what was made by weights of no known version is thrown away and generated again.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample, _AsyncRolloutLoop

from ..engines.vllm import OLDEST_VLLM
from ..engines.vllm.token_route import NEEDED_FLAG, TOKEN_ROUTE, LabelledTokens, read_choice, token_request
from ..errors import EngineError, EngineRefused
from .trl import DeltaWireTransfer

NOBODY = -1
"""In `LabelledSample.made_by`: a token that no version made, such as those of prompts."""

_TRIES = 30
"""As many as TRL's own requests have."""


@dataclass(slots=True)
class LabelledSample(RolloutSample):  # type: ignore[misc]
    """A sample that knows what made it. TRL's `model_version` is that of the oldest of its versions."""

    made_by: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Of each token of `input_ids` the version that made it, by its number in the chain, or `NOBODY`."""

    @property
    def versions(self) -> list[int]:
        """The versions that made tokens of it, oldest first."""
        return [int(seq) for seq in np.unique(self.made_by[self.made_by != NOBODY])]


def label_samples(trainer: Any, on_sample: Callable[[LabelledSample], Any] = lambda sample: None) -> None:
    """Let a trainer whose `weight_transfer` is a `DeltaWireTransfer` get labelled samples. To be called before `train`, by every rank.

    TRL's staleness is then that of the oldest token of a sample. `on_sample` is called, in the trainer's process, with each sample that the
    trainer takes, also those that it then drops as stale. `EngineRefused` for a rollout worker that is not TRL's own.
    """
    if trainer.rollout_worker is None:  # another rank has it
        return
    if not isinstance(trainer.weight_transfer, DeltaWireTransfer):
        raise EngineRefused("the trainer's weight_transfer is no DeltaWireTransfer, so its versions are not those of a chain.")
    worker = trainer.rollout_worker
    if not isinstance(worker, AsyncRolloutWorker) or worker._loop_cls is not _AsyncRolloutLoop:
        raise EngineRefused("only TRL's own rollout worker can be made to label its samples.")
    worker._loop_cls = LabellingLoop
    trainer.rollout_queue = _CountedSamples(trainer, trainer.rollout_queue, on_sample)


class LabellingLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop, in its process, with completions by a route that tells what made them."""

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "n": 1,
            "seed": secrets.randbits(63),  # one of its own, as in TRL, or several servers would draw the same
        }
        if self.min_p is not None:
            sampling["min_p"] = self.min_p
        body = token_request(self._request_model, prompt_ids, sampling)
        drawn, seqs = await self._retry(lambda: self._draw(body), label=f"vllm {TOKEN_ROUTE}", max_attempts=_TRIES)
        return drawn.tokens, [_Drawn(logprob, seq) for logprob, seq in zip(drawn.logprobs, seqs, strict=True)]

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
            raise _DrawnInVain(str(error)) from error
        if drawn.spans is None:
            raise EngineRefused(f"the vLLM server does not label tokens. It must be vLLM {OLDEST_VLLM} or later.")
        labels = drawn.labels()
        if unknown := {label for label in labels if not label.isdecimal()}:
            raise _DrawnInVain(f"tokens were made by weights that are called {sorted(unknown)}, and are of no known version")
        return drawn, [int(label) for label in labels]

    async def _score_group(self, group: Any) -> list[LabelledSample]:
        samples = await super()._score_group(group)
        rows = [row for conversation in group.completions_sequences for row in conversation]
        return [_labelled(sample, row.old_log_probs) for sample, row in zip(samples, rows, strict=True)]


class _DrawnInVain(aiohttp.ClientError):  # type: ignore[misc]
    """A completion that must not be trained on. Of a kind that TRL's loop repeats requests for."""


class _Drawn(float):
    """The log-prob of a token, which knows the version that drew it.

    TRL puts the turns of a conversation together, and apart again where their tokens do not fit, and keeps of each token its log-prob:
    so what belongs to a token goes along with that.
    """

    __slots__ = ("seq",)

    def __new__(cls, logprob: float, seq: int) -> _Drawn:
        drawn = super().__new__(cls, logprob)
        drawn.seq = seq
        return drawn

    seq: int


def _labelled(sample: RolloutSample, logprobs: list[float]) -> LabelledSample:
    made_by = np.array([logprob.seq if isinstance(logprob, _Drawn) else NOBODY for logprob in logprobs], np.int64)
    if made_by.shape != sample.completion_mask.shape or (made_by[sample.completion_mask != 0] == NOBODY).any():
        raise EngineError("this TRL puts samples together in a way in which tokens cannot be followed to what made them.")
    labelled = LabelledSample(**{each.name: getattr(sample, each.name) for each in fields(RolloutSample)}, made_by=made_by)
    labelled.metrics["sample/versions"] = float(len(labelled.versions))
    return labelled


class _CountedSamples:
    """TRL's queue of samples, in the trainer's process. Versions of the chain are told to TRL as it counts them: by its syncs."""

    def __init__(self, trainer: Any, samples: Any, on_sample: Callable[[LabelledSample], Any]) -> None:
        self._trainer = trainer
        self._samples = samples
        self._on_sample = on_sample

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._samples.get(*args, **kwargs)
        oldest = sample.versions[:1]
        if oldest:
            # Called between two syncs, by the thread that makes them: as many versions are published as were counted.
            published = [version.seq for version in self._trainer.weight_transfer.versions]
            sample.model_version = self._trainer.model_version - len(published) + bisect_right(published, oldest[0])
        self._on_sample(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

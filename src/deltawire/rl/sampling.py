"""Completions from a causal language model whose weights may change between any two of its forward passes.

Every token comes with its log-prob under the distribution that it was drawn from, and with the version of the weights that made it. With
these a trainer can correct for an older policy, and for a completion that several versions made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..chain.version import Version
from ..engines import HotSwap, ModuleEngine
from ..errors import EngineUnavailable
from ..fleet.generation import Generated, GeneratedSpan, Interrupted, Stop, never
from ..format.records.trainer_records import Sampling
from ..format.routing import MISSING, RecordedExperts, RoutingLayout
from .routing.routing_recorder import RoutingRecorder

_AnyRow = TypeVar("_AnyRow")

ForwardPass = Callable[[], contextlib.AbstractContextManager[Version]]
"""Entered around every forward pass. It yields the version of the weights and prevents swaps until it is left."""


def passes_of(policy: HotSwap) -> ForwardPass:
    """Return the forward passes of a module that follows a chain (`HotSwap` over a `ModuleEngine`).

    Entering one before the first sync raises `EngineUnavailable`.
    """
    engine = policy.engine
    if not isinstance(engine, ModuleEngine):
        raise TypeError(f"{engine.name} does not run forward passes in this process; use a ModuleEngine")

    @contextlib.contextmanager
    def one_pass() -> Iterator[Version]:
        with engine.forward_pass():
            version = policy.live
            if version is None:
                raise EngineUnavailable(f"{engine.name} does not have a version of the chain yet.")
            yield version

    return one_pass


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    forward_pass: ForwardPass,
    stop_tokens: Collection[int] = (),
    stop: Stop = never,
    recorder: RoutingRecorder | None = None,
) -> list[Generated]:
    """Return `sampling.samples` completions of each prompt, those of the first prompt first. All are made in one batch.

    Prompts need at least one token. A completion ends with the first of `stop_tokens`, which it includes. Temperature 0 takes the most
    probable token. The KV cache is kept across swaps, so a completion may mix versions; its spans say which. `stop` is asked before each
    pass; `Interrupted` is raised when it returns true. `recorder` records the experts of each token, in the version that processed it. The
    last token of a completion has none, because the model never processes it.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    repeated = [prompt for prompt in prompts for _ in range(sampling.samples)]
    rows = [_Row() for _ in repeated]
    if not rows:
        return []
    batch = Batch(model, repeated)
    chance = torch.Generator(device=batch.device).manual_seed(sampling.seed)
    with torch.inference_mode():
        while any(row.is_live for row in rows):
            if stop():
                raise Interrupted
            with forward_pass() as version, contextlib.nullcontext() if recorder is None else recorder.one_pass() as recording:
                logits = batch.forward()
            if recording is not None:
                for row, experts in zip(batch.rows(rows), batch.split(recording.take()), strict=True):
                    if row.is_live:
                        row.experts.append(experts)
            tokens, logprobs = draw(logits, sampling.temperature, sampling.top_p, chance)
            for row, token, logprob in zip(batch.rows(rows), tokens.tolist(), logprobs.tolist(), strict=True):
                if row.is_live:
                    row.add(token, logprob, version)
                    row.finished = token in stop_tokens
                    row.is_live = not row.finished and len(row.tokens) < sampling.max_tokens
            batch.advance(tokens, [row.is_live for row in batch.rows(rows)])
    return [row.generated(None if recorder is None else recorder.layout) for row in rows]


def draw(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row of logits. Return the tokens and their log-probs under the distribution that they were drawn from."""
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logprobs = torch.log_softmax(logits / temperature, -1)
    if top_p < 1:
        ordered, order = logprobs.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)  # the most probable token is always kept
        logprobs = torch.log_softmax(torch.empty_like(ordered).scatter_(-1, order, ordered), -1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


@dataclass(slots=True)
class _Row:
    """A completion that is being made."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[GeneratedSpan] = field(default_factory=list)
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    is_live: bool = True
    finished: bool = False

    def add(self, token: int, logprob: float, version: Version) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version.seq == version.seq:
            self.spans[-1] = GeneratedSpan(self.spans[-1].start, position + 1, version)
        else:
            self.spans.append(GeneratedSpan(position, position + 1, version))

    def generated(self, layout: RoutingLayout | None) -> Generated:
        routing = None
        if layout is not None:
            missing = np.full((1, len(layout.layers), layout.top_k), MISSING, np.int16)
            routing = RecordedExperts(layout, np.concatenate([*self.experts, missing]))
        spans = tuple(self.spans)
        return Generated(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), spans, self.finished, routing)


class Batch:
    """The input of the next forward pass: first the left-padded prompts, then one token per row on top of the KV cache.

    Ended rows stay in the batch until half of it has ended, because removing rows copies the cache.

    Parameters
    ----------
    model
        The model.
    prompts
        The token ids of each prompt, at least one.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self.device = next(model.parameters()).device
        width = max(len(prompt) for prompt in prompts)
        self._input = torch.zeros((len(prompts), width), dtype=torch.long, device=self.device)
        self._mask = torch.zeros_like(self._input)
        for row, prompt in enumerate(prompts):
            self._input[row, width - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.long)
            self._mask[row, width - len(prompt) :] = 1
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None
        self._members = list(range(len(prompts)))

    def rows(self, rows: Sequence[_AnyRow]) -> list[_AnyRow]:
        """Return the rows that are still in the batch, in its order."""
        return [rows[member] for member in self._members]

    def forward(self) -> torch.Tensor:
        """Return the logits of the next token of each row."""
        out = self._model(
            input_ids=self._input,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def split(self, experts: NDArray[np.int32]) -> list[NDArray[np.int16]]:
        """Return the experts of each row of the last pass, without those of padding."""
        height, width = self._input.shape
        by_row = experts.astype(np.int16).reshape(height, width, *experts.shape[1:])
        kept = self._mask[:, -width:].bool().cpu().numpy()
        return [rows[mask] for rows, mask in zip(by_row, kept, strict=True)]

    def advance(self, tokens: torch.Tensor, is_live: Sequence[bool]) -> None:
        """Make the drawn tokens the input of the next pass.

        Parameters
        ----------
        tokens
            The token of each row.
        is_live
            Whether each row continues.
        """
        self._input = tokens[:, None]
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self._positions = self._positions[:, -1:] + 1
        if 0 < sum(is_live) <= len(is_live) // 2:
            kept = [row for row, lives in enumerate(is_live) if lives]
            index = torch.tensor(kept, device=self.device)
            self._input, self._mask, self._positions = self._input[index], self._mask[index], self._positions[index]
            self._cache.batch_select_indices(index)
            self._members = [self._members[row] for row in kept]

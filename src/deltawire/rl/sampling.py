"""Completions from a causal language model whose weights may change between any two of its forward passes.

Every token comes with the log-prob under the distribution that it was drawn from, and with the version of the weights that made it. That is
all that a trainer needs to correct for a policy which is not the newest, or which was more than one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..chain.version import Version
from ..engines import HotSwap, ModuleEngine
from ..errors import EngineUnavailable
from ..fleet.generation import Generated, GeneratedSpan, Interrupted, Stop, never
from ..format.records.fleet_records import Sampling

ForwardPass = Callable[[], contextlib.AbstractContextManager[Version]]
"""Entered around every forward pass: says which version's weights make it, and holds them still until it is left."""


def passes_of(policy: HotSwap) -> ForwardPass:
    """The forward passes of a module that follows a chain (`HotSwap` over a `ModuleEngine`).

    Entering one raises `EngineUnavailable` before the first sync: weights of no version make no rollouts.
    """
    engine = policy.engine
    if not isinstance(engine, ModuleEngine):
        raise TypeError(f"{engine.name} does its forward passes elsewhere; a ModuleEngine is needed")

    @contextlib.contextmanager
    def one_pass() -> Iterator[Version]:
        with engine.forward_pass():
            version = policy.live
            if version is None:
                raise EngineUnavailable(f"{engine.name} has no version of the chain yet.")
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
) -> list[Generated]:
    """`sampling.samples` completions of each prompt (of at least one token), those of the first prompt first, all in one batch.

    A completion ends with the first of `stop_tokens`, included. Temperature 0 takes the most probable token. The KV cache outlives swaps: a
    completion that a swap falls into is a mix, and its spans say of what. `stop` is asked before each pass; `Interrupted` if it says yes.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    repeated = [prompt for prompt in prompts for _ in range(sampling.samples)]
    rows = [_Row() for _ in repeated]
    if not rows:
        return []
    batch = _Batch(model, repeated)
    chance = torch.Generator(device=batch.device).manual_seed(sampling.seed)
    with torch.inference_mode():
        while any(row.is_live for row in rows):
            if stop():
                raise Interrupted
            with forward_pass() as version:
                logits = batch.forward()
            tokens, logprobs = draw(logits, sampling.temperature, sampling.top_p, chance)
            for row, token, logprob in zip(batch.rows(rows), tokens.tolist(), logprobs.tolist(), strict=True):
                if row.is_live:
                    row.add(token, logprob, version)
                    row.finished = token in stop_tokens
                    row.is_live = not row.finished and len(row.tokens) < sampling.max_tokens
            batch.advance(tokens, [row.is_live for row in batch.rows(rows)])
    return [row.generated() for row in rows]


def draw(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row of logits, and its log-prob under what it was drawn from."""
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logprobs = torch.log_softmax(logits / temperature, -1)
    if top_p < 1:
        ordered, order = logprobs.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)  # the first is always kept: nothing is before it
        logprobs = torch.log_softmax(torch.empty_like(ordered).scatter_(-1, order, ordered), -1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[GeneratedSpan] = field(default_factory=list)
    is_live: bool = True
    finished: bool = False

    def add(self, token: int, logprob: float, version: Version) -> None:
        place = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version.seq == version.seq:
            self.spans[-1] = GeneratedSpan(self.spans[-1].start, place + 1, version)
        else:
            self.spans.append(GeneratedSpan(place, place + 1, version))

    def generated(self) -> Generated:
        return Generated(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), tuple(self.spans), self.finished)


class _Batch:
    """What goes into the next forward pass: left-padded prompts first, then one token a row on top of the KV cache.

    Rows that have ended are computed along until half of the batch has: leaving them out copies the cache.
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

    def rows(self, rows: Sequence[_Row]) -> list[_Row]:
        """Those that are in the batch still, in its order."""
        return [rows[member] for member in self._members]

    def forward(self) -> torch.Tensor:
        """The logits of the next token of each row."""
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

    def advance(self, tokens: torch.Tensor, is_live: Sequence[bool]) -> None:
        """Put the tokens that were drawn into the next pass."""
        self._input = tokens[:, None]
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self._positions = self._positions[:, -1:] + 1
        if 0 < sum(is_live) <= len(is_live) // 2:
            kept = [row for row, lives in enumerate(is_live) if lives]
            index = torch.tensor(kept, device=self.device)
            self._input, self._mask, self._positions = self._input[index], self._mask[index], self._positions[index]
            self._cache.batch_select_indices(index)
            self._members = [self._members[row] for row in kept]

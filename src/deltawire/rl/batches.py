"""The rollouts of a step as tensors to train on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..fleet.rules.live_tasks import LIVE_MEMBER
from ..format.rollouts import Completion, Rollouts
from .grpo import group_advantages
from .routing.router_replay import lay_out


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Prompts and completions, one per row, padded on the right.

    Tensors about tokens have one column less than `ids`, because the first token is given.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    """1 for tokens that the policy drew itself."""
    rewards: torch.Tensor
    advantages: torch.Tensor
    lag: float
    """The number of steps that the policy was behind the newest possible weights, averaged over the tokens in `mask`."""
    mixed: int
    """Completions that more than one version made."""
    reward_means: Mapping[str, float | None]
    """The mean of each reward over the completions that it scored, or None if it scored none."""
    lengths: torch.Tensor
    """The number of tokens of each completion that the policy drew."""
    unfinished: float
    """The share of completions that were cut at the largest length."""
    members: tuple[str, ...]
    """The member that made each completion."""
    lags: torch.Tensor
    """The number of steps that the policy was behind when it drew each token."""
    damaged: int = 0
    """The number of rows of experts that members dropped because they were damaged."""
    experts: torch.Tensor | None = None
    """The recorded experts of each token [rows, columns, layers, top k], −1 where none were recorded. None if they are not replayed."""

    @property
    def tokens(self) -> int:
        """The number of tokens that are trained on."""
        return int(self.mask.sum())

    def micro_batches(self, rows: int, device: torch.device) -> Iterator[TrainingBatch]:
        """Yield the batch in pieces of `rows` rows, each cut to its own longest row."""
        for first in range(0, len(self.ids), rows):
            here = slice(first, first + rows)
            width = int(self.attention[here].sum(-1).max())
            yield TrainingBatch(
                self.ids[here, :width].to(device),
                self.attention[here, :width].to(device),
                self.behaviour[here, : width - 1].to(device),
                self.mask[here, : width - 1].to(device),
                self.rewards[here].to(device),
                self.advantages[here].to(device),
                self.lag,
                self.mixed,
                self.reward_means,
                self.lengths[here],
                self.unfinished,
                self.members[here],
                self.lags[here, : width - 1],
                self.damaged,
                None if self.experts is None else self.experts[here, :width],
            )


def training_batch(
    results: Sequence[Rollouts],
    *,
    for_step: int,
    weights: Mapping[str, float] | None = None,
    check_experts: Callable[[NDArray[Any]], NDArray[np.int32]] | None = None,
) -> TrainingBatch:
    """Return one row per completion. The completions of one prompt form a group. `weights` has reward weights by name (default 1).

    All completions from live traffic form one group, because their prompts have one completion each.

    `check_experts` returns recorded experts in the form that the model replays, or raises `UnusableRouting`. Without it the batch has none.
    """
    made = [(group, result, one) for group, result, one in _with_groups(results)]
    rows = [np.concatenate([result.prompts[one.prompt], one.tokens]) for _, result, one in made]
    height, width = len(rows), max(len(row) for row in rows)
    ids, attention = torch.zeros((height, width), dtype=torch.long), torch.zeros((height, width), dtype=torch.long)
    behaviour, mask = torch.zeros((height, width - 1)), torch.zeros((height, width - 1), dtype=torch.bool)
    lags = torch.zeros((height, width - 1), dtype=torch.long)
    for number, (row, (_, result, one)) in enumerate(zip(rows, made, strict=True)):
        drawn = slice(len(row) - len(one.tokens) - 1, len(row) - 1)
        ids[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
        attention[number, : len(row)] = 1
        behaviour[number, drawn] = torch.from_numpy(one.logprobs.astype(np.float32))
        mask[number, drawn] = torch.from_numpy(one.mask.astype(bool))
        lags[number, drawn] = torch.from_numpy(_token_lags(one, result, for_step))
    rewards = torch.tensor([_reward(one, result.reward_names, weights or {}) for _, result, one in made], dtype=torch.float64)
    groups = torch.tensor([group for group, _, _ in made])
    experts = None
    if check_experts is not None:
        experts = lay_out(
            [None if (found := getattr(one, "experts", None)) is None else check_experts(found) for _, _, one in made], attention
        )
    return TrainingBatch(
        ids,
        attention,
        behaviour,
        mask,
        rewards.float(),
        group_advantages(rewards, groups).float(),
        lag=float(lags[mask].double().mean()) if mask.any() else 0.0,
        mixed=sum(len(one.spans) > 1 for _, _, one in made),
        reward_means=_reward_means(results),
        lengths=torch.tensor([int(one.mask.sum()) for _, _, one in made]),
        unfinished=sum(not one.finished for _, _, one in made) / len(made),
        members=tuple(result.member for _, result, _ in made),
        lags=lags,
        damaged=sum(result.routing.broken for result in results if result.routing is not None),
        experts=experts,
    )


def _with_groups(results: Collection[Rollouts]) -> Iterator[tuple[int, Rollouts, Completion]]:
    before = 0
    for result in results:
        for one in result.completions:
            yield -1 if result.member == LIVE_MEMBER else before + one.prompt, result, one
        before += len(result.prompts)


def _reward(one: Completion, names: Sequence[str], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the rewards, or NaN if no function scored the completion."""
    said = [reward * weights.get(name, 1.0) for name, reward in zip(names, one.rewards, strict=True) if reward is not None]
    return sum(said) if said else math.nan


def _reward_means(results: Sequence[Rollouts]) -> dict[str, float | None]:
    said: dict[str, list[float]] = {name: [] for result in results for name in result.reward_names}
    for result in results:
        for one in result.completions:
            for name, reward in zip(result.reward_names, one.rewards, strict=True):
                if reward is not None:
                    said[name].append(reward)
    return {name: sum(values) / len(values) if values else None for name, values in said.items()}


def _token_lags(one: Completion, result: Rollouts, for_step: int) -> NDArray[np.int64]:
    return np.concatenate([np.full(span.end - span.start, for_step - 1 - result.versions[span.seq].step, np.int64) for span in one.spans])

"""The limits of a trainer's model. Every result is checked against them before it is accepted. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...format.records.fleet_files import Row
from ...format.rollouts import Completion, Rollouts
from ...format.routing import RoutingLayout

LARGEST_REWARD = 1e9
"""No reward may be larger than this, or smaller than its negative. Sums and squares of such rewards are finite in float32."""

LOWEST_LOGPROB = -1000.0
"""No token that the policy drew may have a lower log-prob: float32 sampling never draws a token below about -104."""

Encode: TypeAlias = Callable[[Sequence[Row]], Sequence[Sequence[int]]]
"""Returns the token ids of the rows' prompts."""


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """The facts about results that training relies on. A trainer that knows its model sets them all; a limit that is None is not checked.

    Parameters
    ----------
    vocabulary
        Token ids must be below this number.
    positions
        The largest number of tokens that a prompt and its completion may have together.
    encode
        The trainer's own tokenizer: it returns the token ids of rows' prompts. A result must then hold exactly the prompts of its task.
    routers
        The routers of the model. Routed experts of a result, if it has any, must be of them.
    """

    vocabulary: int | None = None
    positions: int | None = None
    encode: Encode | None = None
    routers: RoutingLayout | None = None

    def prompts_of(self, rows: Sequence[Row]) -> tuple[tuple[int, ...], ...] | None:
        """Return the prompts that a result must hold, or None if that is not checked. Raises what `encode` raises.

        Parameters
        ----------
        rows
            The rows of the task.
        """
        return None if self.encode is None else tuple(tuple(prompt) for prompt in self.encode(rows))


def why_untrainable(rollouts: Rollouts, limits: TrainingLimits) -> str | None:
    """Return why training could not use this result, or None if it can.

    Parameters
    ----------
    rollouts
        The result.
    limits
        What the model can be trained on.
    """
    if limits.vocabulary is not None and (token := _largest_token(rollouts)) >= limits.vocabulary:
        return f"token {token} is outside the vocabulary of {limits.vocabulary:,} tokens"
    if rollouts.routing is not None and limits.routers is not None and rollouts.routing.layout != limits.routers:
        return f"its routed experts are of another model: {_described(rollouts.routing.layout)} instead of {_described(limits.routers)}"
    for one in rollouts.completions:
        if (why := _why_not(one, len(rollouts.prompts[one.prompt]), rollouts.reward_names, limits)) is not None:
            return why
    return None


def _why_not(one: Completion, prompt: int, names: Sequence[str], limits: TrainingLimits) -> str | None:
    length = prompt + len(one.tokens)
    if limits.positions is not None and length > limits.positions:
        return f"a prompt and its completion have {length:,} tokens, more than the model's {limits.positions:,} positions"
    own = one.logprobs[one.mask != 0]
    if own.size and float(own.min()) < LOWEST_LOGPROB:
        return f"the log-prob {float(own.min()):.3g} is below {LOWEST_LOGPROB:g}"
    for name, reward in zip(names, one.rewards, strict=True):
        if reward is not None and abs(reward) > LARGEST_REWARD:
            return f"the reward {name!r} is {reward:.3g}; rewards are from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
    return None


def _largest_token(rollouts: Rollouts) -> int:
    return max(int(np.max(each)) for each in (*rollouts.prompts, *(one.tokens for one in rollouts.completions)))


def _described(layout: RoutingLayout) -> str:
    return f"{layout.top_k} of {layout.experts:,} experts in {len(layout.layers):,} layers from {layout.layers[0]} to {layout.layers[-1]}"

"""The GRPO loss: advantages within a group, PPO's clip, and truncated importance sampling for tokens that other weights made.

The loss compares three policies. The *behaviour* policy drew a token. It is an older version in bf16, or quantised, and a completion may
mix versions.
The training step starts from the *old* policy and changes the *current* one. The ratio current/old is clipped, because the step is reliable
only near the old policy. The weight old/behaviour corrects for tokens from other weights. It is bounded so that no token dominates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

_SMALL = 1e-6
_LARGEST_LOG_RATIO = 20.0
"""Ratios of probabilities stay below e^20. That is far beyond every clip, and no ratio becomes infinite."""


ImportanceSamplingMode: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and its statistics. Counts are sums over tokens, so that micro-batches add up; divide by `tokens` for shares."""

    loss: torch.Tensor
    tokens: int
    clipped: int
    """Tokens whose gradient the clip removed."""
    truncated: int
    """Tokens whose importance weight was out of bounds, so that it was truncated or masked."""
    weight: float
    """The sum of importance weights after that."""
    mismatch: float
    """The sum of the estimates of KL(behaviour ‖ old), in nats. The estimate of a token is r − log r − 1 with r = old/behaviour ("k3")."""
    drift: torch.Tensor
    """The log of old/behaviour for each token [completions, tokens], at most 20. It is 0 for tokens that do not count."""
    is_truncated: torch.Tensor
    """The tokens that `truncated` counts."""


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The clipped loss. Parameters have TRL's names.

    Parameters
    ----------
    epsilon
        The ratio current/old is clipped to at least 1−epsilon.
    epsilon_high
        The ratio current/old is clipped to at most 1+epsilon_high.
    importance_sampling_clip_max
        The largest weight old/behaviour.
    importance_sampling_correction
        Whether tokens are weighted by old/behaviour. If False, all weights are 1, as if the old policy had drawn the tokens.
    importance_sampling_mode
        What happens to weights that are out of bounds. "token_truncate" sets them to the bound (truncated importance sampling, TIS), and
        "token_mask" leaves their tokens out of the loss (masked importance sampling, MIS). "sequence_truncate" and "sequence_mask" do the
        same with one weight for each completion: the product of the ratios of its tokens.
    importance_sampling_clip_min
        The smallest weight. None sets no lower bound.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling_clip_max: float = 2.0
    importance_sampling_correction: bool = True
    importance_sampling_mode: ImportanceSamplingMode = "token_truncate"
    importance_sampling_clip_min: float | None = None

    def __post_init__(self) -> None:
        if self.importance_sampling_mode not in get_args(ImportanceSamplingMode):
            raise ValueError(f"importance_sampling_mode must be one of {', '.join(get_args(ImportanceSamplingMode))}")
        if not 0 <= (self.importance_sampling_clip_min or 0.0) <= 1 <= self.importance_sampling_clip_max:
            raise ValueError("importance_sampling_clip_min must be at most 1, and importance_sampling_clip_max at least 1")

    def __call__(
        self,
        current: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        old: torch.Tensor | None = None,
        tokens: int | None = None,
    ) -> LossTerms:
        """Return the loss of log-probs [completions, tokens] with advantages [completions].

        Only tokens in `mask` count; the values of the others are ignored. Without `old` the current policy is the old one, as in the first
        update of a step. The loss is the sum over tokens divided by `tokens`. Pass the whole batch's number for a micro-batch.
        """
        mask = mask.bool()
        current = torch.where(mask, current, 0.0)  # padding may hold anything, and infinity times zero is NaN
        behaviour = torch.where(mask, behaviour, 0.0)
        old = current.detach() if old is None else torch.where(mask, old, 0.0).detach()
        difference = old - behaviour
        drift = difference.clamp(max=_LARGEST_LOG_RATIO)
        exact = drift.detach().double()
        mismatch = ((exact.expm1() - exact) * mask).sum()
        weights, truncated = self._weights(difference, mask)
        ratio = torch.exp((current - old).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))
        gain = advantages[:, None]
        plain = ratio * gain
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high) * gain
        per_token = -torch.minimum(plain, clipped) * weights * mask
        return LossTerms(
            loss=per_token.sum() / max(1, int(mask.sum()) if tokens is None else tokens),
            tokens=int(mask.sum()),
            clipped=int(((clipped < plain) & mask).sum()),
            truncated=int(truncated.sum()),
            weight=float((weights * mask).sum()),
            mismatch=float(mismatch),
            drift=drift.detach(),
            is_truncated=truncated,
        )

    def _weights(self, difference: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the importance weight of each token, and the tokens whose weight was out of bounds."""
        if not self.importance_sampling_correction:
            return torch.ones_like(difference), torch.zeros_like(mask)
        if self.importance_sampling_mode.startswith("sequence"):
            difference = difference.sum(-1, keepdim=True).expand_as(difference)
        weights = torch.exp(difference.clamp(max=_LARGEST_LOG_RATIO))
        bounded = weights.clamp(self.importance_sampling_clip_min, self.importance_sampling_clip_max)
        outside = weights != bounded
        return torch.where(outside, 0.0, weights) if self.importance_sampling_mode.endswith("mask") else bounded, outside & mask


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return how much better than its group each completion is, in standard deviations of the group.

    A reward of NaN means that the completion has none. The advantage is 0 without a reward, and if all rewards of a group are equal. It is
    computed in float64 and returned in the type of `rewards`.
    """
    exact = rewards.double()
    advantages = torch.zeros_like(exact)
    for group in groups.unique():
        here = (groups == group) & ~exact.isnan()
        if here.sum() > 1:
            own = exact[here]
            advantages[here] = (own - own.mean()) / (own.std() + _SMALL)
    return advantages.to(rewards.dtype)


def token_logprobs(model: Any, ids: torch.Tensor, mask: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs alone: see `logprobs_and_entropy`."""
    return _logprobs(_logits(model, ids, mask, temperature), ids)


def logprobs_and_entropy(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs [rows, columns−1] of every token after the first, and the entropies of the distributions.

    Rows are padded on the right; `mask` is 1 for tokens. Logits are divided by `temperature`, as in the sampler, unless it is 0. Entropies
    have no gradient.
    """
    logits = _logits(model, ids, mask, temperature)
    with torch.no_grad():  # row by row: the probabilities of a whole batch would take as much memory as its logits
        entropies = torch.stack([-(p * row.log_softmax(-1)).sum(-1) for row in logits for p in [row.softmax(-1)]])
    return _logprobs(logits, ids), entropies


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
    return chosen - logits.logsumexp(-1)

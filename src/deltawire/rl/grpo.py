"""The GRPO loss: advantages within a group, PPO's clip, and truncated importance sampling for tokens that other weights made.

The loss compares three policies. The *behaviour* policy drew a token. It is an older version in bf16, or quantised, and a completion may
mix versions.
The training step starts from the *old* policy and changes the *current* one. The ratio current/old is clipped, because the step is reliable
only near the old policy. The weight old/behaviour corrects for tokens from other weights. It is capped so that no token dominates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_SMALL = 1e-6
_LARGEST_LOG_RATIO = 20.0
"""Ratios of probabilities stay below e^20. That is far beyond every clip, and no ratio becomes infinite."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and its statistics. Counts are sums over tokens, so that micro-batches add up; divide by `tokens` for shares."""

    loss: torch.Tensor
    tokens: int
    clipped: int
    """Tokens whose gradient the clip removed."""
    truncated: int
    """Tokens whose importance weight is above the cap."""
    weight: float
    """The sum of importance weights after truncation."""
    mismatch: float
    """The sum of the estimates of KL(behaviour ‖ old), in nats. The estimate of a token is r − log r − 1 with r = old/behaviour ("k3")."""


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The clipped loss. Parameters have TRL's names.

    Parameters
    ----------
    epsilon
        The ratio current/old is clipped to at least 1−epsilon.
    epsilon_high
        The ratio current/old is clipped to at most 1+epsilon_high.
    importance_sampling_cap
        The largest weight old/behaviour.
    importance_sampling_correction
        Whether tokens are weighted by old/behaviour. If False, all weights are 1, as if the old policy had drawn the tokens.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling_cap: float = 2.0
    importance_sampling_correction: bool = True

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
        drift = (old - behaviour).clamp(max=_LARGEST_LOG_RATIO)
        weights = torch.exp(drift)
        exact = drift.detach().double()
        mismatch = ((exact.expm1() - exact) * mask).sum()
        if not self.importance_sampling_correction:
            weights = torch.ones_like(weights)
        truncated = (weights > self.importance_sampling_cap) & mask
        weights = weights.clamp(max=self.importance_sampling_cap)
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
        )


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

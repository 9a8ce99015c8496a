"""The GRPO loss: advantages within a group, PPO's clip, and truncated importance sampling for tokens that other weights made.

Three policies meet in it: the *behaviour* policy that drew a token (an older version, in bf16, perhaps two versions within a completion),
the *old* policy that the training step starts from, and the *current* one that it moves. The step is trusted only near the old policy:
hence the clip on current/old. That tokens came from elsewhere is corrected by the weight old/behaviour, capped so that no token dominates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_SMALL = 1e-6
_LARGEST_LOG_RATIO = 20.0
"""Ratios of probabilities stay below e^20, far beyond every clip, so that none of them is infinite."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss, and what happened in it. The shares are sums over tokens, so that parts of a batch add up; `tokens` is what to divide by."""

    loss: torch.Tensor
    tokens: int
    clipped: int
    """Tokens whose gradient the clip has cut off."""
    truncated: int
    """Tokens whose importance weight is above the cap."""
    weight: float
    """The sum of importance weights after truncation."""


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The clipped loss. Parameters have the names that TRL gives them.

    `epsilon`: current/old is clipped at 1−epsilon from below. `epsilon_high`: it is clipped at 1+epsilon_high from above.
    `importance_sampling_cap`: old/behaviour is cut to this.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling_cap: float = 2.0

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
        """The loss of log-probs [completions, tokens] under advantages [completions].

        Only tokens with `mask` count; what the others hold is never looked at. `old` is the current policy if not given: the first update
        of a step. The loss is the sum over tokens divided by `tokens`, those of the whole batch where this is a part of it.
        """
        mask = mask.bool()
        current = torch.where(mask, current, 0.0)  # padding may hold anything, and infinity times zero is not zero
        behaviour = torch.where(mask, behaviour, 0.0)
        old = current.detach() if old is None else torch.where(mask, old, 0.0).detach()
        weights = torch.exp((old - behaviour).clamp(max=_LARGEST_LOG_RATIO))
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
        )


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """How much better than its group each completion did, in standard deviations of the group. NaN is a completion without a reward.

    0 where there is nothing to compare: no reward, or all of the group alike. Computed in float64, returned in the type of `rewards`.
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
    """Return log-probs [rows, columns−1] of every token but the first, given those before it, and the entropies they were drawn with.

    Rows are padded on the right; `mask` is 1 where there are tokens. With a `temperature` above 0 other than 1 both are of the
    distribution that a sampler with it draws from. Entropies have no gradient.
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

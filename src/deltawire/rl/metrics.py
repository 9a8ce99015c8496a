"""The metrics of a training step, and some of its completions to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..engines.prompts import Prompts
from ..fleet.rules.live_tasks import LIVE_MEMBER
from ..fleet.steps.batch_steps import Batch
from .batches import TrainingBatch
from .mismatch import Mismatch

_SHOWN = 1000
_PUBLISHED = ("reward", "reward_std", "loss", "entropy", "mismatch_kl", "lag", "tokens")


def step_metrics(batch: TrainingBatch) -> dict[str, float | None]:
    """Return the metrics of a batch, under TRL's names where they mean the same. A metric is None if there is nothing to count."""
    scored = batch.rewards[~batch.rewards.isnan()].double()
    return {
        "reward": scored.mean().item() if len(scored) else None,
        "reward_std": scored.std(correction=0).item() if len(scored) else None,
        **{f"rewards/{name}/mean": mean for name, mean in batch.reward_means.items()},
        "completions": len(batch.rewards),
        "completions/mean_length": batch.lengths.double().mean().item(),
        "completions/min_length": int(batch.lengths.min()),
        "completions/max_length": int(batch.lengths.max()),
        "completions/clipped_ratio": batch.unfinished,
        "tokens": batch.tokens,
        "mixed": batch.mixed,
        "lag": batch.lag if math.isfinite(batch.lag) else None,
    }


def mismatch_metrics(mismatch: Mismatch | None) -> dict[str, float]:
    """Return the mismatch of a step, under TRL's names where they mean the same."""
    if mismatch is None:
        return {}
    return {
        "sampling/sampling_logp_difference/mean": mismatch.logp_difference_mean,
        "sampling/sampling_logp_difference/max": mismatch.logp_difference_max,
        **{f"mismatch/{name}": mismatch.fields[name] for name in ("ratio_min", "ratio_mean", "ratio_max", "ess")},
    }


def published_metrics(facts: Mapping[str, float | None]) -> dict[str, str]:
    """Return the metrics that are published with a step's version as its `meta`, so that everybody who reads the store can draw them."""
    found = ((name, facts.get(name)) for name in _PUBLISHED)
    return {name: repr(float(value)) for name, value in found if value is not None and math.isfinite(value)}


def printed_completions(collected: Batch, prompts: Prompts, most: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of an event for some completions, spread over the step's results: at most one of each result, and `most` in all.

    Answers to users are not shown.
    """
    left = most
    for rows, rollouts in zip(collected.rows, collected.rollouts, strict=True):
        if rollouts.member == LIVE_MEMBER:
            continue
        for one in rollouts.completions[: max(0, min(1, left))]:
            left -= 1
            (text,) = prompts.decode([rows[one.prompt]], [one.tokens.tolist()])
            named = {f"rewards/{name}": reward for name, reward in zip(rollouts.reward_names, one.rewards, strict=True)}
            yield {"member": rollouts.member, "prompt": _shown(rows[one.prompt]["prompt"]), "completion": _shown(text), **named}


def _shown(text: Any) -> str:
    """Return a prompt or a completion as text, shortened if it is long. For a list of messages this is the content of the last one."""
    if isinstance(text, (list, tuple)) and text and isinstance(text[-1], dict):
        text = text[-1].get("content", "")
    told = str(text)
    return told if len(told) <= _SHOWN else f"{told[: _SHOWN - 1]}…"

"""The metrics of a training step."""

from __future__ import annotations

import math
from typing import Any

from .batches import TrainingBatch

_SHOWN = 1000


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


def shown(text: Any) -> str:
    """Return a prompt or a completion as text, shortened if it is long. For a list of messages this is the content of the last one."""
    if isinstance(text, (list, tuple)) and text and isinstance(text[-1], dict):
        text = text[-1].get("content", "")
    told = str(text)
    return told if len(told) <= _SHOWN else f"{told[: _SHOWN - 1]}…"

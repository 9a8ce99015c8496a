"""Reinforcement learning on a fleet. Modules that need torch are imported on first use.

trainer         the GRPO trainer: open rounds, collect, train, publish
settings        its settings
live_steps      the part of live traffic in its rounds
preflight       checks before a run begins: model files, rows, lengths
batches         rollouts as tensors to train on
grpo            the loss
step_training   training on the results of one step, and rejecting those that fail
update          one update of the policy
mismatch        how far the policy that drew the tokens is from the trainer's
mismatch_alarm  members whose mismatch stands out
metrics         what each training step reports, and the completions that it shows
report          the lines that a trainer prints
checkpoints     the trainer's own checkpoints
resume_point    where in the chain a restarted trainer continues
member          a member of the fleet as one function call
ray_members     members as actors on a Ray cluster
generation      completions from a transformers model that follows the chain
sampling        drawing tokens while weights may change between two forward passes
rewards         reward functions, by TRL's convention
routing/        recorded experts in place of those that an MoE model chooses
serving/        a small OpenAI-compatible server
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .rewards import load_reward

if TYPE_CHECKING:
    from .grpo import GrpoLoss as GrpoLoss
    from .routing.router_replay import RouterReplay as RouterReplay
    from .settings import GrpoSettings as GrpoSettings
    from .trainer import GrpoTrainer as GrpoTrainer

__all__ = ["GrpoLoss", "GrpoSettings", "GrpoTrainer", "RouterReplay", "load_reward"]

_LATER = {"GrpoLoss": ".grpo", "GrpoSettings": ".settings", "GrpoTrainer": ".trainer", "RouterReplay": ".routing.router_replay"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)

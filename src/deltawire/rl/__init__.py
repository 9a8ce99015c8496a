"""Reinforcement learning on a fleet: sampling, rewards, the GRPO loss, a small trainer. What needs torch is imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .rewards import load_reward

if TYPE_CHECKING:
    from .grpo import GrpoLoss as GrpoLoss
    from .settings import GrpoSettings as GrpoSettings
    from .trainer import GrpoTrainer as GrpoTrainer

__all__ = ["GrpoLoss", "GrpoSettings", "GrpoTrainer", "load_reward"]

_LATER = {"GrpoLoss": ".grpo", "GrpoSettings": ".settings", "GrpoTrainer": ".trainer"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)

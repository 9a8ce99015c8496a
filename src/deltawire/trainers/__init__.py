"""Adapters for training libraries. Each is imported when it is first used, because most of them need a library.

callback      `DeltaWireCallback`, for the Hugging Face `Trainer`
fsdp          `FSDPPublisher`, for models that are sharded over many ranks
trl           `DeltaWireTransfer`, the weight transfer of TRL's `AsyncGRPOTrainer`
trl_rollouts  `FleetRolloutWorker`, which gets TRL's samples from a fleet
trl_samples   `label_samples`, which labels the tokens of TRL's samples with versions
bundles       several sets of weights in one version
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..publish.weight_source import WeightSource as WeightSource
    from .bundles import adapter_files as adapter_files
    from .bundles import adapter_weights as adapter_weights
    from .bundles import join_bundles as join_bundles
    from .callback import DeltaWireCallback as DeltaWireCallback
    from .fsdp import FSDPPublisher as FSDPPublisher

__all__ = ["DeltaWireCallback", "FSDPPublisher", "WeightSource", "adapter_files", "adapter_weights", "join_bundles"]

_LATER = {
    "DeltaWireCallback": ".callback",
    "FSDPPublisher": ".fsdp",
    "WeightSource": "..publish.weight_source",
    "adapter_files": ".bundles",
    "adapter_weights": ".bundles",
    "join_bundles": ".bundles",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)

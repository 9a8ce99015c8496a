"""Trainers that publish what they train. Everything is imported when it is asked for: most of it needs a library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..publish.weight_source import WeightSource as WeightSource
    from .bundles import adapter_weights as adapter_weights
    from .bundles import join_bundles as join_bundles
    from .callback import DeltaWireCallback as DeltaWireCallback
    from .fsdp import FSDPPublisher as FSDPPublisher

__all__ = ["DeltaWireCallback", "FSDPPublisher", "WeightSource", "adapter_weights", "join_bundles"]

_LATER = {
    "DeltaWireCallback": ".callback",
    "FSDPPublisher": ".fsdp",
    "WeightSource": "..publish.weight_source",
    "adapter_weights": ".bundles",
    "join_bundles": ".bundles",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)

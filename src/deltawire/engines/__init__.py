"""Engines that generate, and how they get new weights while they do. Each adapter is imported when it is asked for: most need a library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..subscribe.prepared_swap import PreparedSwap, Swap
from .base import Engine, KvCache
from .hot_swap import HotSwap
from .swap.live_intervals import Attribution, LiveInterval
from .swap.swap_controller import SwapRecord

if TYPE_CHECKING:
    from .disk import DiskEngine as DiskEngine
    from .module import ModuleEngine as ModuleEngine
    from .sglang import SglangEngine as SglangEngine

__all__ = [
    "Attribution",
    "DiskEngine",
    "Engine",
    "HotSwap",
    "KvCache",
    "LiveInterval",
    "ModuleEngine",
    "PreparedSwap",
    "SglangEngine",
    "Swap",
    "SwapRecord",
]

_LATER = {"DiskEngine": ".disk", "ModuleEngine": ".module", "SglangEngine": ".sglang"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)

"""For tests, yours and ours: conformance suites to run on a store or an engine, and a store that fails by script.

The suites need pytest, and are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .faulty_store import After, Before, Call, FaultyStore, ProcessDied, Reading, call

if TYPE_CHECKING:
    from .engine_conformance import EngineConformance, EngineRig
    from .store_conformance import StoreConformance

__all__ = [
    "After",
    "Before",
    "Call",
    "EngineConformance",
    "EngineRig",
    "FaultyStore",
    "ProcessDied",
    "Reading",
    "StoreConformance",
    "call",
]


def __getattr__(name: str) -> Any:
    if name == "StoreConformance":
        from .store_conformance import StoreConformance

        return StoreConformance
    if name in ("EngineConformance", "EngineRig"):
        from . import engine_conformance

        return getattr(engine_conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""For tests, yours and ours: a conformance suite to run on a store, and a store that fails by script.

`StoreConformance` needs pytest, and is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .faulty_store import After, Before, Call, FaultyStore, ProcessDied, Reading, call

if TYPE_CHECKING:
    from .store_conformance import StoreConformance

__all__ = ["After", "Before", "Call", "FaultyStore", "ProcessDied", "Reading", "StoreConformance", "call"]


def __getattr__(name: str) -> Any:
    if name == "StoreConformance":
        from .store_conformance import StoreConformance

        return StoreConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

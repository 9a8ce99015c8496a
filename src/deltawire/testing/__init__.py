"""Tools for tests: conformance suites for stores and engines, a store that fails by script, and a simulation of fleets.

faulty_store         a store that fails, dies or damages data where a test says so
store_conformance    tests that every store must pass
engine_conformance   tests that every engine must pass
fleet_simulation/    a fleet in virtual time (docs/simulation.md)
live_simulation/     live traffic in virtual time
release_simulation/  live traffic, channels and gates in virtual time

The conformance suites need pytest, so they are imported only when they are used.
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

"""Simulations of fleets that are broken on purpose: they must show the fault."""

from __future__ import annotations

import re
from typing import Any

from deltawire.testing.fleet_simulation import simulate


def assert_found(violation: str, seed: int, others: int, **fleet: Any) -> None:
    """Check that a run shows this violation, and shows it again with the same seed.

    `seed` is one that showed the fault before. It is tried first, and `others` only if it no longer shows the fault.
    """
    outcomes = (simulate(each, **fleet) for each in (seed, *range(others)))
    found = next((one for one in outcomes if re.search(violation, one.violation or "")), None)
    assert found is not None
    assert simulate(found.seed, **fleet).violation == found.violation

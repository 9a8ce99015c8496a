"""Runs many seeds in several processes."""

from __future__ import annotations

import gc

from ..fleet_simulation.many_seeds import run_many
from .scenario import Outcome, simulate


def simulate_many(seeds: range, jobs: int) -> list[Outcome]:
    """Run the seeds in `jobs` processes, with a progress bar on stderr. Return the outcomes by rising seed."""
    return run_many(seeds, _simulate, jobs)


def _simulate(seed: int) -> Outcome:
    outcome = simulate(seed)
    if seed % 16 == 0:
        gc.collect()
    return outcome

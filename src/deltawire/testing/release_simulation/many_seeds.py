"""Runs many seeds, one after the other or in several processes."""

from __future__ import annotations

import gc
import logging

from ..fleet_simulation.many_seeds import run_many
from .scenario import Outcome, simulate


def simulate_traced(seeds: range) -> list[Outcome]:
    """Run the seeds one after the other, and print every event on stdout."""
    logging.getLogger("deltawire").setLevel(logging.CRITICAL)
    return [simulate(seed, trace=lambda line: print(line)) for seed in seeds]


def simulate_many(seeds: range, jobs: int) -> list[Outcome]:
    """Run the seeds in `jobs` processes, with a progress bar on stderr. Return the outcomes by rising seed."""
    return run_many(seeds, _simulate, jobs)


def _simulate(seed: int) -> Outcome:
    outcome = simulate(seed)
    if seed % 16 == 0:
        gc.collect()
    return outcome

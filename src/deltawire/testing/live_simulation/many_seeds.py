"""Runs many seeds in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing

from .scenario import Outcome, simulate


def simulate_many(seeds: range, jobs: int) -> list[Outcome]:
    """Run the seeds in `jobs` processes. Return the outcomes by rising seed."""
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        return list(pool.imap(_simulate, seeds, chunksize=8))


def _prepare() -> None:
    """Prepare a worker process. Trainers report faults as warnings, of which there are many. Runs leave few reference cycles."""
    logging.disable(logging.ERROR)
    gc.disable()


def _simulate(seed: int) -> Outcome:
    outcome = simulate(seed)
    if seed % 16 == 0:
        gc.collect()
    return outcome

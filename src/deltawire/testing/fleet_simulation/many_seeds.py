"""Runs many seeds, one after the other or in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .scenario import Outcome, simulate


class SeedOutcome(Protocol):
    """The result of one seed."""

    @property
    def seed(self) -> int: ...

    @property
    def violation(self) -> str | None: ...


_Outcome = TypeVar("_Outcome", bound=SeedOutcome)


class Fleet(NamedTuple):
    """Which fleets to simulate: how many members they have at the start (None: the seed decides), and whether these live in regions."""

    members: int | None = None
    regions: bool = False


def simulate_traced(seeds: range, fleet: Fleet) -> list[Outcome]:
    """Run the seeds one after the other, and print every event on stdout."""

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")

    return [simulate(seed, members=fleet.members, regions=fleet.regions, trace=write) for seed in seeds]


def simulate_many(seeds: range, fleet: Fleet, jobs: int) -> list[Outcome]:
    """Run the seeds in `jobs` processes, with a progress bar on stderr. Return the outcomes by rising seed."""
    return run_many(seeds, partial(_simulate, fleet=fleet), jobs)


def run_many(seeds: range, simulate_one: Callable[[int], _Outcome], jobs: int) -> list[_Outcome]:
    """Run the seeds of any simulation in `jobs` processes, with a progress bar on stderr. Return the outcomes by rising seed.

    Parameters
    ----------
    seeds
        The seeds.
    simulate_one
        Runs one seed. It is a function of a module, or a `partial` of one.
    jobs
        How many processes to use.
    """
    outcomes: list[_Outcome] = []
    failures = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, context.Pool(jobs, _prepare) as pool:
        task = bar.add_task("simulating", total=len(seeds))
        for outcome in pool.imap_unordered(simulate_one, seeds, chunksize=4):
            outcomes.append(outcome)
            failures += outcome.violation is not None
            bar.update(task, advance=1, description=f"simulating, {failures} failed" if failures else None)
    return sorted(outcomes, key=lambda one: one.seed)


def _prepare() -> None:
    """Prepare a worker process. Simulated trainers report faults as warnings, of which there are many. Runs leave few reference cycles."""
    logging.disable(logging.ERROR)
    gc.disable()


def _simulate(seed: int, *, fleet: Fleet) -> Outcome:
    """Run one seed in a worker process. The garbage collector is off during a run, because runs leave almost no reference cycles."""
    outcome = simulate(seed, members=fleet.members, regions=fleet.regions)
    if seed % 16 == 0 or outcome.events > 100_000:
        gc.collect()
    return outcome

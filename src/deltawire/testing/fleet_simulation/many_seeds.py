"""Runs many seeds, one after the other or in several processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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

_SEEDS_TOGETHER = 4
"""A worker process gets this many seeds at a time."""


class WorkerDied(RuntimeError):
    """A worker process ended before it had run its seeds."""


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

    An error of `simulate_one` ends the runs, and is raised. Raise `WorkerDied` if a process ends early, or cannot load `simulate_one`.

    Parameters
    ----------
    seeds
        The seeds.
    simulate_one
        Runs one seed. It is a function of a module, or a `partial` of one, but not of `__main__`, which worker processes do not have.
    jobs
        How many processes to use.
    """
    outcomes: list[_Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool,
    ):
        task = bar.add_task("simulating", total=len(seeds))
        parts = [seeds[first : first + _SEEDS_TOGETHER] for first in range(0, len(seeds), _SEEDS_TOGETHER)]
        try:
            for part in as_completed([pool.submit(_simulate_part, simulate_one, part) for part in parts]):
                outcomes += part.result()
                failures = sum(one.violation is not None for one in outcomes)
                bar.update(task, completed=len(outcomes), description=f"simulating, {failures} failed" if failures else None)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise WorkerDied("a worker process ended before it had run its seeds; --trace runs them in one process.") from error
            raise
    return sorted(outcomes, key=lambda one: one.seed)


def _simulate_part(simulate_one: Callable[[int], _Outcome], seeds: Sequence[int]) -> list[_Outcome]:
    return [simulate_one(seed) for seed in seeds]


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

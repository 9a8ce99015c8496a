"""Seeds by the thousand, on several cores."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .scenario import Outcome, simulate


def simulate_traced(seeds: range, members: int | None) -> list[Outcome]:
    """One after the other, telling every event on stdout."""

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")

    return [simulate(seed, members=members, trace=write) for seed in seeds]


def simulate_many(seeds: range, members: int | None, jobs: int) -> list[Outcome]:
    """In so many processes, with a progress bar on stderr. Outcomes come by rising seed."""
    outcomes: list[Outcome] = []
    failures = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, context.Pool(jobs, gc.disable) as pool:
        task = bar.add_task("simulating", total=len(seeds))
        for outcome in pool.imap_unordered(partial(_simulate, members=members), seeds, chunksize=4):
            outcomes.append(outcome)
            failures += outcome.violation is not None
            bar.update(task, advance=1, description=f"simulating, {failures} failed" if failures else None)
    return sorted(outcomes, key=lambda one: one.seed)


def _simulate(seed: int, *, members: int | None) -> Outcome:
    """In a worker, where nothing is collected while a run lasts: it makes hardly any garbage that only a collection would find."""
    outcome = simulate(seed, members=members)
    if seed % 16 == 0 or outcome.events > 100_000:
        gc.collect()
    return outcome

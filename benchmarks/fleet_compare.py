"""Compares fleets of two commits: prints requests per rollout and members at work of the deltawire that is on PYTHONPATH.

    git worktree add ../before b13c5e7   # build its native module, or copy the one in src/deltawire
    PYTHONPATH=../before/src python benchmarks/fleet_compare.py --engine src/deltawire/testing/fleet_simulation/engine_model.py
    PYTHONPATH=src python benchmarks/fleet_compare.py

`--engine` gives an older commit the engine model of this one, so that only trainer and members differ. Older commits have no profile, so
this script counts the seconds in which engines generate. `--round-trip 0 --rounds 2` shows how many members are at work with a store
that answers at once, so what the end of the run alone costs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.staleness import StalenessBudget
from deltawire.testing.fleet_simulation import engine_model
from deltawire.testing.fleet_simulation.parse_cache import cached_parsing
from deltawire.testing.fleet_simulation.store_model import Network
from deltawire.testing.fleet_simulation.trainer_model import Plan
from deltawire.testing.fleet_simulation.world import Member, World

ROUND_TRIP, TASK_SECONDS, TASKS_EACH = 0.1, 15.0, 4


def engine_of(path: Path | None) -> Any:
    """Return the engine model of this commit, or the one in a file."""
    if path is None:
        return engine_model.EngineModel
    spec = importlib.util.spec_from_file_location(engine_model.__name__, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EngineModel


def compare(members: int, rounds: int, seed: int, engine_type: Any, round_trip: float) -> tuple[float, float]:
    """Return the requests for each accepted rollout, and the part of the members' time in which they generate."""
    worked = [0.0]

    class Counted(engine_type):  # type: ignore[misc]
        def generate(self, thread: Any, request: Any) -> None:
            kernel, self._kernel = self._kernel, self
            try:
                self._real = kernel
                super().generate(thread, request)
            finally:
                self._kernel = kernel

        def later(self, seconds: float, *call: Any) -> None:
            worked[0] += seconds
            self._real.later(seconds, *call)

    plan = Plan(
        run="0" * 32,
        last_step=rounds,
        tasks=TASKS_EACH * members,
        rows=1,
        budget=StalenessBudget(1),
        options=FleetOptions(lease_seconds=60, poll_seconds=1.0),
        train_seconds=0.0,
        checkpoint_every=1,
    )
    world = World(Random(members + 1000 * seed), plan, Network(delay=round_trip / 2), member_poll=1.0)
    for number in range(members):
        engine = Counted(world.kernel, world.random, world.chain, rate=9 / TASK_SECONDS, sync_seconds=TASK_SECONDS / 15)
        world.add_member(Member(f"member{number}", engine, 0.0, 1))
    world.start_trainer()
    gc.collect()
    with cached_parsing():
        world.kernel.run(1e6, lambda: world.finished)
    assert world.finished
    return world.store.counts.total() / world.oracle.accepted, worked[0] / (members * world.kernel.now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=None, help="the file of the engine model to use")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--round-trip", type=float, default=ROUND_TRIP, help="seconds in which the modelled store answers")
    arguments = parser.parse_args()
    engine_type = engine_of(arguments.engine)
    gc.disable()  # the run makes many objects that live until its end
    for members in arguments.members:
        seeds = {1: 20, 8: 20, 64: 3}.get(members, 1)
        found = [compare(members, arguments.rounds, seed, engine_type, arguments.round_trip) for seed in range(seeds)]
        requests, work = (mean(column) for column in zip(*found, strict=True))
        print(f"{members} members, {arguments.rounds} rounds, {seeds} seeds: {requests:.1f} requests per rollout, {work:.0%} at work")


if __name__ == "__main__":
    main()

"""Measure the cost of coordinating a fleet: leases per second, and requests to the store per accepted rollout."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from random import Random
from typing import Any

from report import Table

from deltawire.errors import DeltawireError
from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.staleness import StalenessBudget
from deltawire.fleet.steps.requests import Together, Watch
from deltawire.store import open_store
from deltawire.store.base import Store
from deltawire.store.memory import MemoryStore
from deltawire.store.requests import ask_store
from deltawire.testing.fleet_simulation.engine_model import EngineModel
from deltawire.testing.fleet_simulation.parse_cache import cached_parsing
from deltawire.testing.fleet_simulation.profile import CATEGORIES, GENERATING, Profile
from deltawire.testing.fleet_simulation.store_model import Network, StoreModel
from deltawire.testing.fleet_simulation.trainer_model import Plan
from deltawire.testing.fleet_simulation.world import Member, World

ROUND_TRIP = 0.1
TASK_SECONDS = 15.0
TASKS_EACH = 4
STEPS = 6
LEAST_REAL_TASKS = 64
WRITES = {"create", "put", "delete"}
"""Kinds of requests for which S3 has the lower limit."""


class RealStore(StoreModel):
    """Sends every request to a real store at once. Only sleeping and generating take no time."""

    real: Store

    def submit(self, thread: Any, request: Any) -> None:
        self.counts[thread.process.kind, type(request).__name__.lower(), ""] += 1
        if isinstance(request, Together):
            self.kernel.later(0.0, thread.resume, [self._asked(each) for each in request.requests])
            return
        self.kernel.later(request.seconds if isinstance(request, Watch) else 0.0, self._answer, thread, request)

    def _answer(self, thread: Any, request: Any) -> None:
        answer = self._asked(request)
        (thread.fail if isinstance(answer, DeltawireError) else thread.resume)(answer)

    def _asked(self, request: Any) -> Any:
        try:
            if isinstance(request, Watch):
                return self.real.get_if_changed(request.key, limit=request.limit, tag=request.tag)
            return ask_store(self.real, request)
        except DeltawireError as error:
            return error


def world_of(members: int, *, tasks: int, steps: int, task_seconds: float) -> World:
    """Return a world in which all members have the same speed and nothing fails."""
    plan = Plan(
        run="0" * 32,
        last_step=steps,
        tasks=tasks,
        rows=1,
        budget=StalenessBudget(1),
        options=FleetOptions(lease_seconds=60, poll_seconds=1.0),
        train_seconds=0.0,
        checkpoint_every=1,
    )
    world = World(Random(members), plan, Network(delay=ROUND_TRIP / 2), member_poll=1.0)
    for number in range(members):
        engine = EngineModel(world.kernel, world.random, world.chain, rate=9 / task_seconds, sync_seconds=task_seconds / 15)
        world.add_member(Member(f"member{number}", engine, 0.0, 1))
    return world


def over_a_wan(members: int, *, can_wait: bool = False) -> tuple[World, Profile]:
    """Count requests, and attribute the time of members, in virtual time with a latency of 100 ms."""
    world = world_of(members, tasks=TASKS_EACH * members, steps=STEPS, task_seconds=TASK_SECONDS)
    world.network.can_wait = can_wait
    profile = Profile(world)
    world.start_trainer()
    gc.collect()
    gc.disable()  # the run makes many objects that live until its end
    try:
        with cached_parsing():
            world.kernel.run(1e6, lambda: world.finished)
    finally:
        gc.enable()
    assert world.finished
    return world, profile


def leases_per_second(members: int, real: Store) -> float:
    """Measure in real time: the trainer and all members run in this thread over a real store, and generation takes no time."""
    with real:
        world = world_of(members, tasks=max(LEAST_REAL_TASKS, members), steps=1, task_seconds=1e-6)
        store = RealStore(world.kernel, world.random, world.network)
        store.real = real
        # The checks of the simulation need its model of a store, so they are switched off here.
        store.objects = world.store.objects
        world.store = store
        world.oracle.trains = lambda line, epoch, step, rollouts: setattr(line, "step", step)  # type: ignore[method-assign]
        started = time.perf_counter()
        world.start_trainer()
        world.kernel.run(1e6, lambda: world.finished)
        seconds = time.perf_counter() - started
        assert world.finished
        return store.counts["member", "create", ""] / seconds


def measure(sizes: tuple[int, ...] = (1, 8, 64, 512)) -> list[Table]:
    """Measure fleets of all these sizes: what they cost, and where the time of their members goes."""
    table = Table(
        "fleet-coordination",
        f"Fleet coordination: {TASKS_EACH} tasks a member and round, {STEPS} rounds, tasks of about {TASK_SECONDS:.0f} s, "
        f"{1000 * ROUND_TRIP:.0f} ms to the store",
        [
            "members",
            "leases/s",
            "members at work",
            "requests per accepted rollout",
            "lease + result",
            "board",
            "heartbeats",
            "trainer",
            "of all: writes",
        ],
    )
    totals, shares = {}, {}
    for members in sizes:
        world, profile = over_a_wan(members)
        shares[members] = profile.shares()
        accepted = world.oracle.accepted
        counts: Counter[str] = Counter()
        for (kind, request, folder), count in world.store.counts.items():
            counts[_sort(kind, request, folder)] += count
        leases = world.store.counts["member", "create", "lease"]
        totals[members] = counts.total() / accepted
        counts["writes"] = sum(count for (_, request, _), count in world.store.counts.items() if request in WRITES)
        each = [f"{counts[sort] / accepted:.2f}" for sort in ("work", "board", "heartbeats", "trainer", "writes")]
        at_work = f"{shares[members][GENERATING]:.0%}"
        table.rows.append([f"{members}", f"{leases / world.kernel.now:.2f}", at_work, f"{totals[members]:.1f}", *each])
    table.notes.append(
        "Virtual time: the real steps of trainer and members over a modelled store. The length of tasks bounds the leases. "
        "Members at work generate; the start and the end of the run count as well. Members look at the board before each task, and once a "
        "second while they have none; the trainer polls once a second. Writes create, replace or delete. "
        "The planner takes its requests for each rollout from the last row."
    )
    largest, smallest = max(sizes), min(sizes)
    table.check(f"no more requests per rollout with {largest} members than with {smallest}", totals[largest] <= totals[smallest])
    least = min(each[GENERATING] for each in shares.values())
    table.check(f"members of every fleet are at work for at least 90% of the time ({least:.0%})", least >= 0.9)
    return [table, _profile_table(shares)]


def measure_leases(sizes: tuple[int, ...] = (1, 8, 64, 512)) -> Table:
    """Measure in real time how many leases a second a trainer and its members make in one thread."""
    table = Table("fleet-leases", "Leases per second of trainer and members in one thread", ["members", "memory", "local directory"])
    for members in sizes:
        with tempfile.TemporaryDirectory() as folder:
            found = [leases_per_second(members, store) for store in (MemoryStore(), open_store(folder))]
        table.rows.append([f"{members}", *(f"{leases:,.0f}" for leases in found)])
    table.notes.append(
        f"Real time, one round of one task for each member, or of {LEAST_REAL_TASKS} tasks. Generation takes no time, and every request "
        "goes to a real store. A local directory waits for the disk where the protocol asks for that."
    )
    return table


def _profile_table(shares: dict[int, dict[str, float]]) -> Table:
    """Return where the time of members goes."""
    table = Table(
        "fleet-profile",
        "The time of members in these runs",
        ["a member is", *(f"{members} member{'s' * (members > 1)}" for members in shares)],
    )
    for category in CATEGORIES:
        table.rows.append([category, *(f"{each[category]:.1%}" for each in shares.values())])
    table.notes.append(
        "A member that generates is at work, whatever else it does at the same time. Otherwise its time belongs to what it waits for."
    )
    return table


def _sort(kind: str, request: str, folder: str) -> str:
    if kind == "trainer":
        return "trainer"
    return {"board": "board", "member": "heartbeats"}.get(folder, "work")

"""The runs of rl_async.py in virtual time: they show what members wait for, on any machine and whatever its load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

from report import Table

from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.staleness import KnownVersion, StalenessBudget
from deltawire.fleet.steps.requests import Generate
from deltawire.testing.fleet_simulation.kernel import VirtualThread
from deltawire.testing.fleet_simulation.parse_cache import cached_parsing
from deltawire.testing.fleet_simulation.profile import CATEGORIES, Profile
from deltawire.testing.fleet_simulation.region_model import RegionEngine
from deltawire.testing.fleet_simulation.store_model import Network
from deltawire.testing.fleet_simulation.trainer_model import Plan
from deltawire.testing.fleet_simulation.world import Member, World

LATENCY, POLL = 0.03, 0.05
TOKENS_PER_TASK = 8 * 24
TRAIN_SECONDS = 0.046
"""Processor time of a training step for each prompt of eight completions, as measured."""
UPLOAD_SECONDS, SYNC_SECONDS = 0.12, 0.12
"""From the end of a step to the commit of its version, and from there until members have it: a few requests, and 50 kB at 1.5 MB/s."""
_WARM_STEPS = 3
_WARM_SECONDS = 15.0
RUNS = {"rl-async": (600, 600), "rl-shares": (400, 400, 100)}
"""Tokens per second of the members."""


class HeldEngine(RegionEngine):
    """Makes the same number of tokens for every task."""

    def generate(self, thread: VirtualThread, request: Generate) -> None:
        lengths = [4] * (len(request.rows) * request.round.samples)
        self._kernel.later(TOKENS_PER_TASK / self.rate, self._generated, thread, request, lengths, self.version)


@dataclass(frozen=True)
class Outcome:
    """`share` is the part of the tokens that members could make; `seconds` has the part of their time that each category takes."""

    share: float
    seconds: dict[str, float]


def run(rates: Sequence[float], prompts: int, *, steps: int = 40, seed: int = 0) -> Outcome:
    """Run a trainer and one member per rate: the real steps of both, over a modelled store that answers after `LATENCY`."""
    plan = Plan(
        run="0" * 32,
        last_step=steps,
        tasks=prompts,
        rows=1,
        budget=StalenessBudget(1),
        options=FleetOptions(lease_seconds=30, poll_seconds=POLL),
        train_seconds=TRAIN_SECONDS * prompts,
        checkpoint_every=1,
        publishes_beside=True,
        upload_seconds=UPLOAD_SECONDS,
        commit_seconds=LATENCY / 2,
    )
    world = World(Random(seed), plan, Network(delay=LATENCY / 2), member_poll=POLL)
    engines = [HeldEngine(world.kernel, world.random, world.chain, world.published, rate=rate) for rate in rates]
    for number, engine in enumerate(engines):
        world.add_member(Member(f"member{number}", engine, 0.0, 1))
    appended = world.chain.appended

    def deliver(version: KnownVersion) -> None:
        appended(version)
        for engine in engines:
            world.kernel.later(SYNC_SECONDS, engine.arrived, version)

    world.chain.appended = deliver
    profile = Profile(world, begin=_WARM_SECONDS)
    world.start_trainer()
    with cached_parsing():
        world.kernel.run(1e6, lambda: world.finished)
    assert world.finished
    times = [world.published[version.seq] for version in world.chain.every()][_WARM_STEPS:-_WARM_STEPS]
    tokens = prompts * TOKENS_PER_TASK * (len(times) - 1)
    return Outcome(tokens / (times[-1] - times[0]) / sum(rates), profile.shares())


def measure(sizes: Sequence[int] = (6, 12, 24), seeds: int = 3) -> Table:
    """Profile both runs with steps of several sizes."""
    table = Table(
        "rl-profile",
        "The time of members in rl-async (asynchronous, deltas) and rl-shares (measured speed), in virtual time",
        ["a member is", *(f"{name}, {prompts} prompts" for name in RUNS for prompts in sizes)],
    )
    every = {
        (name, prompts): [run(rates, prompts, seed=seed) for seed in range(seeds)] for name, rates in RUNS.items() for prompts in sizes
    }
    for category in CATEGORIES:
        table.rows.append([category, *(f"{mean(one.seconds[category] for one in runs):.1%}" for runs in every.values())])
    table.rows.append(["**tokens, of what members could make**", *(f"{mean(one.share for one in runs):.0%}" for runs in every.values())])
    table.notes.append(
        f"Mean of {seeds} seeds: the real steps of trainer and members over a modelled store with {1000 * LATENCY:.0f} ms a request. "
        f"A training step takes {1000 * TRAIN_SECONDS:.0f} ms for each prompt, which is its processor time. Publishing takes "
        f"{1000 * UPLOAD_SECONDS:.0f} ms, and members have a version {1000 * SYNC_SECONDS:.0f} ms later. No other process disturbs them."
    )
    return table

"""Simulate fleets in virtual time. All rules hold in many runs, and runs of a fleet that is broken on purpose show the fault.

Run more seeds with:

    python -m deltawire.testing.fleet_simulation --seeds 10000
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from broken_rules import assert_found

from deltawire.fleet.options import FleetOptions
from deltawire.fleet.rules.admission import REASONS
from deltawire.fleet.rules.fleet_clock import FleetClock
from deltawire.fleet.rules.round_state import TaskState
from deltawire.fleet.rules.scheduler import Scheduler
from deltawire.fleet.rules.staleness import StalenessBudget
from deltawire.fleet.steps import batch_steps, coordinator_steps, intake_steps, work_steps
from deltawire.fleet.steps.member_state import Claim, Made, MemberState
from deltawire.format.records.fleet_parts import MOST_ATTEMPTS
from deltawire.format.records.member_records import Lease
from deltawire.store import fleet_keys
from deltawire.store.fleet_keys import RolloutKey
from deltawire.store.requests import Put
from deltawire.testing.fleet_simulation import Outcome, scenario, simulate
from deltawire.testing.fleet_simulation import __main__ as command
from deltawire.testing.fleet_simulation.chain_model import ChainModel
from deltawire.testing.fleet_simulation.engine_model import EngineModel
from deltawire.testing.fleet_simulation.kernel import Kernel
from deltawire.testing.fleet_simulation.many_seeds import Fleet
from deltawire.testing.fleet_simulation.misbehaviour import KINDS, Misbehaviour
from deltawire.testing.fleet_simulation.oracle import History
from deltawire.testing.fleet_simulation.store_model import Network, Objects
from deltawire.testing.fleet_simulation.trainer_model import Plan
from deltawire.testing.fleet_simulation.world import World

COMMAND = [sys.executable, "-m", "deltawire.testing.fleet_simulation"]


def test_small_fleets_keep_all_rules_despite_faults() -> None:
    outcomes = [simulate(seed) for seed in range(60)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation is not None] == []
    refused: Counter[str] = Counter()
    for one in outcomes:
        refused.update(one.rejected)
    assert set(refused) == set(REASONS) - {"excluded"}  # otherwise the runs no longer reach some check; they exclude no member
    assert sum(one.trainers for one in outcomes) > 1.5 * len(outcomes)


@pytest.mark.parametrize(("seed", "members"), [(1, 150), (2, 300)])
def test_large_fleets_keep_all_rules(seed: int, members: int) -> None:
    outcome = simulate(seed, members=members)
    assert outcome.violation is None
    assert outcome.members >= members


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    def digest() -> str:
        trace = hashlib.sha256()
        simulate(11, trace=lambda line: trace.update(line.encode() + b"\n"))
        return trace.hexdigest()

    command = [*COMMAND, "--first", "11", "--seeds", "1", "--trace", "--json"]
    other = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}).stdout
    events, _, summary = other.partition(b"{\n")
    assert hashlib.sha256(events).hexdigest() == digest() == digest()
    assert json.loads(b"{" + summary)["failed"] == []


def plan(keep_steps: int, checkpoint_every: int) -> Plan:
    options = FleetOptions(keep_steps=keep_steps)
    return Plan("0" * 32, 8, 1, 1, StalenessBudget(1), options, train_seconds=1.0, checkpoint_every=checkpoint_every)


def test_a_plan_keeps_acknowledged_results_as_far_back_as_the_checkpoint_before_the_newest_version() -> None:
    plan(2, 2)
    with pytest.raises(ValueError, match="keep_steps=1 must be at least checkpoint_every=2"):
        plan(1, 2)


@pytest.mark.parametrize(
    ("checkpoints", "published", "resumes"),
    [
        pytest.param((0, 2), 4, {2}, id="the oldest that the fleet must support"),
        pytest.param((0, 2), 5, {2}, id="the newest, although a replaced trainer has published more"),
        pytest.param((0, 2, 4), 4, {2, 4}, id="the newest or an older one"),
        pytest.param((), 0, {0}, id="the start"),
    ],
)
def test_a_trainer_resumes_from_no_step_that_the_fleet_need_not_support(
    checkpoints: tuple[int, ...], published: int, resumes: set[int]
) -> None:
    found = set()
    for seed in range(16):
        lines: list[str] = []
        world = World(Random(seed), plan(2, 2), Network(0.01), trace=lines.append)
        world.chain.highest_step = published
        world.checkpoints |= {step: History(step) for step in checkpoints}
        world.start_trainer()
        found.add(int(lines[-1].rpartition(" ")[2]))
    assert found == resumes


def blind_to(reason: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a trainer that accepts one kind of bad result."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for judge in ("judge_key", "judge_origin", "judge_versions"):
            honest = getattr(intake_steps, judge)
            monkeypatch.setattr(intake_steps, judge, lambda *a, honest=honest, **k: None if (r := honest(*a, **k)) == reason else r)

    return patch


def take_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blind_to("wrong-run")(monkeypatch)
    honest = intake_steps.Intake.judge_substance
    monkeypatch.setattr(intake_steps.Intake, "judge_substance", lambda self, s, p, r: honest(self, s, p, replace(r, run=self.run)))


def take_several_results_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_steps, "judge_key", lambda *arguments, **options: None)


def begin_anew_when_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def resume(self: coordinator_steps.CoordinatorSteps) -> Generator[Any, Any, list[Any]]:
        yield from self.open_rounds.read()
        return []

    monkeypatch.setattr(coordinator_steps.CoordinatorSteps, "resume", resume)


def train_before_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = batch_steps.create_steps

    def create(key: str, data: bytes) -> Generator[Any, Any, bytes]:
        return data if key.startswith("fleet/batch/") else (yield from honest(key, data))

    monkeypatch.setattr(batch_steps, "create_steps", create)


def sweep_what_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = coordinator_steps.sweep
    monkeypatch.setattr(coordinator_steps, "sweep", lambda first, epoch, upto, gone: honest(first + 2, epoch, upto, gone))


def forget_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any) -> Generator[Any, Any, dict[Any, str]]:
        yield from ()
        return {}

    monkeypatch.setattr(coordinator_steps, "read_rejections", read)


def wait_for_stragglers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "is_straggler", lambda *arguments, **options: False)
    monkeypatch.setattr(Scheduler, "is_long", lambda *arguments: False)


def believe_every_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetClock, "since", lambda self, modified: modified - (self._ahead or 0.0))


def ask_for_a_lease_at_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskState, "is_free", False)
    monkeypatch.setattr(TaskState, "next_attempt", lambda self: next((n for n in range(15) if n not in self.leases), 15))


def begin_queued_tasks_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_steps, "can_begin", lambda me, record: True)


def keep_dropped_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_task(self: MemberState, claim: Claim, began: float, made: Made | None) -> None:
        if made is not None:
            self.made.append(made)
        self.begun.remove(began)
        self.changed.give()

    monkeypatch.setattr(MemberState, "end_task", end_task)


@pytest.mark.parametrize(
    ("break_it", "violation", "seed"),
    [
        pytest.param(begin_queued_tasks_unchecked, "may not do it", 3, id="queued tasks with a wrong version"),
        pytest.param(keep_dropped_leases, "no longer holds", 156, id="leases never given back"),
        pytest.param(blind_to("stale"), "outside the budget", 19, id="stale results"),
        pytest.param(blind_to("abandoned"), "which was abandoned", 12, id="results of abandoned versions"),
        pytest.param(blind_to("wrong-digest"), "that the chain does not have", 30, id="results of other weights"),
        pytest.param(blind_to("unleased"), "lease belongs to another member", 6, id="results without a lease"),
        pytest.param(take_any_run, "of another run", 14, id="results of other runs"),
        pytest.param(take_several_results_of_a_task, "unexpected error", 1, id="several results of a task"),
        pytest.param(begin_anew_when_resumed, "had acknowledged for it", 17, id="acknowledged results dropped"),
        pytest.param(train_before_it_is_acknowledged, "was not acknowledged", 0, id="training before the acknowledgement"),
        pytest.param(sweep_what_is_still_needed, "not in the store|not for it|deleted while|does not continue", 0, id="sweeping too much"),
        pytest.param(believe_every_date, "does not continue", 98, id="believing every date"),
        pytest.param(forget_rejections, "had rejected", 12, id="rejections forgotten"),
        pytest.param(ask_for_a_lease_at_every_attempt, "does not continue", 47, id="a lease for every attempt"),
        pytest.param(wait_for_stragglers, "does not continue", 142, id="waiting for stragglers"),
    ],
)
def test_the_simulation_finds_every_broken_rule(
    break_it: Callable[[pytest.MonkeyPatch], None], violation: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "_PATIENCE", 3600.0)  # sound runs need less time, and a run that hangs fails sooner
    break_it(monkeypatch)
    assert_found(violation, seed, 400)


def test_members_that_break_the_rules_can_send_results_of_the_last_attempt() -> None:
    """This ended a simulation: there is no attempt after the last one."""
    lease = Lease("0" * 32, 0, 0, MOST_ATTEMPTS - 1, "a", "1" * 32, 0, 0)
    record = SimpleNamespace(id="0" * 32, samples=1)
    kernel, random = Kernel(), Random(0)
    chain = ChainModel(random)
    version = chain.publish(0, 0)
    engine = EngineModel(kernel, random, chain, rate=1.0, sync_seconds=1.0)
    rollouts = engine._rollouts(SimpleNamespace(lease=lease, round=record, rows=({"prompt": "1"},)), [2], [version, version])
    data = rollouts.to_bytes()
    put = Put(fleet_keys.rollout_key(RolloutKey(0, 0, MOST_ATTEMPTS - 1, blake3(data).hexdigest())), data)
    for kind in KINDS:
        rogue = Misbehaviour(kind, random, chain, Objects(lambda: 0.0, granularity=0.0))
        assert all(rogue.sends(put) for _ in range(8))


def test_an_error_of_the_simulation_itself_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*arguments: Any) -> None:
        raise ValueError("it broke")

    monkeypatch.setattr(scenario, "_run", die)
    outcome = simulate(5)
    assert outcome.seed == 5
    assert "ValueError: it broke" in (outcome.violation or "")


def test_a_failing_seed_is_printed_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seeds: range, fleet: Fleet, jobs: int) -> list[Outcome]:
        return [replace(simulate(seed), violation="it broke") for seed in seeds]

    monkeypatch.setattr(command, "simulate_many", fail)
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", "1", "--first", "5"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "seed 5 FAILED: it broke" in printed
    assert "python -m deltawire.testing.fleet_simulation --first 5 --seeds 1 --trace" in printed

"""Simulate live traffic, channels and gates in virtual time. All rules hold, and runs of code that is broken on purpose show the fault.

Run more seeds with:

    python -m deltawire.testing.release_simulation --seeds 10000
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deltawire.fleet.rules.live_owners import LiveOwners
from deltawire.fleet.rules.live_tasks import LiveRow
from deltawire.format.feedback import Feedback
from deltawire.gateway.feedback import FeedbackIntake
from deltawire.gateway.recording import answers
from deltawire.gateway.recording.journal import Journal, SealedFile
from deltawire.gateway.recording.uploads import Uploads
from deltawire.live import gate as gate_module
from deltawire.live.gate_records import GateRecords, StoredRecord
from deltawire.live.gate_rules import Decision
from deltawire.live.rules import join as join_rules
from deltawire.store.base import Store
from deltawire.subscribe.chain_view import ChainView
from deltawire.testing.release_simulation import __main__ as command
from deltawire.testing.release_simulation import scenario, simulate
from deltawire.testing.release_simulation import virtual_time as time_module

COMMAND = [sys.executable, "-m", "deltawire.testing.release_simulation"]


@pytest.fixture(autouse=True)
def no_log_lines() -> Iterator[None]:
    logger = logging.getLogger("deltawire")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_live_traffic_keeps_all_rules_despite_faults() -> None:
    outcomes = [simulate(seed) for seed in range(8)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation is not None] == []
    counts: Counter[str] = Counter()
    for one in outcomes:
        counts.update(one.counts)
    # otherwise the runs no longer reach some check
    assert {"trained", "acknowledged", "gate-promote", "gate-rollback", "refused-InteractionUnknown", "refused-FeedbackConflict"} <= set(
        counts
    )
    assert sum(one.trainers for one in outcomes) > len(outcomes)


@pytest.mark.parametrize("seed", [2218])
def test_seeds_that_once_failed_hold(seed: int) -> None:
    """docs/simulation.md says what each of them showed."""
    assert simulate(seed).violation is None


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    trace = hashlib.sha256()
    simulate(11, trace=lambda line: trace.update(line.encode() + b"\n"))
    other = subprocess.run(
        [*COMMAND, "--first", "11", "--seeds", "1", "--trace", "--json"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout
    events, _, summary = other.partition(b"{\n")
    assert hashlib.sha256(events).hexdigest() == trace.hexdigest()
    assert json.loads(b"{" + summary)["failed"] == []


def test_the_command_runs_seeds_in_worker_processes() -> None:
    done = subprocess.run([*COMMAND, "--first", "1", "--seeds", "2", "--jobs", "2", "--json"], capture_output=True, check=True)
    summary = json.loads(done.stdout)
    assert (summary["seeds"], summary["failed"]) == (2, [])
    assert summary["counts"]["trained"] > 0


Break = Callable[[pytest.MonkeyPatch], None]


def forget_used_interactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveOwners, "owner", lambda self, item, inference, choice: None)
    monkeypatch.setattr(LiveOwners, "allows", lambda self, row, step: True)


def acknowledge_before_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    async def store(self: FeedbackIntake, feedback: Feedback) -> None:
        tasks.append(asyncio.create_task(honest(self, feedback)))

    honest, tasks = FeedbackIntake.store, list[Any]()
    monkeypatch.setattr(FeedbackIntake, "store", store)


def ignore_rollbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ChainView.target

    def target(self: ChainView) -> Any:
        before = self._target
        found = honest(self)
        if before is not None and self.move is not None and self.move.kind == "rollback":
            self._target = before
            return before
        return found

    monkeypatch.setattr(ChainView, "target", target)


def serve_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ChainView.target
    monkeypatch.setattr(ChainView, "target", lambda self: honest(self) and self.log.state_commit(self.head()))


def move_without_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: GateRecords, record: Any) -> StoredRecord:
        return StoredRecord(record, 0.0)  # no time is earlier

    monkeypatch.setattr(GateRecords, "write", write)


def promote_every_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "decide", lambda *arguments, **options: Decision("promote", "it looks good"))


def overwrite_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(store: Store, key: str, data: bytes, **options: Any) -> bytes:
        store.put(key, data)
        return data

    monkeypatch.setattr(time_module.create_rule, "create_and_look", create)


def train_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = answers._interaction
    monkeypatch.setattr(answers, "_interaction", lambda *arguments: replace(honest(*arguments), train=True))


def forget_the_journal_before_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Uploads._put

    def put(self: Uploads, journal: Journal, file: SealedFile, rows: int | None = None) -> None:
        data = file.path.read_bytes()
        journal.forget_file(file)
        file.path.write_bytes(data)
        try:
            honest(self, journal, file, rows)
        except BaseException:
            file.path.unlink(missing_ok=True)
            raise

    monkeypatch.setattr(Uploads, "_put", put)


def count_late_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = join_rules.counts

    def counts(metric: Any, pending: Any, given: Any) -> bool:
        return honest(metric, pending, replace(given, stored=pending.stored))

    monkeypatch.setattr(join_rules, "counts", counts)


def take_the_first_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_rules.StoredFeedback, "rank", property(lambda self: (-self.feedback.revision, -self.stored, self.index)))


def trust_the_clocks_of_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_rules.StoredFeedback, "rank", property(lambda self: (self.feedback.revision, self.feedback.time, self.index)))


def join_the_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LiveRow.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[LiveRow], row: Any) -> LiveRow | None:
        found: LiveRow | None = honest(cls, row)
        return found if found is None else replace(found, rewards={name: 1.0 - value for name, value in found.rewards.items()})

    monkeypatch.setattr(LiveRow, "of", classmethod(of))


@pytest.mark.parametrize(
    ("break_it", "violation", "seed"),
    [
        pytest.param(forget_used_interactions, "of the same line of history did", 6, id="used interactions forgotten"),
        pytest.param(acknowledge_before_the_put, "is acknowledged, but is not in the store", 0, id="acknowledged before the put"),
        pytest.param(ignore_rollbacks, "channels still move", 3, id="rollbacks ignored"),
        pytest.param(serve_the_newest_version, "was never on channel", 3, id="newest version instead of the channel's"),
        pytest.param(move_without_evidence, "without evidence", 0, id="moves before evidence"),
        pytest.param(promote_every_canary, "promotes the bad version", 0, id="every canary promoted"),
        pytest.param(overwrite_moves, "overwritten", 5, id="moves overwritten"),
        pytest.param(train_without_consent, "not in the store as it was answered", 0, id="consent ignored"),
        pytest.param(forget_the_journal_before_the_put, "never stored", 8, id="journal forgotten too early"),
        pytest.param(count_late_feedback, "but feedback gives it", 0, id="late feedback counted"),
        pytest.param(take_the_first_revision, "but feedback gives it", 10, id="revisions ignored"),
        pytest.param(trust_the_clocks_of_gateways, "but feedback gives it", 58, id="clocks of gateways trusted"),
        pytest.param(join_the_wrong_answer, "but feedback gives it", 0, id="rewards of another answer"),
    ],
)
def test_the_simulation_finds_every_broken_rule(break_it: Break, violation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "PATIENCE", 900.0)  # sound runs need less time after the last fault, and a run that hangs fails sooner
    break_it(monkeypatch)
    outcomes = (simulate(each) for each in (seed, *range(40)))
    assert any(re.search(violation, one.violation or "") for one in outcomes)


def test_a_failing_seed_is_printed_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "simulate_many", lambda seeds, jobs: [replace(simulate(seed), violation="it broke") for seed in seeds])
    monkeypatch.setattr(sys, "argv", ["simulation", "--seeds", "1", "--first", "1"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "seed 1 FAILED: it broke" in printed
    assert "python -m deltawire.testing.release_simulation --first 1 --seeds 1 --trace" in printed

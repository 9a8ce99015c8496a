"""A trainer dies at any point and another one continues. Chain, tasks and accepted rollouts are consistent afterwards."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked_python import ForkedPopen
from learning_run import SETTINGS, members, trainer
from tiny_models import torch

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.verify import verify
from deltawire.fleet.chain_versions import ChainVersions
from deltawire.format.records.canonical import MAX_RECORD_BYTES
from deltawire.format.records.fleet_files import MAX_ACCEPTED_BYTES, Accepted
from deltawire.format.records.trainer_records import BatchRecord
from deltawire.format.rollouts import Rollouts
from deltawire.store import Store, fleet_keys, keys, open_store
from deltawire.store.fleet_keys import RolloutKey
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied

STEPS = 5


def assert_consistent(store: Store, *, steps: int, staleness: int = 0) -> None:
    """Check that every step of the final history has one acknowledgement in force. Its results are whole, made by versions of that history
    within the budget, and used by no other step."""
    assert verify(store, deep=True).problems == []
    versions = ChainVersions(ChainLog(store))
    assert versions.newest().step == steps
    in_force: dict[int, BatchRecord] = {}
    for info in store.list(fleet_keys.BATCHES):
        record = BatchRecord.parse(store.get(info.key, limit=MAX_RECORD_BYTES))
        if record.step not in in_force or record.epoch > in_force[record.step].epoch:
            in_force[record.step] = record
    assert in_force.keys() == set(range(1, steps + 1))
    used: set[RolloutKey] = set()
    for step, record in in_force.items():
        accepted = Accepted.parse(store.get(record.accepted.key, limit=MAX_ACCEPTED_BYTES))
        assert [one.task for one in accepted.results] == [0, 1]
        for one in accepted.results:
            key = RolloutKey(record.round, one.task, one.attempt, one.blake3)
            assert key not in used
            used.add(key)
            rollouts = Rollouts.parse(store.get(fleet_keys.rollout_key(key), limit=one.size))
            for seq, reference in rollouts.versions.items():
                version = versions.find(seq)
                assert version is not None
                assert version.live
                assert version.digest == reference.digest
                assert step - 1 - staleness <= version.step < step


def is_progress(call: Call) -> bool:
    """Return whether every run makes this write. How often a trainer writes the board and the head depends on how fast members are."""
    return call.op in ("put", "put_if_absent") and call.key not in (fleet_keys.BOARD, keys.HEAD)


def nth_write(number: int) -> Callable[[Call], bool]:
    count = itertools.count()
    return lambda call: is_progress(call) and next(count) == number


def writes_of_a_run(tmp_path: Path) -> int:
    store = FaultyStore(MemoryStore())
    with members(store.inner), trainer(store, tmp_path) as learning:
        learning.train(until=STEPS)
    return sum(map(is_progress, store.calls))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # all threads of a process die with it
@pytest.mark.parametrize("fault", [Before, After])
def test_a_trainer_that_dies_at_any_write_to_the_store_is_followed_by_one_that_continues(fault: type[Before], tmp_path: Path):
    chance = random.Random(3)
    writes = writes_of_a_run(tmp_path / "whole")
    for number in range(4):
        inner, checkpoints = MemoryStore(), tmp_path / str(number)
        settings = replace(SETTINGS, max_staleness=number % 2)
        with members(inner):
            deaths = 0
            for moment in (chance.randrange(writes // 2), chance.randrange(writes)):
                store = FaultyStore(inner, [fault(nth_write(moment), "crash")])
                print(f"run {number}: {fault.__name__} write {moment}")  # this shows which case a failure belongs to
                with contextlib.suppress(ProcessDied), trainer(store, checkpoints, settings=settings) as learning:
                    learning.train(until=STEPS)
                deaths += store.died
            with trainer(inner, checkpoints, settings=settings) as learning:
                learning.train(until=STEPS)
            assert deaths
        assert_consistent(inner, steps=STEPS, staleness=settings.max_staleness)


def test_trainers_that_are_killed_outright_are_followed_by_one_that_continues(tmp_path: Path):
    with open_store(tmp_path / "store") as store, members(store):
        for lines in (4, 9):  # the events that the trainer reports before it is killed
            with ForkedPopen("torch", [__file__, tmp_path], stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for _ in range(lines):
                    assert child.stdout.readline(), "the trainer ended before it was killed"
                child.send_signal(signal.SIGKILL)
                assert child.wait() == -signal.SIGKILL
        with trainer(store, tmp_path / "checkpoints") as learning:
            assert learning.step < STEPS * 2
            learning.train(until=STEPS * 2)
        assert_consistent(store, steps=STEPS * 2)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    told = ("round-opened", "round-adopted", "published", "trained")
    with trainer(
        folder / "store", folder / "checkpoints", on_event=lambda event: print(event.name, flush=True) if event.name in told else None
    ) as learning:
        learning.train(until=10**6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

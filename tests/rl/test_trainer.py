"""The trainer with real members: it learns, keeps to its staleness budget, and goes on after its death as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from learning_run import FLEET, ROWS, SETTINGS, attachments, members, model, trainer
from tiny_models import bits, torch

from deltawire import Subscriber
from deltawire.errors import CheckpointError, Fenced
from deltawire.events import Event
from deltawire.rl.trainer import GrpoSettings, GrpoTrainer
from deltawire.store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def trained(events: list[Event]) -> list[Any]:
    return [event.fields for event in events if event.name == "trained"]


def test_a_reward_that_can_be_learned_rises(store: MemoryStore, tmp_path: Path):
    events: list[Event] = []
    with members(store), trainer(store, tmp_path, on_event=events.append) as learning:
        learning.train(until=20)
    rewards = [step["reward"] for step in trained(events)]
    assert [step["step"] for step in trained(events)] == list(range(1, 21))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    last = trained(events)[-1]
    assert last["tokens"] == 4 * 4 * 6
    assert 0 < last["changed"] * 2 < last["state_bytes"]
    assert last["bytes"] > 0
    assert min(last["idle_seconds"], last["train_seconds"], last["publish_seconds"]) > 0


def test_what_is_published_is_what_the_trainer_has(store: MemoryStore, tmp_path: Path):
    with members(store), trainer(store, tmp_path) as learning:
        learning.train(until=3)
        with Subscriber(store, pin=False) as reader:
            assert reader.sync().step == 3
            held = {name: bytes_ for name, (_, _, bytes_) in bits(learning._model.to(torch.bfloat16).state_dict()).items()}
            del held["lm_head.weight"]  # tied
            assert {name: array.tobytes() for name, array in reader.state.items()} == held


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_synchronous_and_pipelined_are_one_loop_with_another_budget(store: MemoryStore, staleness: int):
    events: list[Event] = []
    settings = replace(SETTINGS, staleness=staleness)
    with members(store, 2), trainer(store, None, settings=settings, on_event=events.append) as learning:
        learning.train(until=8)
        learning.stop_members()
    lags = [step["lag"] for step in trained(events)]
    assert all(0 <= lag <= staleness for lag in lags)
    opened = [(event.name, event.fields["step"]) for event in events if event.name in ("round-opened", "trained")]
    ahead = [step - max([0, *(done for name, done in opened[:place] if name == "trained")]) for place, (name, step) in enumerate(opened)]
    assert max(ahead) == staleness + 1


def test_several_updates_on_one_batch_are_clipped(store: MemoryStore):
    events: list[Event] = []
    settings = replace(SETTINGS, updates=4, learning_rate=2e-2, rows_at_once=5)
    with members(store), trainer(store, None, settings=settings, on_event=events.append) as learning:
        learning.train(until=4)
    assert any(step["clip_share"] > 0 for step in trained(events))


def test_a_resumed_trainer_makes_the_very_version_that_it_had_made_from_what_was_acknowledged(store: MemoryStore, tmp_path: Path):
    with members(store), trainer(store, tmp_path) as first:
        first.train(until=3)  # the checkpoint is of step 2
    with trainer(store, tmp_path, seed=9) as second:
        assert second.step == 2
        second.train(until=3)  # nobody is there to make new rollouts
        assert second.version.digest == first.version.digest
        assert second.version.seq > first.version.seq


def test_a_stop_leaves_the_round_for_the_next_call(store: MemoryStore):
    events: list[Event] = []
    with trainer(store, None, on_event=events.append) as learning:
        asked = chain([False], repeat(True))
        learning.train(until=2, stop=lambda: next(asked))
        assert learning.step == 0
        with members(store):
            learning.train(until=2)
        assert learning.step == 2
    assert [event.fields["step"] for event in events if event.name == "round-opened"] == [1, 2]


def test_a_trainer_that_was_taken_over_halts(store: MemoryStore, tmp_path: Path):
    with members(store), trainer(store, tmp_path) as old:
        old.train(until=2)
        with trainer(store, tmp_path) as new:
            with pytest.raises(Fenced):
                old.train(until=4)
            new.train(until=3)
            assert new.step == 3


def test_a_chain_without_its_checkpoint_is_not_overwritten(store: MemoryStore, tmp_path: Path):
    with trainer(store, tmp_path / "mine") as learning:
        epoch = learning._publisher.epoch
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        trainer(store, tmp_path / "empty")
    with trainer(MemoryStore(), tmp_path / "other", seed=1):
        pass
    with pytest.raises(CheckpointError, match="no version there has its weights"):
        trainer(store, tmp_path / "other", seed=1)
    with trainer(store, tmp_path / "mine") as learning:
        assert learning._publisher.epoch == epoch + 1  # nobody was fenced off meanwhile


def test_settings_that_cannot_work_are_refused(store: MemoryStore, tmp_path: Path):
    for wrong in ({"samples": 1}, {"tasks": 9}, {"updates": 0}):
        with pytest.raises(ValueError, match="at least"):
            GrpoSettings(**wrong)
    with pytest.raises(ValueError, match="fewer than"):
        GrpoTrainer(model(), ROWS[:2], store, settings=SETTINGS, fleet=FLEET, attachments=attachments())
    with pytest.raises(ValueError, match="would not find its rollouts"):
        trainer(store, tmp_path, settings=replace(SETTINGS, checkpoint_every=64))

"""A trainer with real members learns, keeps within its staleness budget, and continues after a crash as if it had never stopped."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_run import FLEET, ROWS, SETTINGS, attachments, members, model, tokenizer, trainer
from tiny_models import bits, torch

from deltawire import Subscriber
from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import CheckpointError, Fenced, SignatureInvalid, UnusableModelFiles, UnusableRows, UnusableSettings
from deltawire.events import Event
from deltawire.format.records.signing import SigningKey
from deltawire.publish.writer_options import WriterOptions
from deltawire.rl.mismatch import TokenMismatch
from deltawire.rl.mismatch_alarm import AlarmRule
from deltawire.rl.resume_point import digest_like
from deltawire.rl.settings import GrpoSettings
from deltawire.rl.trainer import GrpoTrainer
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files
from deltawire.warnings import RecipeChanged


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
        with Subscriber(store, options=ReaderOptions(pin=False)) as reader:
            assert reader.sync().step == 3
            held = {name: bytes_ for name, (_, _, bytes_) in bits(learning._model.to(torch.bfloat16).state_dict()).items()}
            del held["lm_head.weight"]  # tied
            assert {name: array.tobytes() for name, array in reader.state.items()} == held


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_synchronous_and_pipelined_are_one_loop_with_another_budget(store: MemoryStore, staleness: int):
    events: list[Event] = []
    settings = replace(SETTINGS, max_staleness=staleness)
    with members(store, 2), trainer(store, None, settings=settings, on_event=events.append) as learning:
        learning.train(until=8)
        learning.stop_members()
    lags = [step["lag"] for step in trained(events)]
    assert all(0 <= lag <= staleness for lag in lags)
    opened = [(event.name, event.fields["step"]) for event in events if event.name in ("round-opened", "trained")]
    ahead = [step - max([0, *(done for name, done in opened[:place] if name == "trained")]) for place, (name, step) in enumerate(opened)]
    # One round more may be opened while the trainer trains. It is not offered before the next version.
    assert staleness + 1 <= max(ahead) <= staleness + 2


def test_several_updates_on_one_batch_are_clipped(store: MemoryStore):
    events: list[Event] = []
    settings = replace(SETTINGS, num_iterations=4, learning_rate=2e-2, per_device_train_batch_size=5)
    with members(store), trainer(store, None, settings=settings, on_event=events.append) as learning:
        learning.train(until=4)
    assert any(step["clip_ratio"] > 0 for step in trained(events))


def test_a_resumed_trainer_makes_the_very_version_that_it_had_made_from_what_was_acknowledged(store: MemoryStore, tmp_path: Path):
    with members(store), trainer(store, tmp_path) as first:
        first.train(until=3)  # the newest checkpoint is the one of step 2
    with trainer(store, tmp_path, seed=9) as second:
        assert second.step == 2
        second.train(until=3)  # there is no member that could make new rollouts
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
    with pytest.raises(CheckpointError, match="no checkpoint to continue from") as raised:
        trainer(store, tmp_path / "empty")
    assert "If another program began it, such as a Publisher" in str(raised.value)
    assert "start the trainer first" in str(raised.value)
    with trainer(MemoryStore(), tmp_path / "other", seed=1):
        pass
    with pytest.raises(CheckpointError, match="no version there has its weights"):
        trainer(store, tmp_path / "other", seed=1)
    with trainer(store, tmp_path / "mine") as learning:
        assert learning._publisher.epoch == epoch + 1  # the refused trainers did not fence other writers


def test_an_optimizer_a_schedule_and_an_evaluation_of_ones_own(store: MemoryStore, tmp_path: Path):
    events: list[Event] = []
    policy = model()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(torch.cat([p.grad.flatten() for p in policy.parameters()]).norm())))

    def evaluate(model: Any, step: int) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"accuracy": step / 10}

    settings = replace(SETTINGS, eval_steps=2, num_completions_to_print=2, max_grad_norm=1e-3)
    options: dict[str, Any] = {"settings": settings, "fleet": FLEET, "attachments": attachments(), "on_event": events.append}
    options |= {"lr_scheduler": schedule, "evaluate": evaluate}
    with (
        members(store),
        GrpoTrainer(policy, ROWS, store, checkpoints=tmp_path, optimizer=optimizer, **options) as own,
    ):
        own.train(until=4)
    assert [step["learning_rate"] for step in trained(events)] == [0.25, 0.125, 0.0625, 0.03125]
    assert [(event.fields["step"], event.fields["accuracy"]) for event in events if event.name == "evaluated"] == [(2, 0.2), (4, 0.4)]
    assert norms == pytest.approx([min(step["grad_norm"], 1e-3) for step in trained(events)], rel=0.01)
    last = trained(events)[-1]
    assert last["rewards/low_words/mean"] == pytest.approx(last["reward"])
    assert last["completions/mean_length"] == last["completions/max_length"] == 6
    assert 0 < last["entropy"] < 5
    shown = [event.fields for event in events if event.name == "completion"]
    assert len(shown) == 2 * 4
    assert all(one["prompt"].startswith("w") and one["completion"].startswith("w") and 0 <= one["rewards/low_words"] <= 1 for one in shown)
    with pytest.raises(ValueError, match="needs its optimizer"):
        GrpoTrainer(policy, ROWS, store, **options)


def test_without_a_listener_every_step_is_a_line_of_80_columns(store: MemoryStore, capsys: pytest.CaptureFixture[str]):
    with members(store), trainer(store, None) as learning:
        learning.train(until=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "  reward " in line]
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2"]
    assert [line for line in lines if len(line) > 80] == []


def rows_with(number: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ROWS[:number], row, *ROWS[number:]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "w1"}, "row 3: it has no `prompt`; its columns are text"),
        ({"prompt": None}, "row 3: the prompt of a row must be a text, messages or token ids, not None"),
        ({"prompt": ""}, "row 3: the prompt '' has no tokens"),
        ({"prompt": [1, 96]}, "row 3: its prompt has tokens outside the model's vocabulary of 96"),
        ({"prompt": [1, -1]}, "row 3: its prompt has tokens outside the model's vocabulary of 96"),
        (
            {"prompt": "w1 " * 59},
            "row 3: its prompt has 59 tokens, which with max_completion_length=6 is more than the model's 64 positions",
        ),
        ({"prompt": "w1", "score": float("nan")}, "row 3: it cannot be written as JSON"),
        ({"prompt": "w1", "when": Path()}, "row 3: it cannot be written as JSON"),
        ({"prompt": [{"role": "user", "content": "w1"}]}, "row 3: its prompt cannot be encoded"),  # there is no chat template
    ],
)
def test_rows_that_cannot_be_used_are_named_before_anything_is_published(store: MemoryStore, row: dict[str, Any], told: str):
    with pytest.raises(UnusableRows, match=re.escape(told)):
        GrpoTrainer(model(), rows_with(3, row), store, settings=SETTINGS, fleet=FLEET, attachments=attachments())
    assert not list(store.list(""))


def test_some_of_many_bad_rows_are_named_and_all_are_counted(store: MemoryStore):
    with pytest.raises(UnusableRows, match=r"row 0: .*; row 1: .*; row 2: .* \(and 4 more rows\)"):
        GrpoTrainer(model(), [{"question": "w1"}] * 7, store, settings=SETTINGS, fleet=FLEET, attachments=attachments())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("w1", "row 0: its type is str, but a row must be a mapping"),
        ({"question": "w1"}, "row 0: it has no `prompt`"),
        ({"prompt": "w1 " * 200}, "leaves no room for a completion in the model's 64 positions"),
    ],
)
def test_rows_are_checked_before_they_are_counted(store: MemoryStore, row: Any, told: str):
    with pytest.raises(UnusableRows, match=re.escape(told)):
        GrpoTrainer(model(), [row], store, settings=SETTINGS, fleet=FLEET, attachments=attachments())
    with pytest.raises(ValueError, match="the dataset has 1 rows"):
        GrpoTrainer(model(), [{"prompt": "w1"}], store, settings=SETTINGS, fleet=FLEET, attachments=attachments())


def test_a_tokenizer_is_enough_for_members_to_build_the_model(store: MemoryStore):
    with trainer(store, None, attachments=None, tokenizer=tokenizer()):
        pass
    assert {"config.json", "tokenizer.json"} <= read_model_files(store).files.keys()


def test_completions_that_no_position_of_the_model_is_left_for_are_refused(store: MemoryStore):
    with pytest.raises(UnusableSettings, match=r"max_completion_length=63 is too large for the model's 64 positions.* Set a smaller"):
        trainer(store, None, settings=replace(SETTINGS, max_completion_length=63))
    assert not list(store.list(""))


@pytest.mark.parametrize("missing", ["everything", "config", "tokenizer"])
def test_files_without_which_no_member_can_work_are_asked_for(store: MemoryStore, missing: str):
    files = {
        "everything": None,
        "config": {name: data for name, data in attachments().items() if name != "config.json"},
        "tokenizer": {name: data for name, data in attachments().items() if name == "config.json"},
    }[missing]
    with pytest.raises(UnusableModelFiles, match=r"Pass `attachments`.* `tokenizer=`"):
        trainer(store, None, attachments=files)
    assert not list(store.list(""))


def test_a_resumed_trainer_finds_the_files_in_its_chain(store: MemoryStore, tmp_path: Path):
    with trainer(store, tmp_path):
        pass
    with trainer(store, tmp_path, attachments=None) as again:
        assert again.step == 0


def test_a_trainer_that_signs_takes_only_files_that_it_signed(store: MemoryStore, tmp_path: Path):
    with trainer(store, tmp_path):  # unsigned
        pass
    with pytest.raises(SignatureInvalid):
        trainer(store, tmp_path, attachments=None, options=WriterOptions(signing_key=SigningKey.generate()))


def test_settings_that_cannot_work_are_refused(store: MemoryStore, tmp_path: Path):
    for wrong in ({"num_generations": 1}, {"tasks": 9}, {"num_iterations": 0}):
        with pytest.raises(ValueError, match="at least"):
            GrpoSettings(**wrong)
    with pytest.raises(ValueError, match="one step needs"):
        GrpoTrainer(model(), ROWS[:2], store, settings=SETTINGS, fleet=FLEET, attachments=attachments())
    with pytest.raises(ValueError, match="keeps fewer"):
        trainer(store, tmp_path, settings=replace(SETTINGS, save_steps=64))


def test_a_trainer_that_quantises_continues_its_own_chain_only(store: MemoryStore, tmp_path: Path):
    with trainer(store, tmp_path / "mine", quantise="fp8-block") as learning:
        with torch.no_grad():
            for weight in learning._model.parameters():
                weight += 0.003 * torch.rand_like(weight)  # most scales stay, so that they are not what fresh ones would be
        learning.step = 1
        learning._checkpoints.save(1, learning._model, learning._optimizer, None)
        version = learning._publish().result()
    assert version.recipe.name == "fp8-block"
    with trainer(store, tmp_path / "mine", quantise="fp8-block") as learning:
        assert (learning.step, learning.version) == (1, version)  # it has the weights of the checkpoint, so none are published
        log = ChainLog(store)
        newest = log.state_commit(log.in_force(log.head()))
        hostile = replace(newest, recipe=replace(newest.recipe, options=newest.recipe.options | {"ignore": ["re:.*"]}))
        assert digest_like(log, hostile, learning._model, torch.bfloat16, None) == newest.digest  # the chain's patterns are not run
    with trainer(MemoryStore(), tmp_path / "other", seed=1, quantise="fp8-block") as other:
        other._checkpoints.save(1, other._model, other._optimizer, None)
    with pytest.raises(CheckpointError, match="no version there has its weights"):
        trainer(store, tmp_path / "other", seed=1, quantise="fp8-block")
    with pytest.warns(RecipeChanged), trainer(store, tmp_path / "mine") as learning:
        assert (learning.version.kind, learning.version.recipe) == ("anchor", None)


def test_each_step_tells_its_mismatch_overall_by_lag_and_by_member(store: MemoryStore):
    events: list[Event] = []
    with members(store, 2), trainer(store, None, settings=replace(SETTINGS, max_staleness=1), on_event=events.append) as learning:
        learning.train(until=3)
    told = [event.fields for event in events if event.name == "mismatch"]
    for step in trained(events):
        own = {(one["by"], one["group"]): one for one in told if one["step"] == step["step"]}
        overall = own["all", None]
        assert overall["tokens"] == step["tokens"]
        assert overall["kl"] == pytest.approx(step["mismatch_kl"], rel=1e-5)
        assert overall["lag"] == pytest.approx(step["lag"])
        assert overall["logp_difference_max"] == step["sampling/sampling_logp_difference/max"] > 0  # members compute in bfloat16
        assert overall["ess"] == step["mismatch/ess"] <= 1
        for kind in ("lag", "member", "engine"):
            parts = [one for (by, _), one in own.items() if by == kind]
            assert sum(one["tokens"] for one in parts) == overall["tokens"]
            assert sum(one["tokens"] * one["kl"] for one in parts) == pytest.approx(overall["tokens"] * overall["kl"])
        assert [name for by, name in own if by == "engine"] == ["transformers"]
        assert {name for by, name in own if by == "member"} <= {"member-0", "member-1"}


@pytest.mark.parametrize("exclude", [False, True])
def test_a_member_that_stands_out_is_told_and_excluded_if_asked(store: MemoryStore, exclude: bool):
    events: list[Event] = []
    rule = AlarmRule(least_tokens=10, exclude=exclude)
    with trainer(store, None, settings=replace(SETTINGS, mismatch_alarm=rule), on_event=events.append) as learning:
        rows = np.repeat(np.arange(3), 10)
        drift = np.where(rows == 2, 1.0, 1e-3)
        for _ in range(2):
            learning._tell_mismatch(TokenMismatch(drift, np.zeros(30, bool), np.zeros(30, np.int64), rows), ("a", "b", "broken"))
    alarms = [event.fields for event in events if event.name == "mismatch-alarm"]
    assert [one["member"] for one in alarms] == ["broken"]
    assert alarms[0]["kl"] == pytest.approx(np.e - 2)
    excluded = [event.fields for event in events if event.name == "member-excluded"]
    assert [one["member"] for one in excluded] == (["broken"] if exclude else [])

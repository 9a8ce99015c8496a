"""A run that gets poisoned results always continues, even after a resume, and its weights stay finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_run import PATIENT, SETTINGS, members
from learning_run import trainer as any_trainer
from poisons import MARK, MARKED, Poison, PoisonedStore, logprob, longer, on_first, prompts, reward, token
from tiny_models import torch

from deltawire import Subscriber
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.model_limits import limits_of_files, load_prompts
from deltawire.errors import TrainingFailed
from deltawire.events import Event
from deltawire.fleet.rules.training_limits import TrainingLimits
from deltawire.format.records.trainer_records import Rejection
from deltawire.rl import preflight
from deltawire.rl import trainer as trainer_module
from deltawire.store import fleet_keys
from deltawire.store.memory import MemoryStore


def trainer(store: MemoryStore, checkpoints: Path | None, **options: Any) -> trainer_module.GrpoTrainer:
    return any_trainer(store, checkpoints, fleet=PATIENT, **options)


REFUSED: dict[str, tuple[Poison, str]] = {
    "a token beyond the vocabulary": (token(96), "untrainable"),
    "the largest token": (token(2**31 - 1), "untrainable"),
    "40,000 masked tokens": (longer(40_000, 0), "malformed"),
    "one masked token": (longer(1, 0), "malformed"),
    "40,000 tokens of its own": (longer(40_000, 1), "malformed"),
    "other prompts": (prompts(lambda prompt: prompt[::-1] + 1), "malformed"),
    "longer prompts": (prompts(lambda prompt: [*prompt, 1]), "malformed"),
    "prompts of 40,000 tokens": (prompts(lambda prompt: np.ones(40_000)), "malformed"),
    "a prompt beyond the vocabulary": (prompts(lambda prompt: prompt + 96), "malformed"),
    "the reward 1e39": (reward(1e39), "untrainable"),
    "the reward -1e39": (reward(-1e39), "untrainable"),
    "the largest reward of all": (reward(1.7e308), "untrainable"),
    "the lowest log-prob": (logprob(-3.4e38), "untrainable"),
    "a file of 4 MB": (prompts(lambda prompt: np.ones(500_000)), "malformed"),
    "fewer completions": (lambda whole: replace(whole, completions=whole.completions[1:]), "malformed"),
}
ADMITTED: dict[str, Poison] = {
    "the largest reward that is allowed": reward(1e9),
    "the lowest log-prob that is allowed": logprob(-1000.0),
    "a log-prob above 0 by rounding": logprob(1e-3),
    "all masked": on_first(lambda one: replace(one, mask=np.zeros(len(one.tokens), np.uint8))),
    "no reward": lambda whole: replace(whole, completions=tuple(replace(one, rewards=(None,)) for one in whole.completions)),
    "no reward functions": lambda whole: replace(
        whole, reward_names=(), completions=tuple(replace(one, rewards=()) for one in whole.completions)
    ),
    "the same token over and over": on_first(lambda one: replace(one, tokens=np.zeros(len(one.tokens), np.int32))),
}


def fails_on_mark(learning: Any, failure: Callable[[Any], Any]) -> None:
    """Apply `failure` to the model's output on every later batch that contains the mark."""
    forward = learning._model.forward

    def wrapped(input_ids: Any, **options: Any) -> Any:
        out = forward(input_ids=input_ids, **options)
        return failure(out) if bool(((input_ids == MARK).sum(-1) >= SETTINGS.max_completion_length).any()) else out

    learning._model.forward = wrapped


def raises(out: Any) -> Any:
    raise RuntimeError("the kernel failed")


def makes_nan(out: Any) -> Any:
    out.logits = out.logits * float("nan")
    return out


class InfiniteGradient(torch.autograd.Function):
    """A function that returns its input unchanged and has an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, values: Any) -> Any:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * float("inf")


def makes_infinite_gradients(out: Any) -> Any:
    out.logits = InfiniteGradient.apply(out.logits)
    return out


def assert_finite(store: MemoryStore, step: int) -> None:
    with Subscriber(store, options=ReaderOptions(pin=False)) as reader:
        assert reader.sync().step == step
        for name, array in reader.state.items():
            bits = array.view(np.uint16).astype(np.uint32) << 16
            assert np.isfinite(bits.view(np.float32)).all(), name


def named(events: list[Event], name: str) -> list[Any]:
    return [event.fields for event in events if event.name == name]


def rejections(store: MemoryStore) -> list[Rejection]:
    return [Rejection.parse(store.get(info.key, limit=1 << 16)) for info in store.list(fleet_keys.REJECTED)]


def test_poison_is_refused_on_arrival_by_name_and_the_run_continues():
    store = PoisonedStore(poison for poison, _ in REFUSED.values())
    events: list[Event] = []
    with members(store), trainer(store, None, on_event=events.append) as learning:
        learning.train(until=2)
    told = [(one["reason"], one["why"]) for one in named(events, "rollout-rejected")]
    assert [reason for reason, _ in told] == [reason for _, reason in REFUSED.values()], told
    assert all(why for _, why in told)
    assert len(store.poisoned) == len(REFUSED)
    assert [step["completions"] for step in named(events, "trained")] == [16, 16]
    assert not rejections(store)
    assert_finite(store, 2)


def test_odd_results_that_are_allowed_are_trained_on_and_leave_finite_weights():
    store = PoisonedStore(ADMITTED.values())
    events: list[Event] = []
    settings = replace(SETTINGS, num_iterations=2)
    with members(store), trainer(store, None, settings=settings, on_event=events.append) as learning:
        learning.train(until=5)
    assert not named(events, "rollout-rejected")
    assert not named(events, "step-skipped")
    assert all(np.isfinite(step["loss"]) and np.isfinite(step["grad_norm"]) for step in named(events, "trained"))
    assert_finite(store, 5)


@pytest.mark.parametrize(
    ("failure", "why"), [(raises, "the kernel failed"), (makes_nan, "loss is nan"), (makes_infinite_gradients, "gradient")]
)
def test_poison_that_shows_only_in_training_is_rejected_and_the_rest_trained_on(failure: Callable[[Any], Any], why: str):
    store = PoisonedStore([MARKED])
    events: list[Event] = []
    with members(store), trainer(store, None, on_event=events.append) as learning:
        fails_on_mark(learning, failure)
        learning.train(until=2)
    (told,) = named(events, "rollout-rejected")
    assert told["reason"] == "untrainable"
    assert why in told["why"]
    assert told["member"] == "member-0"
    assert [step["completions"] for step in named(events, "trained")] == [8, 16]
    (written,) = rejections(store)
    assert [fleet_keys.rollout_key(fleet_keys.RolloutKey(written.round, *one)) for one in written.results] == store.poisoned
    assert_finite(store, 2)


def test_a_step_of_poison_alone_is_skipped_and_after_too_many_of_them_training_stops_by_name(tmp_path: Path):
    store = PoisonedStore([MARKED] * 6)
    events: list[Event] = []
    settings = replace(SETTINGS, max_skipped_steps=1)
    with members(store):
        with trainer(store, tmp_path, settings=settings, on_event=events.append) as learning:
            fails_on_mark(learning, raises)
            before = learning.version.digest
            with pytest.raises(TrainingFailed, match="2 steps in a row; the last time: RuntimeError: the kernel failed"):
                learning.train(until=9)
        assert [one["step"] for one in named(events, "step-skipped")] == [1, 2]
        assert learning.version.step == 1
        assert learning.version.digest == before
        assert not any("loss" in step for step in named(events, "trained"))
        with trainer(store, tmp_path, settings=settings, on_event=events.append) as again:  # two more poisoned results will follow
            fails_on_mark(again, raises)
            again.train(until=4)
    assert not store.poisons
    assert_finite(store, 4)


def test_failures_after_the_first_iteration_end_the_iterations_and_not_the_run():
    store = MemoryStore()
    events: list[Event] = []
    with members(store), trainer(store, None, settings=replace(SETTINGS, num_iterations=3), on_event=events.append) as learning:
        calls: list[int] = []
        forward = learning._model.forward

        def third_fails(**arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:  # the first call computes log-probs before the step, and the second is the first iteration
                raise RuntimeError("out of luck")
            return forward(**arguments)

        learning._model.forward = third_fails
        learning.train(until=2)
    assert [(one["step"], one["why"]) for one in named(events, "iterations-skipped")] == [(1, "RuntimeError: out of luck")]
    assert not named(events, "rollout-rejected")
    assert_finite(store, 2)


def dies(self: Any, collected: Any) -> Any:
    raise SystemExit("killed between acknowledgement and training")


@pytest.mark.parametrize("kind", ["refused by today's checks", "known to no check"])
def test_a_run_whose_poison_was_acknowledged_continues_when_it_is_resumed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = PoisonedStore([token(2**31 - 1) if kind.startswith("refused") else MARKED, reward(1e39)])
    with monkeypatch.context() as patched:  # this trainer checks nothing, as in earlier releases
        patched.setattr(trainer_module, "training_limits", lambda model, prompts: TrainingLimits())
        patched.setattr(trainer_module.StepTraining, "train", dies)
        patched.setattr("deltawire.fleet.steps.intake_steps.why_untrainable", lambda rollouts, limits: None)
        with members(store), trainer(store, tmp_path) as old, pytest.raises(SystemExit):
            old.train(until=1)
    assert len(list(store.list(fleet_keys.BATCHES))) == 1
    for _ in range(2):  # the second resume also works
        events: list[Event] = []
        with members(store), trainer(store, tmp_path, on_event=events.append) as learning:
            fails_on_mark(learning, raises)
            learning.train(until=learning.step + 2)
        assert all(np.isfinite(step["loss"]) for step in named(events, "trained"))
    assert_finite(store, 4)


def test_weights_that_the_optimizer_spoils_are_neither_published_nor_kept(tmp_path: Path):
    """The gradients are finite but the new weights are not. The step is undone, and the run continues without its rollouts."""
    store = MemoryStore()
    with members(store):
        with trainer(store, tmp_path) as learning:
            learning.train(until=2)
            step = learning._optimizer.step

            def spoil() -> None:
                step()
                with torch.no_grad():
                    next(learning._model.parameters()).fill_(float("inf"))

            learning._optimizer.step = spoil
            with pytest.raises(TrainingFailed, match="not finite"):
                learning.train(until=3)
        assert_finite(store, 2)
        assert sum(len(one.results) for one in rejections(store)) == 2
        with trainer(store, tmp_path) as again:
            assert again.step == 2
            again.train(until=3)
    assert_finite(store, 3)


def test_a_model_whose_weights_are_not_finite_is_not_published():
    store = MemoryStore()
    from learning_run import FLEET, ROWS, attachments, model

    spoilt = model()
    with torch.no_grad():
        next(spoilt.parameters())[0] = 3.4e38  # finite in float32, but infinite in bfloat16, the published type
    with pytest.raises(TrainingFailed, match="initial weights"):
        trainer_module.GrpoTrainer(spoilt, ROWS, store, settings=SETTINGS, fleet=FLEET, attachments=attachments())
    assert not list(store.list(""))


def test_limits_are_those_of_the_model_and_the_tokenizer():
    from learning_run import attachments, model

    prompts = load_prompts(files := preflight.read_files(MemoryStore(), attachments()))
    limits = preflight.training_limits(model(), prompts)
    assert (limits.vocabulary, limits.positions) == (96, 64)
    assert limits.prompts_of([{"prompt": "w1 w2"}]) == ((1, 2),)
    from_files = limits_of_files(files)
    assert (from_files.vocabulary, from_files.positions) == (96, 64)
    assert from_files.prompts_of([{"prompt": "w1 w2"}]) == ((1, 2),)

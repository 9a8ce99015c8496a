"""A GRPO trainer learns from what users were answered, alone and together with members."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_run import PATIENT, ROWS, SETTINGS, members, model, tokenizer, trainer
from live_samples import ID
from tiny_models import torch

from deltawire.errors import NoMetrics
from deltawire.events import Event
from deltawire.fleet.fleet_keyring import FleetKeyring
from deltawire.fleet.steps.requests import run_steps
from deltawire.format.content_hash import content_hash
from deltawire.format.feedback import Feedback, FeedbackFile
from deltawire.format.interactions import AnswerFacts, Interaction, Interactions
from deltawire.format.records.trainer_records import Sampling
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan
from deltawire.live import LiveTraffic, Metric
from deltawire.rl.batches import training_batch
from deltawire.rl.grpo import token_logprobs
from deltawire.rl.sampling import sample
from deltawire.store import live_keys
from deltawire.store.base import ObjectInfo
from deltawire.store.live_keys import LiveKey
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore

SESSION = "west.0123456789abcdef"
LIVE = replace(SETTINGS, max_staleness=8, learning_rate=3e-3)
RATING = Metric("rating", type="float", window=600, low=0.0, high=1.0, default=0.0)


class OldTraffic(WrappedStore):
    """A store in which everything that gateways wrote is an hour old, so that all windows are over."""

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after=after):
            is_old = info.key.startswith((live_keys.INTERACTIONS, live_keys.FEEDBACK))
            yield ObjectInfo(info.key, info.size, info.modified - timedelta(hours=1 if is_old else 0))


def answer_users(store: Any, learning: Any, count: int, number: int = 0, **about: Any) -> Interactions:
    """Let the published policy answer requests, and users say how they like the answers: they like tokens below 20."""
    policy = model().to(torch.bfloat16)
    policy.load_state_dict({name: weights.to(torch.bfloat16) for name, weights in learning._model.state_dict().items()})
    version = learning.version
    prompts = [tokenizer()(row["prompt"])["input_ids"] for row in ROWS[:count]]

    made = sample(policy, prompts, Sampling(1, 6, seed=number), forward_pass=lambda: nullcontext(version))
    ids = [ID(1000 * (number + 1) + each) for each in range(count)]
    facts = {"route": "chat", "model": "demo", "finish": "length", "train": True, "temperature": 1.0, "top_p": 1.0} | about
    completions = tuple(
        Completion(place, one.tokens, one.logprobs, np.ones(6, np.uint8), (), (TokenSpan(0, 6, version.seq),), one.finished)
        for place, one in enumerate(made)
    )
    rollouts = Rollouts(
        learning._coordinator._log.run.id,
        0,
        0,
        0,
        SESSION,
        "ab" * 16,
        tuple(np.array(each, np.int32) for each in prompts),
        completions,
        (),
        {version.seq: ClaimedVersion(version.step, version.digest)},
    )
    entries = tuple(Interaction(id=each, time=0, facts=AnswerFacts(6), **facts) for each in ids)
    file = Interactions(number, entries, rollouts)
    data = file.to_bytes()
    store.put(live_keys.interactions_key(LiveKey(SESSION, number, content_hash(data))), data)
    liked = tuple(
        Feedback(ID(50_000 + 100 * number + place), "rating", float((one.tokens < 20).mean()), inference=name)
        for place, (name, one) in enumerate(zip(ids, made, strict=True))
    )
    notes = FeedbackFile(rollouts.run, SESSION, number, liked).to_bytes()
    store.put(live_keys.feedback_key(LiveKey(SESSION, number, content_hash(notes))), notes)
    return file


def logprob_of(policy: Any, prompt: Any, tokens: Any) -> float:
    ids = torch.tensor(np.concatenate([prompt, tokens])[None].astype(np.int64))
    with torch.no_grad():
        return float(token_logprobs(policy, ids, torch.ones_like(ids))[0, len(prompt) - 1 :].sum())


def test_a_trainer_without_members_learns_what_users_like() -> None:
    store = OldTraffic(MemoryStore())
    events: list[Event] = []
    live = LiveTraffic(metrics=[RATING])
    with trainer(store, None, settings=LIVE, live=live, live_share=1.0, on_event=events.append) as learning:
        before = model()
        before.load_state_dict(learning._model.state_dict())
        file = answer_users(store, learning, 32)
        answer_users(store, learning, 16, 1, train=False)
        answer_users(store, learning, 16, 2, temperature=0.3)  # the trainer assumes temperature 1
        answer_users(store, learning, 16, 3, top_p=0.9)  # and top_p 1
        learning.train(until=2)
        made = file.rollouts
        liked = [float((one.tokens < 20).mean()) for one in made.completions]
        gains = [
            logprob_of(learning._model, made.prompts[one.prompt], one.tokens) - logprob_of(before, made.prompts[one.prompt], one.tokens)
            for one in made.completions
        ]
        counts = live.counts
    assert [event.fields["results"] for event in events if event.name == "live-joined"] == [16, 16]
    assert [event.fields["completions"] for event in events if event.name == "trained"] == [16, 16]
    assert np.corrcoef(liked, gains)[0, 1] > 0.3
    assert (counts["joined"], counts["no-consent"], counts["unfit"]) == (32, 16, 32)


def test_members_and_users_share_each_step_and_members_fill_what_users_do_not_give() -> None:
    store = OldTraffic(MemoryStore())
    events: list[Event] = []
    with trainer(store, None, settings=LIVE, fleet=PATIENT, live=LiveTraffic(metrics=[RATING]), on_event=events.append) as learning:
        answer_users(store, learning, 11)
        with members(store):
            learning.train(until=3)
    joined = [event.fields["results"] for event in events if event.name == "live-joined"]
    assert joined == [8, 3, 0]  # half of 16 completions, and then what is left
    assert [event.fields["completions"] for event in events if event.name == "trained"] == [2 * 4 + 8, 4 * 4 + 3, 4 * 4]
    assert [event.name for event in events].count("rollout-rejected") == 0
    assert all("prompt" in event.fields for event in events if event.name == "completion")


def test_a_killed_trainer_uses_no_interaction_again_and_makes_the_same_version(tmp_path: Path) -> None:
    store = OldTraffic(MemoryStore())
    options = {"settings": replace(LIVE, save_steps=2), "live_share": 1.0}
    with trainer(store, tmp_path, live=LiveTraffic(metrics=[RATING]), **options) as first:
        answer_users(store, first, 39)
        answer_users(store, first, 25, 1)
        first.train(until=3)  # the newest checkpoint is the one of step 2
    events: list[Event] = []
    with trainer(store, tmp_path, live=LiveTraffic(metrics=[RATING]), on_event=events.append, **options) as second:
        assert second.step == 2
        second.train(until=3)
        assert second.version.digest == first.version.digest
        second.train(until=4)
    assert [event.fields["step"] for event in events if event.name == "live-joined"] == [4]


def test_live_completions_form_one_group_for_advantages() -> None:
    def result(member: str, *rewards: float) -> Rollouts:
        made = tuple(
            Completion(
                0, np.array([5], np.int32), np.array([-1.0], np.float32), np.ones(1, np.uint8), (reward,), (TokenSpan(0, 1, 0),), True
            )
            for reward in rewards
        )
        prompts = (np.array([1], np.int32),)
        return Rollouts("ab" * 16, 0, 0, 0, member, "ab" * 16, prompts, made, ("r",), {0: ClaimedVersion(0, None)})  # type: ignore[arg-type]

    batch = training_batch([result("a", 0.0, 1.0), result("live", 3.0), result("live", 5.0), result("b", 7.0)], for_step=1)
    signs = [round(float(each), 3) for each in batch.advantages]
    assert signs == [-0.707, 0.707, -0.707, 0.707, 0.0]


def test_a_trainer_without_declared_metrics_says_so() -> None:
    with trainer(MemoryStore(), None, settings=LIVE, live=LiveTraffic(), live_share=1.0) as learning, pytest.raises(NoMetrics):
        learning.train(until=1)


def test_ripe_shows_what_a_trainer_would_use() -> None:
    store = OldTraffic(MemoryStore())
    with trainer(store, None, settings=LIVE) as learning:
        file = answer_users(store, learning, 5)
    traffic = LiveTraffic(store, metrics=[RATING])
    found = traffic.ripe()
    assert [one.pending.id for one in found] == [one.id for one in file.interactions]
    assert [one.reward for one in found] == [float((one.tokens < 20).mean()) for one in file.rollouts.completions]
    assert traffic.ripe() == found
    assert list(store.list(live_keys.METRICS)) == []  # a look declares nothing
    with pytest.raises(NoMetrics):
        LiveTraffic(store).ripe()
    with pytest.raises(ValueError, match="pass the metrics"):
        LiveTraffic(store).declare()
    LiveTraffic(store, metrics=[RATING]).declare()
    assert LiveTraffic(store).ripe() == found
    events: list[Event] = []
    later = LiveTraffic(metrics=[replace(RATING, window=601), replace(RATING, name="other")])
    for _ in range(2):
        run_steps(later.open(file.rollouts.run, FleetKeyring(), ticks=time.monotonic, on_event=events.append), store)
    assert [(event.name, dict(event.fields)) for event in events] == [("metrics-replaced", {"before": "rating", "after": "rating, other"})]
    other = replace(RATING, name="other")
    assert LiveTraffic(store, metrics=[other]).ripe() != found
    assert [info.key for info in store.list(live_keys.METRICS)] == [live_keys.metrics_key(0), live_keys.metrics_key(1)]

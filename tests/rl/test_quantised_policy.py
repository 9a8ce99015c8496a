"""Members serve the quantised policy. The log-probs in their rollouts are its own, and the trainer measures how far it is from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from learning_run import SETTINGS, members, trainer

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.events import Event
from deltawire.format.rollouts import Rollouts
from deltawire.rl.generation import build_model
from deltawire.rl.grpo import token_logprobs
from deltawire.rl.update import PolicyUpdate
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files

SYNCHRONOUS = replace(SETTINGS, max_staleness=0)


def test_rollouts_have_the_log_probs_of_the_quantised_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    store, batches = MemoryStore(), []
    make = PolicyUpdate.batch

    def recorded(update: PolicyUpdate, results: Sequence[Rollouts], for_step: int) -> Any:
        batch = make(update, results, for_step)
        own = token_logprobs(update._model, batch.ids, batch.attention).detach()
        batches.append((batch, own, {span.seq for each in results for one in each.completions for span in one.spans}))
        return batch

    monkeypatch.setattr(PolicyUpdate, "batch", recorded)
    events: list[Event] = []
    with members(store), trainer(store, None, settings=SYNCHRONOUS, quantise="fp8-block", on_event=events.append) as learning:
        learning.train(until=3)
    served, _ = build_model(read_model_files(store))
    mismatches = []
    with HotSwap(store, ModuleEngine(served), options=ReaderOptions(pin=False)) as policy:
        for batch, own, versions in batches:
            (seq,) = versions
            policy.sync(seq=seq)
            quantised = token_logprobs(served, batch.ids, batch.attention)
            errors = [float((each - batch.behaviour)[batch.mask].abs().mean()) for each in (quantised, own)]
            assert 50 * errors[0] < errors[1]
            drift = (own - batch.behaviour)[batch.mask].double()
            mismatches.append(float((drift.exp() - drift - 1).mean()))
    assert [event.fields["mismatch_kl"] for event in events if event.name == "trained"] == pytest.approx(mismatches, rel=1e-3)

"""Members serve the quantised policy. The log-probs in their rollouts are its own, and the trainer measures how far it is from its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_run import SETTINGS, members, trainer
from tiny_models import bits, torch

from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines import HotSwap, ModuleEngine
from deltawire.events import Event
from deltawire.format.rollouts import Rollouts
from deltawire.quantise import QuantisedLayout, dequantise_state, quantise_state
from deltawire.quantise.recipe import SPELLINGS
from deltawire.rl.generation import build_model
from deltawire.rl.grpo import token_logprobs
from deltawire.rl.update import PolicyUpdate
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files
from deltawire.tensors.torch_types import to_torch

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


@pytest.mark.parametrize("recipe", [spelling for spelling in SPELLINGS if spelling not in ("fp8-block-ue8m0", "int4-128")])
def test_the_benchmark_computes_with_the_weights_that_members_have(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    served_weights = importlib.import_module("served_weights")
    chance = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (192, 192), "self_attn.k_proj": (64, 192), "self_attn.v_proj": (64, 192), "mlp.down_proj": (192, 576)}
    weights = {f"{name}.weight": torch.randn(shape, generator=chance).exp() * 0.05 for name, shape in shapes.items()}
    weights["norm.weight"] = torch.randn(192, generator=chance)
    odd = weights["self_attn.k_proj.weight"]
    odd[0], odd[1, :32], odd[2, 0], odd[3], odd[4, 4], odd[5, 5] = 0.0, 0.0, -1e-9, -odd[3], -0.0, 40.0
    layout = QuantisedLayout.of_state(recipe, weights)
    served = {name: torch.empty_like(weight, dtype=torch.bfloat16) for name, weight in weights.items()}
    served_weights.copy_served(layout, weights, served)
    expected = dequantise_state(quantise_state(weights, recipe), layout, "bfloat16")
    assert bits(served) == bits({name: to_torch(np.ascontiguousarray(array)) for name, array in expected.items()})

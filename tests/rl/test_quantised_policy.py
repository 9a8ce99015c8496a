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
from deltawire.quantise import QuantisedLayout, Recipe, dequantise_state, quantise_state
from deltawire.quantise.recipe import SPELLINGS
from deltawire.rl.generation import build_model
from deltawire.rl.grpo import token_logprobs
from deltawire.rl.update import PolicyUpdate
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.model_files import read_model_files
from deltawire.tensors.torch_types import to_torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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


@pytest.mark.parametrize("is_sticky", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_benchmark_computes_with_the_weights_that_members_have(spelling: str, is_sticky: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some scales stay in the second version. Then weights shrink twice, and at last they grow."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    served_weights = importlib.import_module("served_weights")
    chance = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (192, 256), "self_attn.k_proj": (64, 256), "self_attn.v_proj": (64, 256), "mlp.down_proj": (192, 640)}
    weights = {f"{name}.weight": torch.randn(shape, generator=chance).exp() * 0.05 for name, shape in shapes.items()}
    weights["norm.weight"] = torch.randn(192, generator=chance)
    odd = weights["self_attn.k_proj.weight"]
    odd[0], odd[1, :32], odd[2, 0], odd[3], odd[4, 4], odd[5, 5] = 0.0, 0.0, -1e-9, -odd[3], -0.0, 40.0
    recipe = Recipe.parse(spelling, sticky=is_sticky)
    layout = QuantisedLayout.of_state(recipe, weights)
    served = {name: torch.empty_like(weight, dtype=torch.bfloat16) for name, weight in weights.items()}
    published, kept = None, {}
    for factor in (1.0, 1.003, 0.3, 0.2, 4.0):
        for weight in weights.values():
            weight.mul_(torch.rand(len(weight), *[1] * (weight.dim() - 1), generator=chance) * (factor - 1) + 1)
        served_weights.copy_served(layout, weights, served, kept)
        published = quantise_state(weights, recipe, previous=published)
        expected = dequantise_state(published, layout, "bfloat16")
        assert bits(served) == bits({name: to_torch(np.ascontiguousarray(array)) for name, array in expected.items()}), factor


def small_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("quantised_rl")
    monkeypatch.setitem(benchmark.SIZES, "demo", benchmark.Size(64, 1, 2, 1, 2, 16, 1e-3, 2, 2, 4, 1e-3))
    return benchmark


def test_the_benchmark_makes_runs_of_each_recipe_with_and_without_importance_weights() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(BENCHMARKS)
        benchmark = importlib.import_module("quantised_rl")
        made = {name for model in ("demo", "demo-256") for name in benchmark.runs_of(model)}
        for names in (made, set(benchmark.runs_of("large"))):
            assert names == {recipe + minus for recipe in ("bf16", *SPELLINGS) for minus in ("", "-")}
        for name in benchmark.runs_of("demo-256"):
            benchmark.Run.of(name, benchmark.new_model(benchmark.SIZES["demo-256"], "cpu"), benchmark.SIZES["demo-256"])


def test_an_interrupted_benchmark_goes_on_and_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = small_benchmark(monkeypatch)
    names, step = ["bf16", "int4", "int4-"], benchmark.Run.step
    with torch.random.fork_rng():
        whole = benchmark.measure("demo", steps=3, names=names)
        made: list[str] = []

        def stopped(run: Any, *arguments: Any, **given: Any) -> None:
            if len(made) == 4:  # in the second run
                raise KeyboardInterrupt
            made.append(run.name)
            step(run, *arguments, **given)

        with monkeypatch.context() as context:
            context.setattr(benchmark.Run, "step", stopped)
            with pytest.raises(KeyboardInterrupt):
                benchmark.measure("demo", steps=3, names=names, folder=tmp_path)
        kept = (tmp_path / "bf16.json").read_bytes()
        found = benchmark.measure("demo", steps=3, names=names, folder=tmp_path)
    assert made == ["bf16"] * 3 + ["int4"]
    assert (tmp_path / "bf16.json").read_bytes() == kept
    assert (found.title, found.rows) == (whole.title, whole.rows)

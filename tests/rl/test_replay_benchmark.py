"""benchmarks/router_replay_training.py: rows of experts belong to their tokens, and runs that are done are kept."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny_models import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = importlib.import_module("router_replay_training")
    monkeypatch.setattr(found, "EXPERT_WIDTH", 16)
    return found


def small(benchmark: Any) -> Any:
    return benchmark.Size(
        width=32,
        layers=2,
        heads=2,
        pretraining_steps=1,
        rows=2,
        columns=16,
        pretraining_rate=1e-3,
        prompts=2,
        samples=2,
        tokens=5,
        learning_rate=1e-3,
    )


@pytest.mark.parametrize("replays", [False, True])
def test_an_engine_in_the_trainers_precision_makes_the_trainers_decisions(benchmark: Any, replays: bool) -> None:
    size = small(benchmark)
    model = benchmark.new_model(size, experts=16)
    run = benchmark.MoeRun.of("bf16", model, size)
    for weight in run.served.parameters():
        weight.data = weight.data.float()
    run.replays = replays
    benchmark.take_turns([run], size, 2, float("inf"))
    rows, tokens = size.prompts * size.samples, benchmark.task.PROMPT_LETTERS + size.tokens
    assert run.experts.shape == (rows, tokens, size.layers, benchmark.TOP_K)
    assert (run.experts[:, -1] == -1).all()
    assert (run.experts[:, :-1] >= 0).all()
    assert run.decisions[0] == rows * (tokens - 1) * size.layers
    for step in run.steps:  # rows of other tokens would differ in most decisions
        assert step["differing"] < 0.02
        assert step["mismatch_kl"] < 1e-6
        assert step["ess"] == pytest.approx(1, abs=1e-5)


def test_runs_that_are_done_are_kept_and_the_others_are_made(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = small(benchmark)
    with torch.random.fork_rng():
        weights = benchmark.make_runs(tmp_path, size, 4, (0, 1), ("own",), 16)
        kept = (tmp_path / "own-0.json").read_bytes()
        (tmp_path / "own-1.json").unlink()
        benchmark.make_runs(tmp_path, size, 4, (0, 1), experts=16)
    assert (tmp_path / "own-0.json").read_bytes() == kept
    table = benchmark.table_of(tmp_path, weights, 16)
    assert [row[0] for row in table.rows] == ["its own routing", "the engine's routing (replay)"]
    assert all("±" in cell for row in table.rows for cell in row[1:])
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    benchmark.keep_steps(tmp_path)
    assert (tmp_path / "results" / "router-replay-training-steps.json").stat().st_size > 0

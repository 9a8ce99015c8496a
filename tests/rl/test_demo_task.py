"""The demo's task works as documented: it rewards each existing word once."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny_models import torch

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("task")


@pytest.fixture
def policy(task: Any) -> Any:
    return importlib.import_module("policy")


def test_the_reward_is_the_share_of_letters_in_different_words(task: Any):
    said = ["the store and its chain x", "the the the the the the t", "teh stroe adn ist cahin x", "chain", ""]
    expected = [(3 + 5 + 3 + 3 + 5) / 25, 3 / 25, 0.0, 0.0, 0.0]
    assert task.known_words(completions=said, prompts=[""] * 5) == pytest.approx(expected)


def test_the_tokenizer_gives_every_letter_back_also_after_it_was_saved(task: Any, tmp_path: Path):
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = task.text()[:500]
    ids = loaded(text)["input_ids"]
    assert len(ids) == len(text)
    assert loaded.batch_decode([ids], skip_special_tokens=True) == [text]


def test_there_are_prompts_enough_for_a_run(task: Any):
    rows = task.rows()
    assert len(rows) > 200
    assert {len(row["prompt"]) for row in rows} == {task.PROMPT_LETTERS}


def test_the_policy_begins_with_weights_of_one_over_the_root_of_its_width(policy: Any):
    model = policy.new_model()
    assert 1.5e6 < sum(weight.numel() for weight in model.parameters()) < 10e6
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    assert torch.cat([weight.flatten() for weight in matrices]).std().item() == pytest.approx(policy.WIDTH**-0.5, rel=0.02)


def test_reading_lowers_the_loss(policy: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy.os, "cpu_count", lambda: 1)  # more threads are slow on a busy machine
    monkeypatch.setattr(policy, "WIDTH", 64)
    losses: list[float] = []
    policy.pretrain(policy.new_model(), 1.0, lambda share, loss: losses.append(loss))
    assert len(losses) >= 3
    assert losses[-1] < losses[0]

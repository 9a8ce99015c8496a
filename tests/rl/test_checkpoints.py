"""A trainer that is put back goes on bit for bit as one that never died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import bits, llama, qwen, torch

from deltawire.errors import CheckpointError
from deltawire.rl.checkpoints import TrainerCheckpoints


def trainer(seed: int) -> tuple[Any, Any]:
    model = qwen(seed, dtype=torch.float32, attention_dropout=0.1).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any) -> None:
    text = torch.randint(0, 96, (2, 8))
    model(text, labels=text).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_goes_on_bit_for_bit_where_it_was(tmp_path: Path):
    checkpoints = TrainerCheckpoints(tmp_path / "checkpoints")
    again, its_optimizer = trainer(1)
    train(again, its_optimizer)
    model, optimizer = trainer(0)
    for _ in range(3):
        train(model, optimizer)
    checkpoints.save(3, model, optimizer)
    for _ in range(2):
        train(model, optimizer)
    assert checkpoints.load_newest(again, its_optimizer) == 3
    for _ in range(2):
        train(again, its_optimizer)
    assert bits(again.state_dict()) == bits(model.state_dict())
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_trainer_that_has_not_trained_yet_is_kept_too(tmp_path: Path):
    checkpoints = TrainerCheckpoints(tmp_path)
    model, optimizer = trainer(0)
    checkpoints.save(0, model, optimizer)
    again, its_optimizer = trainer(1)
    train(again, its_optimizer)
    assert checkpoints.load_newest(again, its_optimizer) == 0
    assert bits(again.state_dict()) == bits(model.state_dict())
    assert not its_optimizer.state


def test_only_the_newest_are_kept(tmp_path: Path):
    checkpoints = TrainerCheckpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, *trainer(0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000009.safetensors", "step-0000000010.safetensors"]


def test_a_file_of_another_model_is_refused_before_anything_is_changed(tmp_path: Path):
    TrainerCheckpoints(tmp_path).save(1, *trainer(0))
    other = llama(dtype=torch.float32)
    before = bits(other.state_dict())
    with pytest.raises(CheckpointError, match="another model"):
        TrainerCheckpoints(tmp_path).load_newest(other, torch.optim.AdamW(other.parameters()))
    assert bits(other.state_dict()) == before


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_what_is_no_checkpoint_is_told_of(tmp_path: Path, damage: str):
    from safetensors.torch import save_file

    path = TrainerCheckpoints(tmp_path).save(1, *trainer(0))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no checkpoint of a trainer"):
        TrainerCheckpoints(tmp_path).load_newest(*trainer(0))


def test_without_a_checkpoint_there_is_no_step(tmp_path: Path):
    assert TrainerCheckpoints(tmp_path / "nowhere").load_newest(*trainer(0)) is None

"""A trainer that is restored from a checkpoint continues bit for bit like one that never died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
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


def test_training_continues_bit_for_bit_from_a_checkpoint(tmp_path: Path):
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


@pytest.mark.parametrize("damage", ["cut", "foreign", "deep"])
def test_a_directory_that_is_no_checkpoint_gives_a_named_error(tmp_path: Path, damage: str):
    from safetensors.torch import save_file

    path = TrainerCheckpoints(tmp_path).save(1, *trainer(0))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        deep = {"trainer-checkpoint": "[" * 100_000} if damage == "deep" else None
        save_file({"x": torch.zeros(1)}, path, metadata=deep)
    with pytest.raises(CheckpointError, match="not a checkpoint of a trainer"):
        TrainerCheckpoints(tmp_path).load_newest(*trainer(0))


def test_without_a_checkpoint_there_is_no_step(tmp_path: Path):
    assert TrainerCheckpoints(tmp_path / "nowhere").load_newest(*trainer(0)) is None


def test_files_of_the_first_version_are_read(tmp_path: Path):
    """The test writes a file as the first version did, which stored AdamW's moments under separate names."""
    model, optimizer = trainer(0)
    train(model, optimizer)
    tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    steps = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        steps[name] = int(state["step"])
        tensors |= {f"{moment}.{name}": state[moment].clone() for moment in ("exp_avg", "exp_avg_sq")}
    tensors["rng"] = torch.get_rng_state()
    facts = json.dumps({"version": 1, "step": 7, "adam_steps": steps})
    save_file(tensors, tmp_path / "step-0000000007.safetensors", metadata={"trainer-checkpoint": facts})
    again, its_optimizer = trainer(1)
    assert TrainerCheckpoints(tmp_path).load_newest(again, its_optimizer) == 7
    train(again, its_optimizer)
    torch.set_rng_state(tensors["rng"])
    train(model, optimizer)
    assert bits(again.state_dict()) == bits(model.state_dict())


def with_momentum(seed: int) -> tuple[Any, Any, Any]:
    model = qwen(seed, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def test_any_optimizer_and_scheduler_continue_from_a_checkpoint(tmp_path: Path):
    checkpoints = TrainerCheckpoints(tmp_path)
    model, optimizer, schedule = with_momentum(0)
    for _ in range(3):
        train(model, optimizer)
        schedule.step()
    checkpoints.save(3, model, optimizer, schedule)
    again, its_optimizer, its_schedule = with_momentum(1)
    assert checkpoints.load_newest(again, its_optimizer, its_schedule) == 3
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1
    train(again, its_optimizer)
    its_schedule.step()
    checkpoints.load_newest(*with_momentum(2))  # this also restores the state of the random generators
    train(model, optimizer)
    schedule.step()
    assert bits(again.state_dict()) == bits(model.state_dict())
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_file_of_another_optimizer_or_scheduler_is_refused_before_anything_is_changed(tmp_path: Path):
    model, optimizer, schedule = with_momentum(0)
    TrainerCheckpoints(tmp_path).save(1, model, optimizer, schedule)
    other, its_optimizer = trainer(1)
    before = bits(other.state_dict())
    with pytest.raises(CheckpointError, match="to the optimizer SGD, but this trainer has AdamW"):
        TrainerCheckpoints(tmp_path).load_newest(other, its_optimizer)
    with pytest.raises(CheckpointError, match="with an lr_scheduler"):
        TrainerCheckpoints(tmp_path).load_newest(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert bits(other.state_dict()) == before


def test_state_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    model, optimizer = trainer(0)
    train(model, optimizer)
    optimizer.state[next(model.parameters())]["odd"] = object()
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        TrainerCheckpoints(tmp_path).save(1, model, optimizer)
    assert not list(tmp_path.iterdir())

"""What a trainer needs to go on after its death: weights, Adam's moments, the state of chance, the step: one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointError
from ..format.staged_output import StagedOutput, sync_file
from ..module_tensors import named_weights, tied_names

_KIND = "trainer-checkpoint"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainerCheckpoints:
    """A directory of `step-….safetensors`, of which the newest `keep` stay. Each is there whole, or not at all."""

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint has to be kept")
        self._directory = Path(directory)
        self._keep = keep

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the state after `step`, durably, then delete what is not kept."""
        self._directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in _weights(model).items()}
        adam_steps: dict[str, int] = {}
        for name, parameter in _trained(model, optimizer):
            state = optimizer.state.get(parameter)
            if state:
                adam_steps[name] = int(state["step"])
                tensors |= {f"{moment}.{name}": state[moment].contiguous() for moment in _MOMENTS}
        tensors["rng"] = torch.get_rng_state()
        staged = StagedOutput(self._directory / f"step-{step:010}.safetensors", directory=False, replace=True)
        try:
            save_file(tensors, staged.path, metadata={_KIND: json.dumps({"version": 1, "step": step, "adam_steps": adam_steps})})
            sync_file(staged.path)
            staged.commit()
        finally:
            staged.discard()
        for old in sorted(self._directory.glob("step-*.safetensors"))[: -self._keep]:
            old.unlink()
        return staged.out

    def load_newest(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        """Put the newest state back into model and optimizer, and return its step; None if there is none.

        `CheckpointError` if it is not one of this model: nothing was changed then.
        """
        found = sorted(self._directory.glob("step-*.safetensors"))
        return _load(found[-1], model, optimizer) if found else None


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_KIND])
            if facts["version"] != 1:
                raise CheckpointError(f"{path} is of version {facts['version']!r}; this release reads 1.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            step, adam_steps = int(facts["step"]), dict(facts["adam_steps"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of a trainer ({type(error).__name__}: {error}).") from error
    weights, trained = _weights(model), dict(_trained(model, optimizer))
    expected = {f"model.{name}": tensor for name, tensor in weights.items()}
    expected |= {f"{moment}.{name}": trained[name] for name in adam_steps if name in trained for moment in _MOMENTS}
    expected["rng"] = torch.get_rng_state()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != {name: tensor.shape for name, tensor in expected.items()}:
        raise CheckpointError(f"{path} is of another model: its tensors have other names or shapes.")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(tensors[f"model.{name}"])
    for name, parameter in trained.items():
        if name in adam_steps:
            moments: dict[str, Any] = {moment: tensors[f"{moment}.{name}"].to(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(adam_steps[name])), **moments}
        else:
            optimizer.state.pop(parameter, None)
    torch.set_rng_state(tensors["rng"])
    return step


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    every = named_weights(model)
    return {name: tensor for name, tensor in every.items() if name not in tied_names(every)}


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters by name."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    yield from ((name, tensor) for name, tensor in model.named_parameters() if id(tensor) in own)

"""A trainer's own checkpoints: weights, optimizer state, random state and step, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError
from ..format.checkpoints.staged_output import StagedOutput, sync_file
from ..tensors.module_tensors import named_weights, tied_names

_KIND = "trainer-checkpoint"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RATES = ("lr", "initial_lr")
"""The values in an optimizer's groups that schedulers change."""


class TrainerCheckpoints:
    """A directory of files `step-….safetensors`. Each file exists completely or not at all.

    A file has tensors `model.NAME`, `optimizer.KEY.NAME` and `rng`. Its metadata is a JSON object: version 2, the step, the optimizer's
    class, those values of its state that are not tensors, and the scheduler's state. Version 1, for AdamW only, is read too.

    Parameters
    ----------
    directory
        Where the files are. It is created if necessary.
    keep
        How many files to keep. Older ones are deleted.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self._directory = Path(directory)
        self._keep = keep

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None = None) -> Path:
        """Write the state after `step` durably, then delete old files. Raise `CheckpointError` for state that JSON cannot represent."""
        self._directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in _weights(model).items()}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in _trained(model, optimizer).items():
            state = optimizer.state.get(parameter) or {}
            tensors |= {f"optimizer.{key}.{name}": value.contiguous() for key, value in state.items() if isinstance(value, torch.Tensor)}
            if state:
                plain[name] = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        tensors["rng"] = torch.get_rng_state()
        facts = {
            "version": 2,
            "step": step,
            "optimizer": type(optimizer).__name__,
            "state": plain,
            "scheduler": None if lr_scheduler is None else _scheduler_state(lr_scheduler),
            "rates": None
            if lr_scheduler is None
            else [{key: group[key] for key in _RATES if key in group} for group in optimizer.param_groups],
        }
        try:
            text = json.dumps(facts)
        except TypeError as error:
            raise CheckpointError(
                f"the state of the optimizer or the scheduler cannot be written as JSON ({error}). Use another one."
            ) from error
        staged = StagedOutput(self._directory / f"step-{step:010}.safetensors", directory=False, replace=True)
        try:
            save_file(tensors, staged.path, metadata={_KIND: text})
            sync_file(staged.path)
            staged.commit()
        finally:
            staged.discard()
        for old in sorted(self._directory.glob("step-*.safetensors"))[: -self._keep]:
            old.unlink()
        return staged.out

    def load_newest(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None = None) -> int | None:
        """Load the newest file into model, optimizer and scheduler. Return its step, or None if there is no file.

        Raises `CheckpointError`, and changes nothing, if the file belongs to another model or optimizer.
        """
        found = sorted(self._directory.glob("step-*.safetensors"))
        return _load(found[-1], model, optimizer, lr_scheduler) if found else None


@dataclass(slots=True)
class _Saved:
    """The content of a file. `state` has the optimizer's state by parameter name."""

    step: int
    optimizer: str
    weights: dict[str, torch.Tensor]
    rng: torch.Tensor
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    rates: list[dict[str, float]] | None = None


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler | None) -> int:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_KIND])
            if facts["version"] not in (1, 2):
                raise CheckpointError(f"{path} has version {facts['version']!r}; this release reads 1 and 2.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        saved = _first_version(facts, tensors) if facts["version"] == 1 else _second_version(facts, tensors)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of a trainer ({type(error).__name__}: {error}).") from error
    weights, trained = _weights(model), _trained(model, optimizer)
    shapes = {name: tensor.shape for name, tensor in saved.weights.items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()} or not saved.state.keys() <= trained.keys():
        raise CheckpointError(f"{path} belongs to another model: its tensors have other names or shapes.")
    if saved.optimizer != type(optimizer).__name__:
        raise CheckpointError(f"{path} belongs to the optimizer {saved.optimizer}, but this trainer has {type(optimizer).__name__}.")
    if (saved.scheduler is None) is not (lr_scheduler is None):
        raise CheckpointError(
            f"{path} was written {'without' if saved.scheduler is None else 'with'} an lr_scheduler. Start the trainer in the same way."
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved.weights[name])
    _put_back(optimizer, saved, trained)
    if lr_scheduler is not None and saved.scheduler is not None:
        lr_scheduler.load_state_dict(saved.scheduler)
    torch.set_rng_state(saved.rng)
    return saved.step


def _put_back(optimizer: torch.optim.Optimizer, saved: _Saved, trained: Mapping[str, torch.nn.Parameter]) -> None:
    """Load the state with torch's own method, which moves each part to where this optimizer needs it."""
    names = {id(parameter): name for name, parameter in trained.items()}
    whole = optimizer.state_dict()
    whole["state"] = {
        index: saved.state[name]
        for group, numbered in zip(optimizer.param_groups, whole["param_groups"], strict=True)
        for parameter, index in zip(group["params"], numbered["params"], strict=True)
        if (name := names.get(id(parameter))) in saved.state and name is not None
    }
    for group, rates in zip(whole["param_groups"], saved.rates or [], strict=False):
        group |= rates
    optimizer.load_state_dict(whole)


def _first_version(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> _Saved:
    weights, rng = _weights_in(tensors)
    state: dict[str, dict[str, Any]] = {}
    for name, steps in dict(facts["adam_steps"]).items():
        state[name] = {"step": torch.tensor(float(steps)), **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}}
    if len(tensors) != len(weights) + 1 + len(_MOMENTS) * len(state):
        raise ValueError("it has unknown tensors")
    return _Saved(int(facts["step"]), "AdamW", weights, rng, state)


def _second_version(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> _Saved:
    weights, rng = _weights_in(tensors)
    state = {str(name): dict(values) for name, values in dict(facts["state"]).items()}
    for title, tensor in tensors.items():
        if title.startswith("optimizer."):
            _, key, name = title.split(".", 2)
            state[name][key] = tensor
        elif title != "rng" and not title.startswith("model."):
            raise ValueError(f"the tensor {title!r} is unknown")
    return _Saved(int(facts["step"]), str(facts["optimizer"]), weights, rng, state, facts["scheduler"], facts["rates"])


def _weights_in(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}, tensors["rng"]


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    return [{key: float(group[key]) for key in _RATES if key in group} for group in optimizer.param_groups]


def _scheduler_state(lr_scheduler: LRScheduler) -> dict[str, Any]:
    """Return the state without functions, which the new scheduler has already."""
    return {name: value for name, value in lr_scheduler.state_dict().items() if name != "lr_lambdas"}


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    every = named_weights(model)
    return {name: tensor for name, tensor in every.items() if name not in tied_names(every)}


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters by name."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: tensor for name, tensor in model.named_parameters() if id(tensor) in own}

"""The layout of a model: where a worker keeps each tensor of a chain, to read and to write (`learn_layout` finds out)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....errors import BaseMismatch
from ..modules.reachable import Path, at
from .loader_copies import LoaderCopy
from .placements import PIECE, as_bits, copies_differ, flat_storage, gather, scatters, source_view
from .types import ModuleRule, Nest, Scatter, TensorLayout
from .unit_values import storage_units


@dataclass(slots=True)
class LearningFacts:
    """The effort of learning a layout, for logs and measurements."""

    seconds: float = 0.0
    runs: int = 0
    """The number of runs of vLLM's processing, on copies of modules."""
    learnt: int = 0
    """Modules whose processing was learnt."""
    reused: int = 0
    """Modules with the processing of an earlier one, for which one run was enough."""
    viewed: int = 0
    """Modules whose processing only makes views."""
    unlearnt: dict[str, str] = field(default_factory=dict)
    """Modules whose processing could not be learnt, with the reason."""


class ModelLayout:
    """The way in which a worker holds the tensors of a chain. It is valid as long as the model's tensors keep their memory.

    Parameters
    ----------
    tensors
        The layout of each tensor, by ascending names.
    modules
        What modules need after some of their inputs have changed.
    held
        The tensors whose memory the layout describes: their modules, and how they are reached from there.
    facts
        How it was learnt.
    copies
        For modules with rules: what loaders copy to their raw parameters.
    parts
        For each module: the tensors that loaders write to it.
    constant
        For modules with rules: the paths of tensors that do not depend on the chain.
    model
        The model.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorLayout],
        modules: Mapping[str, ModuleRule],
        held: Sequence[tuple[Any, Path]] = (),
        facts: LearningFacts | None = None,
        copies: Mapping[str, Sequence[tuple[str, LoaderCopy]]] | None = None,
        parts: Mapping[str, Iterable[str]] | None = None,
        constant: Mapping[str, Iterable[Path]] | None = None,
        model: Any = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.modules = dict(modules)
        self.facts = facts or LearningFacts()
        self.rejected: Mapping[str, str] = {}
        """The tensors for which the model's loader raised an error, and the error."""
        self.owned: dict[str, frozenset[int]] = {}
        """For tensors of which other workers own some elements: the numbers of the placements that this worker owns."""
        self._copies = copies or {}
        self._constant = {name: frozenset(".".join(path) for path in paths) for name, paths in (constant or {}).items()}
        self._parts = {name: frozenset(found) for name, found in (parts or {}).items()}
        self._model = model
        self._held = list(held)
        self._addresses = self._current_addresses()
        for rule in list(self.modules.values()):
            if rule.how == "load_anew":
                self.load_anew(rule.name, rule.reason)

    def load_anew(self, name: str, reason: str) -> None:
        """Let updates load a module anew, because nothing else works. All its tensors become inputs of it.

        Parameters
        ----------
        name
            The name of a module that has a rule.
        reason
            Why nothing else works.
        """
        inputs = sorted({*self.modules[name].inputs, *self.loaded_with(name)[1]})
        self.modules[name] = ModuleRule(name, "load_anew", tuple(inputs), reason)
        for part in inputs:
            modules = tuple(sorted({*self.tensors[part].modules, name}))
            self.tensors[part] = dataclasses.replace(self.tensors[part], modules=modules)

    def refuse(self, name: str, reason: str) -> None:
        """Let updates that change inputs of a module be refused, because it cannot even be loaded anew by itself.

        Parameters
        ----------
        name
            The name of a module that has a rule.
        reason
            Why it cannot.
        """
        self.modules[name] = dataclasses.replace(self.modules[name], how="refuse", reason=reason)

    def loaded_with(self, name: str) -> tuple[list[str], list[str]]:
        """Return the modules that are loaded anew with a module, itself included, and the tensors that are loaded.

        Modules are loaded together if they share tensors of the chain, because a loader writes a tensor to all its positions.

        Parameters
        ----------
        name
            The name of the module.
        """
        modules, tensors = {name}, set(self._parts.get(name, ()))
        while more := {other for other, parts in self._parts.items() if other not in modules and not tensors.isdisjoint(parts)}:
            modules |= more
            tensors |= {part for other in more for part in self._parts[other]}
        return sorted(modules), sorted(tensors)

    def is_valid_for(self, model: Any) -> bool:
        """Return whether the model's tensors still have the memory that they had when the layout was learnt.

        Parameters
        ----------
        model
            The model.
        """
        return (self._model is None or self._model is model) and self._current_addresses() == self._addresses

    def _current_addresses(self) -> list[int]:
        """Return the addresses of the tensors. It is called within swaps, so it leaves out what vLLM's parameters do at every call."""
        tensors = (module._parameters.get(path[0]) if len(path) == 1 else None for module, path in self._held)
        found = (tensor if tensor is not None else tensor_at(*held) for tensor, held in zip(tensors, self._held, strict=True))
        with torch._C.DisableTorchFunctionSubclass():
            return [0 if tensor is None else tensor.data_ptr() for tensor in found]

    def raw(self, module: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the raw parameters of a module as loaders leave them, before vLLM processes them. Padding is zero bits.

        Parameters
        ----------
        module
            The name of a module that has a rule (`modules`).
        read
            Returns a whole tensor of the chain, in checkpoint layout.
        """
        found: dict[str, torch.Tensor] = {}
        for name, copy in self._copies[module]:
            tensor, meta = read(name), copy.parameter.meta
            if copy.parameter.name not in found:
                blank = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=tensor.device)
                storage_units(blank, 8).zero_()
                found[copy.parameter.name] = blank
            flat = flat_storage(found[copy.parameter.name])
            copy.nest.view(flat).copy_(source_view(copy.nest, tensor.contiguous().view(-1)))
        return found

    def constant(self, module: str) -> frozenset[str]:
        """Return the paths of tensors of a module that do not depend on the chain. Their first values cannot be made again.

        Parameters
        ----------
        module
            The name of a module that has a rule (`modules`).
        """
        return self._constant.get(module, frozenset())

    def blocks(self) -> Mapping[str, Sequence[tuple[Nest, ...]]]:
        """Return the nests of each placement of each tensor. Their sources are the units that this worker holds."""
        return {name: [placement.nests for placement in layout.placements] for name, layout in self.tensors.items()}

    def gather(self, name: str, *, owned_only: bool = False) -> torch.Tensor:
        """Return a tensor in checkpoint layout, as new memory. Elements that this worker does not hold are zero bits.

        Raises `BaseMismatch` if the model has several copies of an element, for example one in its draft, and they differ.

        Parameters
        ----------
        name
            The tensor.
        owned_only
            True to leave out elements that another worker owns.
        """
        layout = self.tensors[name]
        owned = self.owned.get(name) if owned_only else None
        placements = [each for number, each in enumerate(layout.placements) if owned is None or number in owned]
        device = layout.placements[0].memory.device if layout.placements else torch.device("cpu")
        if copies_differ(layout.spec, layout.placements):
            raise BaseMismatch(f"the copies of tensor {name!r} in memory differ.")
        return gather(layout.spec, placements, device)

    def locate(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> list[Scatter]:
        """Return where changed elements of a tensor go. Elements that this worker does not hold are left out.

        Parameters
        ----------
        name
            The tensor.
        indices
            The positions of the changed elements in the flat tensor of the checkpoint.
        values
            Their new values, in the tensor's type or as integers of its width.
        """
        layout = self.tensors[name]
        found: list[Scatter] = []
        for placement in layout.placements:
            for start in range(0, indices.numel(), PIECE):
                device = placement.memory.device
                some = indices[start : start + PIECE].to(device=device, dtype=torch.int64)
                new = as_bits(values[start : start + PIECE].to(device), layout.spec.dtype)
                found += scatters(placement, layout.spec.dtype, some, new)
        return found


def summary(layout: ModelLayout) -> dict[str, int]:
    """Return the number of tensors of each kind."""
    counts: dict[str, int] = {}
    for tensor in layout.tensors.values():
        counts[tensor.kind] = counts.get(tensor.kind, 0) + 1
    return counts


def tensor_at(module: Any, path: Path) -> torch.Tensor | None:
    """Return the tensor that a path leads to. None if there is none."""
    value = at(module, path)
    return value if isinstance(value, torch.Tensor) else None

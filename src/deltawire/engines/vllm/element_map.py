"""Where a model keeps the elements of a checkpoint, so that changes can be written there without its loaders.

A loader copies parts of tensors (rows of a fused matrix, a shard, an expert) to parts of parameters: views of both, of the same shape.
Learnt once from these copies (read_back.py), they say of any element where in the model's memory it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .staging import Change

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor and where it is: two views of one shape, the strides of both in elements."""

    shape: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]
    memory: torch.Tensor
    """All that the target is a part of, flat, as integers."""

    @classmethod
    def of(cls, tensor: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Piece | None:
        """What a copy from `source`, a view of a checkpoint's `tensor`, to `target` tells; None if that is no matter of strides."""
        if source.shape != target.shape or source.dtype != target.dtype or not tensor.is_contiguous():
            return None
        if source.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or source.element_size() != tensor.element_size():
            return None
        sides = [(n, s, t) for n, s, t in zip(source.shape, source.stride(), target.stride(), strict=True) if n != 1]
        sides.sort(key=lambda side: -side[1])
        reach = 0
        for n, stride, _ in reversed(sides):
            if stride <= reach:  # an element is several times in the view, or the dimensions are interwoven
                return None
            reach += (n - 1) * stride
        storage = target.untyped_storage()
        memory = torch.empty(0, dtype=_SIGNED[target.element_size()], device=target.device)
        memory.set_(storage, 0, (storage.nbytes() // target.element_size(),))
        start = source.storage_offset() - tensor.storage_offset()
        shape, strides, target_strides = (tuple(side[i] for side in sides) for i in range(3))
        return cls(shape, start, strides, target.storage_offset(), target_strides, memory)

    def find(self, indices: NDArray[np.signedinteger[Any]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which of these elements of the tensor are in this part, and where those are in `memory`."""
        rest = indices.astype(np.int64) - self.source_start
        targets = np.full(rest.shape, self.target_start, np.int64)
        here = rest >= 0
        for n, stride, target_stride in zip(self.shape, self.source_strides, self.target_strides, strict=True):
            number = rest // stride
            here &= number < n
            rest -= number * stride
            targets += number * target_stride
        here &= rest == 0
        return here, targets[here]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Elements of one piece of memory, and what they become."""

    memory: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor

    def write(self) -> None:
        self.memory[self.indices] = self.values

    def is_written(self) -> torch.Tensor:
        """Whether all of them are there; a tensor, for nobody waits for the device here."""
        return (self.memory[self.indices] == self.values).all()


@dataclass(frozen=True, slots=True)
class MappedChanges:
    """Changes by where they go."""

    places: ElementMap
    scatters: Sequence[Scatter]
    tensors: frozenset[str]
    """Whose changes these are."""

    def write(self) -> None:
        """Write all of them. What fails half-way leaves a mix."""
        with torch.no_grad():
            for scatter in self.scatters:
                scatter.write()

    def are_written(self) -> bool:
        """Whether each of them is there, bit for bit."""
        return not self.scatters or bool(torch.stack([scatter.is_written() for scatter in self.scatters]).all())

    @property
    def elements(self) -> int:
        return sum(len(scatter.indices) for scatter in self.scatters)


class ElementMap:
    """Where a model keeps the tensors of a checkpoint; good for as long as its parameters stay where they are."""

    def __init__(self, model: Any, pieces: Mapping[str, Sequence[Piece]]) -> None:
        self._memory = _memory_of(model)
        self._pieces = pieces

    def hold(self, model: Any) -> bool:
        """Whether the model's tensors are where they were."""
        return _memory_of(model) == self._memory

    def place(self, changes: Mapping[str, Change]) -> MappedChanges:
        """Find the places of changes, and bring these to the device beside everything else that it does."""
        memory: dict[tuple[int, int], torch.Tensor] = {}
        found: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
        for name, change in changes.items():
            for piece in self._pieces.get(name, ()):
                here, targets = piece.find(change.indices)
                key = piece.memory.data_ptr(), piece.memory.element_size()
                memory[key] = piece.memory
                found.setdefault(key, []).append((targets, change.values[here]))
        scatters = [_scatter(memory[key], *map(np.concatenate, zip(*parts, strict=True))) for key, parts in found.items()]
        return MappedChanges(self, scatters, frozenset(changes.keys() & self._pieces.keys()))


def _scatter(memory: torch.Tensor, targets: NDArray[np.int64], values: NDArray[Any]) -> Scatter:
    signed = values.view(f"i{values.itemsize}")
    narrow = targets.astype(np.int32) if memory.numel() < 2**31 else targets
    return Scatter(memory, *_on_device(memory.device, torch.from_numpy(narrow), torch.from_numpy(signed)))


def _on_device(device: torch.device, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    side = _side_stream(device)
    with torch.cuda.stream(side):
        there = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    side.synchronize()
    return there


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all: memory that was had for a stream serves no other."""
    return torch.cuda.Stream(device)


def _memory_of(model: Any) -> dict[str, tuple[int, int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for name, tensor in named}

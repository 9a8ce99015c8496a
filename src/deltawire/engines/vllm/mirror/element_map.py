"""Where a model keeps the elements of a checkpoint, so that changes can be written there without its loaders.

A loader copies blocks of checkpoint tensors (rows of a fused matrix, a shard, an expert) to blocks of parameters. Source and target of such
a copy are views with the same shape. read_back.py records these copies once. From then on, the position of each element of the checkpoint
in the model's memory is known.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....tensors.torch_types import gpu_of
from .staging import Change

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """A block of a checkpoint tensor and its position in the model: two views with one shape. Strides and starts count elements."""

    shape: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]
    memory: torch.Tensor
    """The whole storage of the target, flat, as integers."""

    @classmethod
    def of(cls, tensor: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> MappedBlock | None:
        """Return the block that a copy from `source`, a view of the checkpoint's `tensor`, to `target` shows.

        Returns None if strides cannot describe the copy.
        """
        if source.shape != target.shape or source.dtype != target.dtype or not tensor.is_contiguous():
            return None
        if source.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or source.element_size() != tensor.element_size():
            return None
        sides = [(n, s, t) for n, s, t in zip(source.shape, source.stride(), target.stride(), strict=True) if n != 1]
        sides.sort(key=lambda side: -side[1])
        reach = 0
        for n, stride, _ in reversed(sides):
            if stride <= reach:  # the view has an element several times, or its dimensions overlap
                return None
            reach += (n - 1) * stride
        storage = target.untyped_storage()
        memory = torch.empty(0, dtype=_SIGNED[target.element_size()], device=target.device)
        memory.set_(storage, 0, (storage.nbytes() // target.element_size(),))
        start = source.storage_offset() - tensor.storage_offset()
        shape, strides, target_strides = (tuple(side[i] for side in sides) for i in range(3))
        return cls(shape, start, strides, target.storage_offset(), target_strides, memory)

    def find(self, indices: NDArray[np.signedinteger[Any]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which of these elements of the tensor are in this block, and their positions in `memory`."""
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
    """New values for some elements of one storage."""

    memory: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor

    def write(self) -> None:
        self.memory[self.indices] = self.values

    def is_written(self) -> torch.Tensor:
        """Return whether all of them are written, as a tensor, so that the caller need not wait for the device yet."""
        return (self.memory[self.indices] == self.values).all()


@dataclass(frozen=True, slots=True)
class MappedChanges:
    """Changes by their positions in the model's memory."""

    element_map: ElementMap
    scatters: Sequence[Scatter]
    tensors: frozenset[str]
    """The names of the checkpoint tensors that these changes belong to."""

    def write(self) -> None:
        """Write all of them. A failure half-way leaves a mix of two versions."""
        with torch.no_grad():
            for scatter in self.scatters:
                scatter.write()

    def are_written(self) -> bool:
        """Return whether each of them is written, bit for bit."""
        return not self.scatters or bool(torch.stack([scatter.is_written() for scatter in self.scatters]).all())

    @property
    def elements(self) -> int:
        return sum(len(scatter.indices) for scatter in self.scatters)


class ElementMap:
    """The positions of checkpoint tensors in a model. The map is valid as long as the model's parameters keep their memory.

    Parameters
    ----------
    model
        The model.
    blocks
        For each checkpoint tensor whose position is known, its blocks. A tensor that this worker does not hold has none.
    """

    def __init__(self, model: Any, blocks: Mapping[str, Sequence[MappedBlock]]) -> None:
        self._memory = _memory_of(model)
        self._blocks = blocks

    def is_valid_for(self, model: Any) -> bool:
        """Return whether the model's tensors still have the memory that they had."""
        return _memory_of(model) == self._memory

    def map_changes(self, changes: Mapping[str, Change]) -> MappedChanges:
        """Find the positions of changes, and copy them to the device while it generates."""
        memory: dict[tuple[int, int], torch.Tensor] = {}
        found: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
        for name, change in changes.items():
            for block in self._blocks.get(name, ()):
                here, targets = block.find(change.indices)
                key = block.memory.data_ptr(), block.memory.element_size()
                memory[key] = block.memory
                found.setdefault(key, []).append((targets, change.values[here]))
        scatters = [_scatter(memory[key], *map(np.concatenate, zip(*parts, strict=True))) for key, parts in found.items()]
        return MappedChanges(self, scatters, frozenset(changes.keys() & self._blocks.keys()))


def _scatter(memory: torch.Tensor, targets: NDArray[np.int64], values: NDArray[Any]) -> Scatter:
    signed = values.view(f"i{values.itemsize}")
    narrow = targets.astype(np.int32) if memory.numel() < 2**31 else targets
    return Scatter(memory, *_on_device_of(memory, torch.from_numpy(narrow), torch.from_numpy(signed)))


def _on_device_of(memory: torch.Tensor, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    gpu = gpu_of(memory)
    if gpu is None:
        return [tensor.to(memory.device) for tensor in tensors]
    side = _side_stream(gpu)
    with torch.cuda.stream(side):
        there = [tensor.pin_memory().to(gpu, non_blocking=True) for tensor in tensors]
    side.synchronize()
    return there


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """Return one stream for all changes, because torch does not reuse memory of one stream for another."""
    return torch.cuda.Stream(device)


def _memory_of(model: Any) -> dict[str, tuple[int, int]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for name, tensor in named}

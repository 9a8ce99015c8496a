"""Quantising rows of weights, for processes that do not hold whole weights: largest values of blocks, and codes for given scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..codec import default_codec
from ..codec.bits import DeviceBits
from ..dtypes import DType
from ..tensors.bits import Tensor
from ..tensors.state import thread_count
from . import reference
from .quantise import Quantiser
from .recipe import Recipe
from .scales import Grid, Scales

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows of a weight. There is at least one."""

    name: str
    """The name of the weight, for errors."""
    dtype: DType
    """The type of the weight."""
    rows: Tensor
    """Rows and columns: a NumPy array, or a torch tensor on a GPU. The elements of a row follow each other."""
    first_row: int
    """The number of the first of these rows in the weight."""

    @property
    def rows_on_gpu(self) -> torch.Tensor:
        """The rows of a shard that is on a GPU."""
        assert not isinstance(self.rows, np.ndarray)
        return self.rows

    def grid(self, recipe: Recipe) -> tuple[int, int]:
        """Return how many blocks have elements here, vertically and horizontally."""
        height = recipe.block.rows
        rows, columns = self.rows.shape
        return recipe.block.grid(rows + (self.first_row % height if height else 0), columns)

    def groups(self, recipe: Recipe, start: int, stop: int) -> RowShard:
        """Return some of the groups of a recipe whose blocks are groups in a row, counted over all these rows. Each becomes a row."""
        return RowShard(self.name, self.dtype, self.rows.reshape(-1, recipe.group_size or 1)[start:stop], 0)


class ShardQuantiser(Protocol):
    """Quantises shards: `HostShardQuantiser`, or `GpuQuantiser` for those on its GPU."""

    def maxima_of(self, recipe: Recipe, shards: Sequence[RowShard]) -> list[Grid]:
        """Return the largest magnitude of each block that has elements in each shard.

        Raise `NonFiniteWeights` if an element is NaN or infinite.
        """
        ...

    def codes_of(self, recipe: Recipe, shards: Sequence[RowShard], scales: Sequence[Scales]) -> list[Any]:
        """Return the codes of each shard, packed as they are published: rows and columns, on the device of the shard.

        `scales` are those of the blocks that have elements in the shard, in host memory, or on the device of the shard.
        """
        ...


class OnGpu(Protocol):
    """Works on shards on a GPU: chooses scales of groups there, and need not write codes. Only `GpuQuantiser` does this."""

    def unwritten_codes(self, recipe: Recipe, shards: Sequence[RowShard], scales: Sequence[Scales], itemsize: int) -> Sequence[DeviceBits]:
        """Return weights in place of the codes of shards. Kernels make them when they encode."""
        ...

    def largest_of(self, recipe: Recipe, shards: Sequence[RowShard]) -> NDArray[np.float32]:
        """Return the largest magnitude in each shard. Raise `NonFiniteWeights` if an element is NaN or infinite."""
        ...

    def choose_group_scales(self, recipe: Recipe, shards: Sequence[GroupShard]) -> None:
        """Choose the scales of all groups of shards, and write them. Raise `NonFiniteWeights` if an element is NaN or infinite."""
        ...

    def upload_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Return the bytes of arrays as tensors on the GPU. They are copied there together."""
        ...


@dataclass(frozen=True, slots=True)
class GroupShard:
    """Groups of a weight whose scales are chosen on a GPU."""

    shard: RowShard
    """The groups, each of them a row."""
    scales: torch.Tensor
    """Memory for their scales, on the GPU."""
    previous: torch.Tensor | None
    """The scales of these groups in the version before, on the GPU, if they may stay."""
    global_scale: float = 1.0
    """The global scale of nvfp4."""


class HostShardQuantiser:
    """Quantises shards in host memory, by native code or by the reference: as the codec in use.

    Parameters
    ----------
    threads
        The number of threads.
    """

    def __init__(self, threads: int | None) -> None:
        codec = default_codec()
        self._quantiser: Quantiser = reference
        if codec.name != "reference":
            from .native import NativeQuantiser

            self._quantiser = NativeQuantiser(thread_count(threads), codec.name)

    def maxima_of(self, recipe: Recipe, shards: Sequence[RowShard]) -> list[Grid]:
        return [self._quantiser.block_maxima(recipe, shard.rows, shard.first_row, shard.name) for shard in shards]

    def codes_of(self, recipe: Recipe, shards: Sequence[RowShard], scales: Sequence[Scales]) -> list[Any]:
        return [
            self._quantiser.encode_codes(recipe, shard.rows, scale, shard.first_row) for shard, scale in zip(shards, scales, strict=True)
        ]

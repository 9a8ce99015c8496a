"""Scales of groups in a row (nvfp4, mxfp4, int4) that are chosen on the GPU where the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ...quantise import QuantisedLayout, Recipe
from ...quantise.row_shards import GroupShard, OnGpu, RowShard, ShardQuantiser
from ...tensors import torch_types
from ...tensors.bits import TensorPart
from .division import elements_of
from .ranges import EMPTY, ElementRange
from .shares import Share

if TYPE_CHECKING:
    import torch


class GpuShardQuantiser(ShardQuantiser, OnGpu, Protocol):
    """Quantises shards on a GPU, and chooses their scales there: `GpuQuantiser`."""


def chooses_group_scales(quantiser: ShardQuantiser) -> TypeGuard[GpuShardQuantiser]:
    """Tell whether a quantiser chooses scales of groups where the rows are, on a GPU. The one for host memory does not."""
    return hasattr(quantiser, "choose_group_scales")


class GroupScales:
    """The scales of one weight: of the rows that a process holds, and those that it publishes. They are on the GPU of the rows.

    Nearly all of them are both. The process chooses these on the GPU. The others are at the edges: the scales of its rows that other
    processes publish, and those of rows of other processes that it publishes. They come from the host.

    Parameters
    ----------
    layout
        What is published.
    share
        The share of the process in the weight. It holds at least one row.
    rank
        The number of the process.
    shard
        Its rows.
    """

    def __init__(self, layout: QuantisedLayout, share: Share, rank: int, shard: RowShard) -> None:
        self._output = layout.outputs[share.weight.outputs["scale"]]
        self._group = layout.recipe.group_size or 1
        self._columns = share.weight.columns
        self.device = shard.rows.device
        self._first_row = share.rows[0]
        self.grid = share.grid
        """The scales of all rows."""
        self.own: ElementRange = next((where for asked, where in share.asks if asked == rank), EMPTY)
        """The scales that the process both needs and publishes."""
        self.edges = [(asked, where) for asked, where in share.asks if asked != rank]
        """The scales of its rows that other processes publish."""
        every = [share.grid, *(where for _, where in share.serves)]
        self._start, self._stop = min(first for first, _ in every), max(last for _, last in every)
        self._from_host: list[tuple[ElementRange, NDArray[Any]]] = []
        self._scales: torch.Tensor | None = None
        self.edge_maxima: dict[int, NDArray[np.float32]] = {}
        """The largest magnitudes of the groups at the edges, by the process that publishes their scales."""
        self.largest = np.float32(0)
        """The largest magnitude of all rows, for recipes whose weights share a scale."""

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return some scales, by their positions in the scale tensor."""
        if self._scales is None:
            import torch

            self._scales = torch.empty(self._stop - self._start, dtype=torch_types.torch_dtype(self._output.dtype), device=self.device)
        return self._scales[start - self._start : stop - self._start]

    def of_rows(self, rows: ElementRange) -> torch.Tensor:
        """Return the scales of some rows, which the process holds: one row for each."""
        width = self._columns // self._group
        first = self.grid[0] + (rows[0] - self._first_row) * width
        return self.part(first, first + (rows[1] - rows[0]) * width).view(-1, width)

    def add_from_host(self, ranges: Sequence[tuple[int, ElementRange]], scales: NDArray[Any]) -> None:
        """Take scales that were chosen on a host. `scales` begin with the first of the ranges."""
        begin = min(first for _, (first, _) in ranges)
        self._from_host += [((first, last), scales[first - begin : last - begin]) for _, (first, last) in ranges]

    def take_from_host(self) -> list[tuple[ElementRange, NDArray[Any]]]:
        """Return what `add_from_host` got, and forget it."""
        taken, self._from_host = self._from_host, []
        return taken


def copy_from_hosts(quantiser: GpuShardQuantiser, weights: Sequence[GroupScales]) -> None:
    """Copy scales that were chosen on hosts to the GPU of these weights, all together."""
    pieces = [(weight, where, scales) for weight in weights for where, scales in weight.take_from_host()]
    for (weight, (start, stop), _), there in zip(pieces, quantiser.upload_all([scales for _, _, scales in pieces]), strict=True):
        goal = weight.part(start, stop)
        goal.copy_(there.view(goal.dtype))


def find_group_maxima(recipe: Recipe, quantiser: GpuShardQuantiser, weights: Sequence[GroupScales], shards: Sequence[RowShard]) -> None:
    """Find what other processes need to choose scales: the largest magnitudes at the edges, and those of whole shards.

    Raises `NonFiniteWeights` if an element that is looked at is NaN or infinite.
    """
    asked = [(weight, shard, edge) for weight, shard in zip(weights, shards, strict=True) for edge in weight.edges]
    if asked:
        groups = [shard.groups(recipe, start - weight.grid[0], stop - weight.grid[0]) for weight, shard, (_, (start, stop)) in asked]
        for (weight, _, (rank, _)), grid in zip(asked, quantiser.maxima_of(recipe, groups), strict=True):
            weight.edge_maxima[rank] = grid.reshape(-1)
    if recipe.shares_scales:
        for weight, largest in zip(weights, quantiser.largest_of(recipe, shards), strict=True):
            weight.largest = largest


def choose_own_groups(
    recipe: Recipe,
    quantiser: GpuShardQuantiser,
    weights: Sequence[GroupScales],
    shards: Sequence[RowShard],
    previous: Sequence[TensorPart | None],
    numbers: Sequence[NDArray[Any] | None],
) -> None:
    """Choose the scales that a process both needs and publishes. Raises `NonFiniteWeights` if a weight is NaN or infinite.

    `previous` are the scales of the version before that may stay, and `numbers` the global scales of nvfp4.
    """
    before: list[Any] = [
        None if part is None or weight.own == EMPTY else elements_of(part, weight.own)
        for weight, part in zip(weights, previous, strict=True)
    ]
    on_host = [number for number, each in enumerate(before) if isinstance(each, np.ndarray)]
    for number, there in zip(on_host, quantiser.upload_all([before[number] for number in on_host]), strict=True):
        before[number] = there
    jobs = []
    for weight, shard, old, global_scale in zip(weights, shards, before, numbers, strict=True):
        start, stop = weight.own
        if start < stop:
            groups = shard.groups(recipe, start - weight.grid[0], stop - weight.grid[0])
            jobs.append(GroupShard(groups, weight.part(start, stop), old, 1.0 if global_scale is None else float(global_scale[0])))
    if jobs:
        quantiser.choose_group_scales(recipe, jobs)

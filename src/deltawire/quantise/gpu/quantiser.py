"""Quantising weights on a GPU: a table of addresses goes to the device, and a few kernels do the rest, without waiting for the host."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...codec.bits import QuantisedBits, ScalesOnDevice
from ...codec.gpu import device as devices
from ...codec.gpu.sources import number_source
from ...errors import NonFiniteWeights
from ...tensors.torch_types import torch_dtype
from ..recipe import Recipe
from ..reference import nonfinite_weight
from ..row_shards import GroupShard, RowShard
from ..scales import Grid, Scales
from ..weight_table import WeightTable, kind_number, source_number

_WEIGHT: Final = np.dtype(
    [
        *(
            (name, "u8")
            for name in ("data", "stride", "codes", "scales", "global_scale", "previous", "previous_global", "maxima", "changed", "unit0")
        ),
        *((name, "u4") for name in ("rows", "columns", "source", "group", "first_row", "aligned")),
    ]
)
"""See `Weight` in quantise.cuh."""

_THREADS, _SIDE, _UNIT = 256, 128, 1 << 14
_QUANTISE, _MAXIMA, _CODES, _SCALES, _TRY_SCALES = range(5)
_ALIGNMENT: Final = 16
_CODE_TYPES: Final = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int4": torch.int32}
_NONE: Final = 0xFFFFFFFF


class _Job(ctypes.Structure):
    """See `Job` in quantise.cuh."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("count", "kind", "group", "mode")),
        *((name, ctypes.c_void_p) for name in ("bad", "shared", "fresh", "largest", "disagree")),
    ]


@functools.cache
def _source() -> str:
    return number_source() + (resources.files(__package__) / "kernels" / "quantise.cuh").read_text()


class PendingQuantisation:
    """Kernels that are running. Code that needs the outputs on the same stream need not wait for them."""

    def __init__(
        self,
        bad: torch.Tensor,
        held: tuple[torch.Tensor, ...],
        changed: torch.Tensor | None = None,
        changed_ends: NDArray[np.int64] | None = None,
        fresh: torch.Tensor | None = None,
    ) -> None:
        self._bad = bad
        self._held = held
        self.changed = changed
        """`ScalesOnDevice.changed` of all weights, one after the other; None if scales are written."""
        self.changed_ends = changed_ends
        """Where the numbers of each weight end in it."""
        self.fresh = fresh
        """For each weight, whether its previous scales do not count; None if they count."""

    def first_nonfinite(self) -> int | None:
        """Wait, and return the number of a weight that has an element that is NaN or infinite, or None."""
        found = int(self._bad.cpu().numpy().view(np.uint32)[0])
        self._held = ()
        return None if found == _NONE else found


class GpuQuantiser:
    """Quantises weights on one GPU, on the calling thread's current stream.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = devices.gpu_at(device)
        self._kernels = self._gpu.other_kernels(_source())

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None:
        """Quantise many weights: choose their scales, and write scales and codes.

        Return the number of a weight that has an element that is NaN or infinite, or None. Then the outputs are undefined.

        Parameters
        ----------
        recipe
            The recipe. The caller does not pass previous scales if it is not sticky.
        weights
            The weights. All addresses are those of tensors on the device. The caller keeps them alive, and has checked all sizes.
        """
        return self.start(recipe, weights).first_nonfinite()

    def start(self, recipe: Recipe, weights: WeightTable, *, makes_codes: bool = True, makes_scales: bool = True) -> PendingQuantisation:
        """Start what `quantise_weights` does.

        Parameters
        ----------
        recipe, weights
            As for `quantise_weights`.
        makes_codes
            Whether codes are written. If not, `QuantisedBits` can take their place.
        makes_scales
            Whether scales are written. They need not be if no codes are written, they have one byte each, and rows follow each other.
        """
        rows = _rows(recipe, weights)
        mode = _QUANTISE if makes_codes else _SCALES
        changed = changed_ends = None
        if not makes_scales:
            tiles = -(-weights.rows * weights.columns // _UNIT)
            changed_ends = np.cumsum(tiles)
            changed = self._gpu.empty(int(changed_ends[-1]), torch.int16)
            rows["changed"] = changed.data_ptr() + 2 * (changed_ends - tiles).astype(np.uint64)
        held: list[torch.Tensor] = []
        shares = recipe.shares_scales
        count = len(rows)
        bad = self._gpu.empty(1, torch.int32)
        bad.fill_(-1)
        shared = self._gpu.empty(count if shares else 1, torch.float32)
        fresh = self._gpu.empty(count if shares else 1, torch.int32)
        groups = self._gpu.zeros(2 * count if shares else 2, torch.int32)  # the largest value of each group, and whether it disagrees
        addresses = [bad.data_ptr(), shared.data_ptr(), fresh.data_ptr(), groups.data_ptr(), groups.data_ptr() + 4 * count]

        def job(units: NDArray[np.int64], mode: int = mode) -> tuple[_Job, int]:
            ends = np.cumsum(units)
            rows["unit0"] = ends - units
            table = self._gpu.upload(rows)
            held.append(table)
            return _Job(table.data_ptr(), count, kind_number(recipe), recipe.group_size or 0, mode, *addresses), int(ends[-1])

        units = _units(recipe, weights.rows, weights.columns)

        if shares:
            _, first = np.unique(weights.groups, return_index=True)
            firsts = np.zeros(count, np.uint32)
            firsts[weights.groups[first]] = first
            first_of_group = self._gpu.upload(firsts)
            held.append(first_of_group)
            # Scales of groups are right at once if the scale that weights share stays, and nearly always it does.
            tries = recipe.group_size is not None and not makes_codes
            if tries:
                kernel, (described, blocks) = "choose_group_scales", job(units, _TRY_SCALES)
            else:
                kernel, (described, blocks) = "find_largest", job(-(-weights.rows // np.maximum(_UNIT // weights.columns, 1)))
            small = -(-count // _THREADS)
            self._kernels.launch("compare_shared", small, _THREADS, [described, ctypes.c_void_p(first_of_group.data_ptr())])
            self._launch(kernel, blocks, described)
            self._launch("choose_shared_scales", small, described)
        if makes_codes or recipe.name != "fp8-tensor":
            described, blocks = job(units)
            self._launch(_kernel(recipe, makes_codes), blocks, described)
        return PendingQuantisation(bad, (*held, shared, fresh, groups), changed, changed_ends, fresh if shares else None)

    def maxima_of(self, recipe: Recipe, shards: Sequence[RowShard]) -> list[Grid]:
        """Return the largest magnitude of each block of shards on this GPU (`ShardQuantiser`). The results are in host memory.

        Parameters
        ----------
        recipe
            The recipe.
        shards
            The shards.
        """
        grids = [shard.grid(recipe) for shard in shards]
        ends = np.cumsum([height * width for height, width in grids])
        found = self._gpu.zeros(int(ends[-1]) if shards else 0, torch.float32)
        table = _shard_table(shards)
        table["maxima"] = found.data_ptr() + 4 * np.concatenate([[0], ends])[:-1]
        held = self._do(recipe, table, _MAXIMA)
        each = np.split(found.cpu().numpy(), ends[:-1])
        del held
        for shard, largest in zip(shards, each, strict=True):
            if not np.isfinite(largest).all():
                raise _nonfinite(shard)
        return [largest.reshape(grid) for largest, grid in zip(each, grids, strict=True)]

    def codes_of(self, recipe: Recipe, shards: Sequence[RowShard], scales: Sequence[Scales]) -> list[torch.Tensor]:
        """Return the codes of shards on this GPU, for given scales (`ShardQuantiser`). The kernels may still be running.

        Parameters
        ----------
        recipe
            The recipe.
        shards
            The shards.
        scales
            The scales of the blocks that have elements in each shard, in host memory or on this GPU.
        """
        table = _shard_table(shards)
        held: list[torch.Tensor] = []
        each = self._scales_here(scales)
        for column, tensors in (("scales", [scale for scale, _ in each]), ("global_scale", [number for _, number in each])):
            table[column] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            held += [tensor for tensor in tensors if tensor is not None]
        sizes = [shard.rows_on_gpu.numel() // (1 if recipe.element == "e4m3" else 2) for shard in shards]
        codes = [self._gpu.empty(size, torch.uint8) for size in sizes]
        table["codes"] = [tensor.data_ptr() for tensor in codes]
        table["aligned"] &= table["codes"] % 8 == 0
        held += self._do(recipe, table, _CODES)
        return [tensor.view(_CODE_TYPES[recipe.element]).view(len(shard.rows), -1) for tensor, shard in zip(codes, shards, strict=True)]

    def unwritten_codes(self, recipe: Recipe, shards: Sequence[RowShard], scales: Sequence[Scales], itemsize: int) -> list[QuantisedBits]:
        """Return weights in place of the codes of shards on this GPU, for given scales. Kernels make them when they encode.

        Parameters
        ----------
        recipe, scales
            As for `codes_of`.
        shards
            The shards. `rows_can_be_quantised_as_read` is true for each.
        itemsize
            The bytes of an element of the codes, as they are published.
        """
        found = []
        for shard, (scale, global_scale) in zip(shards, self._scales_here(scales), strict=True):
            weights = shard.rows.view(torch_dtype(shard.dtype, bits=True))
            size = weights.numel() // (1 if recipe.element == "e4m3" else 2) // itemsize
            facts = kind_number(recipe), source_number(shard.dtype), recipe.group_size or 0
            found.append(QuantisedBits(weights, (size,), itemsize, facts, ScalesOnDevice(scale, global_scale)))
        return found

    def _scales_here(self, scales: Sequence[Scales]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return scales, and global scales, on this GPU. Those in host memory are copied together."""
        arrays: list[Any] = [array for each in scales for array in (each.scale, each.global_scale)]
        uploaded = iter(self.upload_all([array for array in arrays if isinstance(array, np.ndarray)]))
        there = [next(uploaded) if isinstance(array, np.ndarray) else array for array in arrays]
        return list(zip(there[::2], there[1::2], strict=True))

    def largest_of(self, recipe: Recipe, shards: Sequence[RowShard]) -> NDArray[np.float32]:
        """Return the largest magnitude in each shard on this GPU (`OnGpu`).

        Parameters
        ----------
        recipe
            The recipe.
        shards
            The shards.
        """
        table = _shard_table(shards)
        table["group"] = np.arange(len(shards))
        rows, columns = table["rows"].astype(np.int64), table["columns"].astype(np.int64)
        found = self._gpu.zeros(len(shards), torch.int32)
        held = self._do(recipe, table, _MAXIMA, -(-rows // np.maximum(_UNIT // columns, 1)), "find_largest", largest=found)
        largest: NDArray[np.float32] = found.cpu().numpy().view(np.float32)
        del held
        for shard, value in zip(shards, largest.tolist(), strict=True):
            if not math.isfinite(value):
                raise _nonfinite(shard)
        return largest

    def choose_group_scales(self, recipe: Recipe, shards: Sequence[GroupShard]) -> None:
        """Choose the scales of all groups of shards on this GPU, and write them (`OnGpu`).

        Parameters
        ----------
        recipe
            The recipe.
        shards
            The groups.
        """
        table = _shard_table([each.shard for each in shards])
        table["scales"] = [each.scales.data_ptr() for each in shards]
        table["previous"] = [0 if each.previous is None else each.previous.data_ptr() for each in shards]
        shared = self._gpu.upload(np.array([each.global_scale for each in shards], np.float32))
        fresh = self._gpu.upload(np.array([each.previous is None for each in shards], np.uint32))
        held = [shared, fresh, *self._do(recipe, table, _SCALES, shared=shared, fresh=fresh)]
        bad = int(held[2].cpu().numpy().view(np.uint32)[0])
        if bad != _NONE:
            raise _nonfinite(shards[bad].shard)

    def upload_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Return the bytes of arrays as tensors on the GPU. They are copied there together.

        Parameters
        ----------
        arrays
            The arrays.
        """
        pieces: list[NDArray[np.uint8]] = []
        bounds: list[tuple[int, int]] = []
        size = 0
        for array in arrays:
            piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            padding = -piece.size % _ALIGNMENT
            pieces += [piece, np.zeros(padding, np.uint8)]
            bounds.append((size, size + piece.size))
            size += piece.size + padding
        there = self._gpu.upload(np.concatenate(pieces)) if pieces else None
        return [] if there is None else [there[start:stop] for start, stop in bounds]

    def _do(
        self,
        recipe: Recipe,
        table: NDArray[Any],
        mode: int,
        units: NDArray[np.int64] | None = None,
        kernel: str | None = None,
        *,
        shared: torch.Tensor | None = None,
        fresh: torch.Tensor | None = None,
        largest: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Start a kernel that works on shards: by default the one that quantises them. Return memory that it uses.

        The first tensor of this memory is the number of a shard with an element that is NaN or infinite, if the kernel looks for them.
        """
        if units is None:
            units = _units(recipe, table["rows"].astype(np.int64), table["columns"].astype(np.int64), table["first_row"])
        bad = self._gpu.empty(1, torch.int32)
        bad.fill_(-1)
        ends = np.cumsum(units)
        table["unit0"] = ends - units
        there = self._gpu.upload(table)
        if len(table):
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (bad, shared, fresh, largest, None)]
            job = _Job(there.data_ptr(), len(table), kind_number(recipe), recipe.group_size or 0, mode, *addresses)
            self._launch(kernel or _kernel(recipe, makes_codes=True), int(ends[-1]), job)
        return [bad, there]

    def _launch(self, name: str, blocks: int, job: _Job) -> None:
        self._kernels.launch(name, blocks, _THREADS, [job])


def _rows(recipe: Recipe, weights: WeightTable) -> NDArray[Any]:
    rows = np.zeros(weights.data.size, _WEIGHT)
    rows["data"], rows["stride"], rows["codes"], rows["scales"] = (
        weights.data,
        weights.strides.view(np.uint64),
        weights.codes,
        weights.scales,
    )
    rows["global_scale"], rows["previous"], rows["previous_global"] = weights.globals, weights.previous, weights.previous_globals
    rows["rows"], rows["columns"], rows["source"], rows["group"] = weights.rows, weights.columns, weights.sources, weights.groups
    per_vector = np.where(weights.sources == 0, 4, 8)
    reads = (weights.data % 16 == 0) & (weights.strides % 16 == 0) & (weights.columns % per_vector == 0)
    rows["aligned"] = reads & (weights.codes % 8 == 0)
    return rows


def _nonfinite(shard: RowShard) -> NonFiniteWeights:
    numbers = shard.rows.view(torch_dtype(shard.dtype))
    return nonfinite_weight(shard.name, int((~numbers.isfinite()).sum()))


def _kernel(recipe: Recipe, makes_codes: bool) -> str:
    if recipe.group_size:
        return "quantise_groups" if makes_codes else "choose_group_scales"
    if recipe.name == "fp8-block":
        return "quantise_blocks" if makes_codes else "choose_block_scales"
    return "quantise_rows"


def _units(recipe: Recipe, rows: NDArray[np.int64], columns: NDArray[np.int64], first_row: NDArray[Any] | int = 0) -> NDArray[np.int64]:
    """Return how many thread blocks each weight needs. `first_row` is the number of its first row in the first row of blocks."""
    if recipe.group_size:
        return -(-rows * columns // _UNIT)
    return -(-(rows + first_row) // _SIDE) * -(-columns // _SIDE) if recipe.name == "fp8-block" else rows


def _shard_table(shards: Sequence[RowShard]) -> NDArray[Any]:
    """Return where the rows of shards are, as kernels read it."""
    found = np.zeros(len(shards), _WEIGHT)
    rows = [shard.rows_on_gpu for shard in shards]
    found["data"] = [each.data_ptr() for each in rows]
    found["stride"] = strides = np.array([each.stride(0) * each.element_size() for each in rows], np.int64)
    found["rows"], found["columns"] = [each.shape[0] for each in rows], [each.shape[1] for each in rows]
    found["source"] = [source_number(shard.dtype) for shard in shards]
    found["first_row"] = [shard.first_row % _SIDE for shard in shards]
    per_vector = np.where(found["source"] == 0, 4, 8)
    found["aligned"] = (found["data"] % _ALIGNMENT == 0) & (strides % _ALIGNMENT == 0) & (found["columns"] % per_vector == 0)
    return found

"""The scales of one version, on which the processes agree.

Each process finds the largest values of the blocks that it has rows of, where the rows are, and sends them to the process that publishes
the scales of these blocks. That one has the scales of the version before, chooses the scales, and sends them back.

Blocks that are groups in a row (nvfp4, mxfp4, int4) are many, and a process publishes nearly all scales of its own rows. If the rows are on
a GPU, it chooses these scales there; only those at the edges are exchanged (`GroupScales`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...quantise import QuantisedLayout
from ...quantise.exact_arithmetic import exactly
from ...quantise.layout import Output, QuantisedWeight
from ...quantise.row_shards import HostShardQuantiser, RowShard, ShardQuantiser
from ...quantise.scales import Grid, Scales, choose_scales
from ...tensors import torch_types
from ...tensors.bits import TensorPart
from ..upload.segments import SEGMENT_BYTES
from .division import Parts, Reader, bytes_of, elements_of
from .group_scales import GroupScales, choose_own_groups, chooses_group_scales, copy_from_hosts, find_group_maxima
from .ranges import ElementRange
from .ranks import Ranks, together
from .shares import Share

if TYPE_CHECKING:
    import torch


class ShardQuantisers:
    """Quantises shards on the devices that they are on.

    Parameters
    ----------
    threads
        The number of threads for shards in host memory.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._known: dict[torch.device | None, ShardQuantiser] = {}

    def by_device(self, shards: Sequence[RowShard]) -> Iterator[tuple[ShardQuantiser, list[int]]]:
        """Yield what quantises shards, with the numbers of these shards."""
        numbers: dict[torch.device | None, list[int]] = {}
        for number, shard in enumerate(shards):
            numbers.setdefault(torch_types.gpu_holding(shard.rows), []).append(number)
        for device, own in numbers.items():
            yield self.on(device), own

    def on(self, device: torch.device | None) -> ShardQuantiser:
        """Return what quantises shards on a device; None is the host."""
        if device not in self._known:
            self._known[device] = self._quantiser(device)
        return self._known[device]

    def _quantiser(self, device: torch.device | None) -> ShardQuantiser:
        if device is None:
            return HostShardQuantiser(self._threads)
        from ...quantise.gpu.quantiser import GpuQuantiser

        return GpuQuantiser(device)


def agree_on_scales(
    ranks: Ranks,
    layout: QuantisedLayout,
    shares: Sequence[Share],
    held: Mapping[str, TensorPart],
    previous: Parts | None,
    quantisers: ShardQuantisers,
) -> AgreedScales:
    """Choose the scales of a version together. Raises `NonFiniteWeights` in all processes if a weight is NaN or infinite.

    Parameters
    ----------
    ranks
        The processes.
    layout
        What is published.
    shares
        What this process does for each weight.
    held
        The weights that this process holds.
    previous
        The parts of the version before that this process published. Their scales may stay.
    quantisers
        What finds the largest values.
    """
    found = AgreedScales(layout, shares, previous, ranks.rank)
    together(ranks, lambda: found.find_maxima(held, quantisers))
    if layout.recipe.shares_scales:
        largest = ranks.maximum(found.largest_of_groups())
        found.share(largest, ranks.broadcast(found.previous_numbers() if ranks.rank == 0 else b""))
    if layout.recipe.name != "fp8-tensor":
        arrived = ranks.deliver(found.maxima_for(ranks.size))
        scales: list[bytes] = []
        together(ranks, lambda: scales.extend(found.choose(arrived, ranks.size, held, quantisers)))
        delivered = ranks.deliver(scales)
        together(ranks, lambda: found.take_scales(delivered, quantisers))
    found.forget_maxima()
    return found


class AgreedScales:
    """The scales of the rows that one process holds, and those that it publishes. `agree_on_scales` makes it."""

    def __init__(self, layout: QuantisedLayout, shares: Sequence[Share], previous: Parts | None, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._recipe = layout.recipe
        self._shares = shares
        self._previous = previous if layout.recipe.sticky else None
        self._maxima: dict[str, Grid] = {}
        self._groups: dict[str, GroupScales] = {}
        """The scales of weights that are chosen on a GPU."""
        self._scales: dict[str, NDArray[Any]] = {}
        """The scales of the rows of each weight that this process holds."""
        self._published: dict[str, NDArray[Any]] = {}
        """The scales that this process publishes, by weight."""
        self._largest: dict[str, float] = {}
        """The largest magnitude in each group of weights that share a scale."""
        self._old_numbers: dict[str, NDArray[Any]] = {}
        """The previous scales that are one number per weight, where all weights of the group have the same."""
        self._numbers: dict[str, NDArray[Any]] = {}

    def scales_of(self, share: Share, rows: ElementRange) -> Scales:
        """Return the scales of the blocks that some rows of this process lie in."""
        weight = share.weight
        numbers = self._numbers.get(weight.module)
        if weight.module in self._groups:
            return Scales(self._groups[weight.module].of_rows(rows), numbers)
        if weight.module not in self._scales:
            assert numbers is not None
            return Scales(numbers)
        first = self._recipe.block.rows_of_grid(*share.rows)[0]
        start, stop = self._recipe.block.rows_of_grid(*rows)
        return Scales(self._scales[weight.module][start - first : stop - first], numbers)

    def scale_part(self, output: Output, where: ElementRange) -> TensorPart:
        """Return the part of a scale tensor, or of another small tensor, that this process publishes."""
        weight = output.weight
        assert weight is not None
        start, stop = where
        elements: NDArray[Any] = np.empty(0, output.dtype.numpy)
        if start < stop:
            if output.role == "shape":
                elements = np.array([weight.rows, weight.columns], np.int64)
            elif output.role == "global_scale" or self._recipe.block.rows is None:
                elements = self._numbers[weight.module].reshape(-1)
            elif weight.module in self._groups:
                return TensorPart(self._groups[weight.module].part(start, stop), output.shape, start)
            else:
                elements = self._published[weight.module]
            assert elements.size == stop - start
        return TensorPart(elements, output.shape, start)

    def was_chosen_on_gpu(self, output: Output) -> bool:
        """Tell whether a tensor is the scales of a weight that were chosen on its GPU."""
        return output.role == "scale" and output.weight is not None and output.weight.module in self._groups

    # The steps of `agree_on_scales`

    def find_maxima(self, held: Mapping[str, TensorPart], quantisers: ShardQuantisers) -> None:
        """Find the largest values of the blocks. Raises `NonFiniteWeights`."""
        for shares in _batches([share for share in self._shares if share.rows[0] < share.rows[1]]):
            shards = [share.shard(held) for share in shares]
            for quantiser, numbers in quantisers.by_device(shards):
                own = [shards[number] for number in numbers]
                if chooses_group_scales(quantiser) and self._recipe.group_size:
                    made = [
                        GroupScales(self._layout, shares[number], self._rank, shard) for number, shard in zip(numbers, own, strict=True)
                    ]
                    find_group_maxima(self._recipe, quantiser, made, own)
                    self._groups |= {shares[number].weight.module: each for number, each in zip(numbers, made, strict=True)}
                    continue
                found = quantiser.maxima_of(self._recipe, own)
                self._maxima |= {shares[number].weight.module: grid for number, grid in zip(numbers, found, strict=True)}

    def forget_maxima(self) -> None:
        """Free what is not needed once the scales are chosen."""
        self._maxima.clear()

    @exactly
    def largest_of_groups(self) -> NDArray[np.int32]:
        """Return the largest magnitude that this process has in each group: the bits of float32, which have the same order."""
        found = dict.fromkeys(self._layout.groups, np.float32(0))
        for share in self._shares:
            module = share.weight.module
            if module in self._groups:
                found[share.weight.group] = max(found[share.weight.group], self._groups[module].largest)
            elif module in self._maxima:
                found[share.weight.group] = max(found[share.weight.group], self._maxima[module].max())
        return np.array(list(found.values()), np.float32).view(np.int32)

    def previous_numbers(self) -> bytes:
        """Return the previous scales that are one number per weight. Call it in the first process, which publishes them."""
        if self._previous is None:
            return b""
        before = self._previous
        return b"".join(_host_bytes(before[self._number_output(share.weight).name].elements for share in self._shares))

    @exactly
    def share(self, largest: NDArray[np.int32], numbers: bytes) -> None:
        """Take what all processes share: the largest magnitude of each group, and the previous scales that are one number per weight."""
        self._largest = dict(zip(self._layout.groups, largest.view(np.float32).tolist(), strict=True))
        by_group: dict[str, list[NDArray[Any]]] = {}
        at = 0
        for share in self._shares if numbers else ():
            output = self._number_output(share.weight)
            number = np.frombuffer(numbers, output.dtype.numpy, 1, at)
            at += output.dtype.itemsize
            by_group.setdefault(share.weight.group, []).append(number)
            self._old_numbers[share.weight.module] = number
        for share in self._shares:
            same = by_group.get(share.weight.group, [])
            if any(each.dtype != same[0].dtype or each.tobytes() != same[0].tobytes() for each in same):
                self._old_numbers.pop(share.weight.module, None)
        for share in self._shares:
            self._numbers[share.weight.module] = self._number(share)

    def maxima_for(self, size: int) -> list[bytes]:
        """Return the largest values of blocks for the processes that publish their scales."""
        pieces: list[list[bytes]] = [[] for _ in range(size)]
        for share in self._shares:
            if share.weight.module in self._groups:
                for rank, maxima in self._groups[share.weight.module].edge_maxima.items():
                    pieces[rank].append(maxima.tobytes())
                continue
            for rank, (start, stop) in share.asks:
                flat = self._maxima[share.weight.module].reshape(-1)
                pieces[rank].append(flat[start - share.grid[0] : stop - share.grid[0]].tobytes())
        return [b"".join(each) for each in pieces]

    def choose(self, arrived: list[memoryview], size: int, held: Mapping[str, TensorPart], quantisers: ShardQuantisers) -> list[bytes]:
        """Choose the scales that this process publishes. Returns them for the processes that hold their rows.

        Raises `NonFiniteWeights` if scales are chosen on a GPU, and a weight is NaN or infinite there.
        """
        self._choose_on_gpus(held, quantisers)
        readers = [Reader(piece) for piece in arrived]
        pieces: list[list[bytes]] = [[] for _ in range(size)]
        serving = [(share, ranges) for share in self._shares if (ranges := self._served_on_host(share))]
        for (share, ranges), before in zip(serving, self._previous_scales(serving), strict=True):
            start, stop = _bounds(ranges)
            maxima = np.zeros(stop - start, np.int32)  # the bits of float32
            for rank, (first, last) in ranges:
                own = maxima[first - start : last - start]
                np.maximum(own, readers[rank].take(own.nbytes).view(np.int32), out=own)
            scale = self._chosen(share.weight, maxima.view(np.float32), before).scale
            if share.weight.module in self._groups:
                self._groups[share.weight.module].add_from_host(ranges, scale)
            else:
                self._published[share.weight.module] = scale
            for rank, (first, last) in ranges:
                pieces[rank].append(scale[first - start : last - start].tobytes())
        return [b"".join(each) for each in pieces]

    def _choose_on_gpus(self, held: Mapping[str, TensorPart], quantisers: ShardQuantisers) -> None:
        """Choose the scales of groups that this process both holds and publishes."""
        for shares in _batches([share for share in self._shares if share.weight.module in self._groups]):
            shards = [share.shard(held) for share in shares]
            for quantiser, numbers in quantisers.by_device(shards):
                assert chooses_group_scales(quantiser)
                choose_own_groups(
                    self._recipe,
                    quantiser,
                    [self._groups[shares[number].weight.module] for number in numbers],
                    [shards[number] for number in numbers],
                    [self._previous_of(shares[number].weight) for number in numbers],
                    [self._numbers.get(shares[number].weight.module) for number in numbers],
                )

    def _previous_of(self, weight: QuantisedWeight) -> TensorPart | None:
        """Return the previous scales that may stay, which this process published."""
        if self._previous is None:
            return None
        if self._recipe.has_global_scale:
            old = self._old_numbers.get(weight.module)
            if old is None or old.tobytes() != self._numbers[weight.module].tobytes():
                return None  # all are chosen anew if the global scale does not stay
        return self._previous[weight.outputs["scale"]]

    def _served_on_host(self, share: Share) -> tuple[tuple[int, ElementRange], ...]:
        """Return the processes for whose rows this process chooses scales on the host, and which scales."""
        was_chosen_on_gpu = share.weight.module in self._groups
        return tuple((rank, where) for rank, where in share.serves if not (was_chosen_on_gpu and rank == self._rank))

    def take_scales(self, arrived: list[memoryview], quantisers: ShardQuantisers) -> None:
        """Take the scales of this process's rows."""
        readers = [Reader(piece) for piece in arrived]
        for share in self._shares:
            dtype = self._layout.outputs[share.weight.outputs["scale"]].dtype
            if share.weight.module in self._groups:
                own = self._groups[share.weight.module]
                for rank, (start, stop) in own.edges:
                    scale = readers[rank].take((stop - start) * dtype.itemsize).view(dtype.numpy)
                    own.add_from_host([(rank, (start, stop))], scale)
                continue
            taken = [readers[rank].take((stop - start) * dtype.itemsize).view(dtype.numpy) for rank, (start, stop) in share.asks]
            if taken:
                self._scales[share.weight.module] = np.concatenate(taken).reshape(self._maxima[share.weight.module].shape)
        by_device: dict[torch.device, list[GroupScales]] = {}
        for each in self._groups.values():
            by_device.setdefault(each.device, []).append(each)
        for device, weights in by_device.items():
            quantiser = quantisers.on(device)
            assert chooses_group_scales(quantiser)
            copy_from_hosts(quantiser, weights)

    def _previous_scales(self, serving: Sequence[tuple[Share, Sequence[tuple[int, ElementRange]]]]) -> list[NDArray[Any] | None]:
        """Return scales of the version before that this process published, for each weight. Those on a GPU are copied to the host."""
        if self._previous is None:
            return [None] * len(serving)
        outputs = [self._layout.outputs[share.weight.outputs["scale"]] for share, _ in serving]
        parts = [elements_of(self._previous[output.name], _bounds(ranges)) for output, (_, ranges) in zip(outputs, serving, strict=True)]
        return [np.frombuffer(data, output.dtype.numpy) for data, output in zip(_host_bytes(parts), outputs, strict=True)]

    def _chosen(self, weight: QuantisedWeight, maxima: Grid, scale: NDArray[Any] | None) -> Scales:
        before: Scales | None = None
        if scale is not None:
            old = self._old_numbers.get(weight.module)
            if not self._recipe.has_global_scale:
                before = Scales(scale)
            elif old is not None:
                before = Scales(scale, old)
        return choose_scales(self._recipe, weight.dtype, maxima, before, self._largest.get(weight.group, 0.0))

    def _number(self, share: Share) -> NDArray[Any]:
        """Return the scale of a weight that is one number."""
        weight = share.weight
        largest, old = self._largest[weight.group], self._old_numbers.get(weight.module)
        nothing = np.zeros(1, np.float32)
        if not self._recipe.has_global_scale:
            return choose_scales(self._recipe, weight.dtype, nothing, None if old is None else Scales(old), largest).scale
        dtype = self._layout.outputs[weight.outputs["scale"]].dtype
        before = None if old is None else Scales(np.zeros(1, dtype.numpy), old)
        found = choose_scales(self._recipe, weight.dtype, nothing, before, largest).global_scale
        assert found is not None
        return found

    def _number_output(self, weight: QuantisedWeight) -> Output:
        return self._layout.outputs[weight.outputs["global_scale" if self._recipe.has_global_scale else "scale"]]


def _bounds(ranges: Iterable[tuple[int, ElementRange]]) -> ElementRange:
    """Return the range from the first to the last of several ranges."""
    each = [where for _, where in ranges]
    return min(first for first, _ in each), max(last for _, last in each)


def _batches(shares: Iterable[Share]) -> Iterator[list[Share]]:
    """Yield shares whose copies together have about the size of a segment. Only weights that are stored transposed are copied."""
    batch: list[Share] = []
    size = 0
    for share in shares:
        batch.append(share)
        if share.weight.is_transposed:
            size += (share.rows[1] - share.rows[0]) * share.weight.columns * share.weight.dtype.itemsize
        if size >= SEGMENT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _host_bytes(tensors: Iterable[Any]) -> list[bytes]:
    """Return the bytes of many small tensors. Those on a GPU are copied to the host together."""
    each = list(tensors)
    on_gpus: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(each):
        if torch_types.is_torch(tensor):
            on_gpus.setdefault(tensor.device, []).append(number)
    found: dict[int, bytes] = {}
    for numbers in on_gpus.values():
        import torch

        flat = [each[number].detach().reshape(-1).view(torch.uint8) for number in numbers]
        data = bytes_of(torch.cat(flat)).tobytes()
        at = 0
        for number, piece in zip(numbers, flat, strict=True):
            found[number] = data[at : at + piece.numel()]
            at += piece.numel()
    return [found[number] if number in found else bytes_of(tensor).tobytes() for number, tensor in enumerate(each)]

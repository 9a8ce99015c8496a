"""The GPU codec: groups with CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DTYPES
from .. import copy_pieces, default_codec
from ..base import Buffer, EncodedGroup, EncodeGroup, GroupSink, Lanes, Pace, Sums
from ..bits import Bits, BitsColumn, DeviceBits, Indices, MasterWeightBits, QuantisedBits, ScalesOnDevice, on_gpu
from . import device as devices
from .codec_stream import codec_stream, host_codec_works
from .digest import digest_tensors
from .encode import BlockJob, EncodedBlocks, encode_blocks
from .kernel_addresses import Column, joined, readable
from .kernel_table import MAKES_BASE, MAKES_SCALES, QUANTISED, KernelTable, Numbers
from .resolution import GpuResolution, group_by_device


class GpuCodec:
    """A codec that works on the device of the tensors, on its own stream, while other streams continue.

    A call starts after the work that the calling thread has put on its current stream. When a call returns, it has read all that it reads.

    Parameters
    ----------
    device
        The device for tensors that are added.
    """

    name = "gpu"
    prefers_whole_state = True
    prepares = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def encode_groups(self, groups: Sequence[EncodeGroup], threads: int, encoded: GroupSink | None = None) -> Sequence[EncodedGroup]:
        """See `codec.base.Codec`. A group with tensors on a GPU is encoded there; tensors that are elsewhere are copied to it."""
        sets: dict[torch.device, dict[int, list[int]]] = {}
        found: dict[int, EncodedGroup] = {}

        def add(number: int, group: EncodedGroup) -> None:
            found[number] = group
            if encoded is not None:
                encoded(number, group)

        on_host: list[int] = []
        for number, group in enumerate(groups):
            device = device_of(group.news, group.bases)
            if device is None:
                on_host.append(number)
            else:
                sets.setdefault(device, {}).setdefault(group.type.width, []).append(number)
        if on_host:
            default_codec().encode_groups([groups[number] for number in on_host], threads, lambda number, one: add(on_host[number], one))
        for device, widths in sets.items():
            _encode_widths([{number: groups[number] for number in numbers} for numbers in widths.values()], device, add)
        return [found[number] for number in range(len(groups))]

    def resolution(self, threads: int, budget: int) -> GpuResolution:
        return GpuResolution(self.device, default_codec().resolution(threads, budget) if host_codec_works() else None)

    def deferred_resolution(self, threads: int, pace: Pace | None = None) -> GpuResolution:
        return GpuResolution(self.device, default_codec().deferred_resolution(threads) if host_codec_works() else None, pace=pace)

    def join(self, pieces: Sequence[Buffer], threads: int) -> Buffer:
        """See `codec.base.Codec`. The result is in pinned memory, from which the device copies it by itself."""
        joined = devices.gpu_at(self.device).pinned(sum(map(len, pieces))).numpy()
        copy_pieces(pieces, joined, threads)
        return memoryview(joined)

    def digest(self, tensors: Sequence[Bits], seeds: NDArray[np.uint64], threads: int) -> Sums:
        found = np.zeros((len(tensors), 4), np.uint32)
        if isinstance(tensors, BitsColumn) and tensors.device is not None:
            for itemsize in np.unique(tensors.itemsizes).tolist():
                alike = np.flatnonzero(tensors.itemsizes == itemsize)
                with codec_stream(tensors.device):
                    found[alike] = _digest_on_device(tensors.take(alike), seeds[alike], itemsize, tensors.device)
            return found
        # Master weights are rounded into copies, so they are digested one tensor at a time.
        kinds = ((bits, bits.itemsize + _MASTERS * isinstance(bits, MasterWeightBits)) for bits in tensors)
        for (device, kind), numbers in group_by_device(kinds).items():
            if device is None:
                found[numbers] = default_codec().digest([tensors[i] for i in numbers], seeds[numbers], threads)
                continue
            with codec_stream(device):
                for some in ([i] for i in numbers) if kind > _MASTERS else [numbers]:
                    column = [bits.rounded() if isinstance(bits, MasterWeightBits) else bits for bits in (tensors[i] for i in some)]
                    found[some] = _digest_on_device(column, seeds[some], kind % _MASTERS, device)
                    del column  # it must be freed before the next copies are made
        return found

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        if not on_gpu(bits):
            default_codec().write_elements(bits, indices, values)
            return
        target = bits.tensor
        at = torch.as_tensor(indices, device=target.device)
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < target.numel():
            raise IndexError("index")
        new = values.tensor if on_gpu(values) else torch.from_numpy(values.view(f"i{values.itemsize}"))
        new = new.to(target.device).view(target.dtype)
        if target.is_contiguous():
            target.view(-1)[at] = new
        else:
            target[torch.unravel_index(at, target.shape)] = new


_MASTERS = 16
"""Added to the size of an element to tell master weights from others."""

_INTEGERS = {dtype.itemsize: dtype.code for dtype in DTYPES if dtype.name in ("U8", "U16", "U32", "U64")}


def device_of(*columns: Iterable[Bits | None]) -> torch.device | None:
    """Return the device of the first tensor that is on a GPU."""
    for column in columns:
        if isinstance(column, BitsColumn) and column.device is not None:
            return column.device
    return next((bits.device for column in columns for bits in column if on_gpu(bits)), None)


def sizes_of(column: Sequence[Bits]) -> Numbers:
    """Return the numbers of elements of tensors."""
    if isinstance(column, BitsColumn):
        return column.sizes
    if set(map(type, column)) <= {DeviceBits, MasterWeightBits}:
        return np.array([bits.tensor.numel() for bits in column], np.int64)  # type: ignore[union-attr]
    return np.array([bits.size for bits in column], np.int64)


class _Width:
    """The groups of one width that a call encodes.

    Parameters
    ----------
    numbered
        The groups, by their numbers in the call.
    device
        The GPU that encodes them.
    """

    def __init__(self, numbered: Mapping[int, EncodeGroup], device: torch.device) -> None:
        self._device = device
        self._numbers, groups = list(numbered), list(numbered.values())
        bases, news, quantised_bases = _with_quantised_news(
            joined([group.bases for group in groups]), joined([group.news for group in groups])
        )
        each = np.array([len(group.news) for group in groups], np.int64)
        counts = sizes_of(news) * np.repeat([group.type.per_element for group in groups], each)
        seeds = np.concatenate([group.seeds for group in groups])
        self._columns = [Column.of(bases, device), Column.of(news, device)]
        kinds = [(len(group.news), group.type.code) for group in groups]
        base, next = (column.addresses for column in self._columns)
        self._table = KernelTable.of_groups(groups[0].type.width, kinds, base, counts, seeds, next, is_float32=_are_masters(news))
        self._descriptions = _describe_quantised(news, quantised_bases, device)
        if self._descriptions is not None:
            self._table.quantised = self._descriptions[0]
        self._tensors = self._table.rows()
        self._blocks, starts = self._table.blocks(self._tensors)
        self._starts: list[int] = starts.tolist()
        """The number of the first block of each group, followed by the number of all blocks."""
        self._encoded = EncodedBlocks(len(self._table), len(self._blocks))
        self._taken = 0
        self.nbytes = self._table.nbytes

    @property
    def job(self) -> BlockJob | None:
        """All blocks; None if kernels cannot read some of the tensors."""
        return None if any(column.missing.size for column in self._columns) else self._part(slice(None))

    def jobs_with_copies(self) -> Iterator[BlockJob]:
        """Yield parts of the blocks, in order. Copies of tensors that kernels cannot read live until the next part is requested."""
        tiles = self._blocks["tile0"].astype(np.int64)
        first, last = (np.searchsorted(self._tensors.tiles[1:], some, "right") for some in (tiles, tiles + self._blocks["tiles"] - 1))
        for part, (base, next) in readable(self._columns, first, last + 1, self._device):
            self._tensors.rows["base"], self._tensors.rows["next"] = base, next
            yield self._part(part)

    def take(self) -> list[tuple[int, EncodedGroup]]:
        """Return the groups that were encoded since the last call, and their numbers."""
        first, blocks = self._taken, self._starts
        while self._taken + 1 < len(blocks) and blocks[self._taken + 1] <= self._encoded.done:
            self._taken += 1
        return [(self._numbers[index], self._group(index)) for index in range(first, self._taken)]

    def _part(self, some: slice) -> BlockJob:
        return BlockJob(self._table, self._tensors, self._blocks[some], self._encoded)

    def _group(self, index: int) -> EncodedGroup:
        first = int(self._table.group_ends[index - 1]) if index else 0
        sums = self._encoded.sums[first : self._table.group_ends[index]]
        before = sums["before"].sum(axis=0, dtype=np.uint32)
        after = before + sums["change"].sum(axis=0, dtype=np.uint32)
        pieces = self._encoded.payload(self._starts[index], self._starts[index + 1])
        return EncodedGroup(pieces, sums["changed"].astype(np.int64), _lanes(before), _lanes(after))


def _encode_widths(widths: Sequence[Mapping[int, EncodeGroup]], device: torch.device, encoded: GroupSink) -> None:
    """Encode groups that are sorted by the width of their elements. The device goes from one width to the next without a break."""
    gpu = devices.gpu_at(device)

    def take() -> None:
        for work in works:
            for number, group in work.take():
                encoded(number, group)

    with codec_stream(device) as stream:
        works = sorted((_Width(groups, device) for groups in widths), key=lambda work: work.nbytes)
        encode_blocks([job for work in works if (job := work.job) is not None], gpu, take)
        for work in works:
            if work.job is None:
                for job in work.jobs_with_copies():
                    encode_blocks([job], gpu, take)
        stream.synchronize()
    take()  # groups without elements have no blocks


def _lanes(sums: NDArray[np.uint32]) -> Lanes:
    a, b, c, d = sums.tolist()
    return a, b, c, d


def _are_masters(news: Sequence[Bits]) -> NDArray[np.bool_] | None:
    if isinstance(news, BitsColumn):
        return None
    types = list(map(type, news))
    return np.array([kind is MasterWeightBits for kind in types], np.bool_) if MasterWeightBits in types else None


def _with_quantised_news(bases: Sequence[Bits | None], news: Sequence[Bits]) -> tuple[Sequence[Bits | None], Sequence[Bits], set[int]]:
    """Swap the two tensors of each pair whose base is made of weights that kernels quantise, as kernels expect. Return which these are."""
    if isinstance(bases, BitsColumn) and bases.quantised is None:
        return bases, news, set()
    numbers = {number for number, bits in enumerate(bases) if type(bits) is QuantisedBits}
    if not numbers:
        return bases, news, numbers
    swapped_bases: list[Bits | None] = [
        new if number in numbers else base for number, (base, new) in enumerate(zip(bases, news, strict=True))
    ]
    swapped_news = [
        base if base is not None and number in numbers else new for number, (base, new) in enumerate(zip(bases, news, strict=True))
    ]
    return swapped_bases, swapped_news, numbers


def _describe_quantised(
    news: Sequence[Bits], quantised_bases: Collection[int], device: torch.device
) -> tuple[NDArray[np.uint64], torch.Tensor] | None:
    """Return the addresses of what kernels know about weights that they quantise, and the memory that has it; None if there are none.

    `quantised_bases` are the numbers of the tensors whose base is made of such weights.
    """
    if isinstance(news, BitsColumn):
        if news.quantised is None:
            return None
        numbers = np.flatnonzero(news.quantised["columns"]).tolist()
        return _upload_descriptions(news.quantised[numbers], numbers, len(news), device) if numbers else None
    numbers = [number for number, bits in enumerate(news) if type(bits) is QuantisedBits]
    if not numbers:
        return None
    weights = [bits for bits in news if isinstance(bits, QuantisedBits)]
    rows = np.zeros(len(numbers), QUANTISED)
    for name, tensors in zip(ScalesOnDevice._fields, zip(*(bits.scales for bits in weights), strict=True), strict=True):
        rows[name] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    for name, facts in zip(("kind", "source", "group"), zip(*(bits.facts for bits in weights), strict=True), strict=True):
        rows[name] = facts
    rows["flags"] = [
        bits.makes_scales * MAKES_SCALES + (number in quantised_bases) * MAKES_BASE for number, bits in zip(numbers, weights, strict=True)
    ]
    rows["columns"] = [bits.tensor.shape[-1] for bits in weights]
    rows["width"] = -(-rows["columns"].astype(np.int64) // 128)
    return _upload_descriptions(rows, numbers, len(news), device)


def _upload_descriptions(
    rows: NDArray[np.void], numbers: Sequence[int], count: int, device: torch.device
) -> tuple[NDArray[np.uint64], torch.Tensor]:
    """Upload descriptions of some of `count` tensors. Return their addresses by tensor, and the memory."""
    memory = devices.gpu_at(device).upload(rows)
    addresses = np.zeros(count, np.uint64)
    addresses[numbers] = memory.data_ptr() + np.arange(len(numbers), dtype=np.uint64) * QUANTISED.itemsize
    return addresses, memory


def _digest_on_device(column: Sequence[Bits], seeds: NDArray[np.uint64], itemsize: int, device: torch.device) -> Sums:
    numbers = np.arange(len(column))
    codes, counts = np.full(len(column), _INTEGERS[itemsize], np.uint8), sizes_of(column)
    found = np.zeros((len(column), 4), np.uint32)
    for rows, (addresses,) in readable([Column.of(column, device)], numbers, numbers + 1, device):
        facts = addresses[rows], counts[rows], seeds[rows]
        found[rows] = digest_tensors(KernelTable.of_tensors(8 * itemsize, codes[rows], *facts), devices.gpu_at(device))
    return found

"""The GPU codec: groups with CUDA tensors go to the kernels, all others to the codec of the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from ...dtypes import DTYPES
from .. import copy_pieces, default_codec
from ..base import Buffer, EncodedGroup, EncodeGroup, Lanes, Pace, Sums
from ..bits import Bits, BitsColumn, DeviceBits, Indices, MasterWeightBits, QuantisedBits, ScalesOnDevice, on_gpu
from . import device as devices
from .codec_stream import codec_stream, host_codec_works
from .digest import digest_tensors
from .encode import EncodedBlocks, encode_blocks
from .kernel_addresses import Column, joined, readable
from .kernel_table import QUANTISED, SUMS, KernelTable, Numbers
from .resolution import GpuResolution, group_by_device


class GpuCodec:
    """A codec that works on the device of the tensors, on its own stream, while other streams go on.

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

    def encode_groups(self, groups: Sequence[EncodeGroup], threads: int) -> Sequence[EncodedGroup]:
        """See `codec.base.Codec`. A group with tensors on a GPU is encoded there; tensors that are elsewhere are copied to it."""
        sets: dict[torch.device, dict[int, list[int]]] = {}
        found: dict[int, EncodedGroup] = {}
        on_host = []
        for number, group in enumerate(groups):
            device = device_of(group.news, group.bases)
            if device is None:
                on_host.append(number)
            else:
                sets.setdefault(device, {}).setdefault(group.type.width, []).append(number)
        if on_host:
            host = default_codec()
            found.update(zip(on_host, host.encode_groups([groups[number] for number in on_host], threads), strict=True))
        for device, widths in sets.items():
            for numbers, encoded in zip(
                widths.values(), _encode_widths([[groups[i] for i in numbers] for numbers in widths.values()], device), strict=True
            ):
                found.update(zip(numbers, encoded, strict=True))
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

_MAKES_SCALES, _MAKES_BASE = 1, 2
"""See `Quantised` in common.cuh."""

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


def _encode_widths(widths: Sequence[Sequence[EncodeGroup]], device: torch.device) -> list[list[EncodedGroup]]:
    """Encode groups that are sorted by the width of their elements.

    Threads encode all widths at the same time: one prepares its work while another waits for the GPU. All use the codec's stream.
    """
    gpu = devices.gpu_at(device)

    def encode(groups: Sequence[EncodeGroup], stream: torch.cuda.Stream) -> list[EncodedGroup]:
        with gpu.using(stream):
            return _encode_on_device(groups, device)

    with codec_stream(device) as stream:
        if len(widths) == 1:
            found = [_encode_on_device(widths[0], device)]
        else:
            with ThreadPoolExecutor(len(widths) - 1, "deltawire-encode") as pool:
                others = [pool.submit(encode, groups, stream) for groups in widths[1:]]
                found = [_encode_on_device(widths[0], device), *(other.result() for other in others)]
        stream.synchronize()
    return found


def _encode_on_device(groups: Sequence[EncodeGroup], device: torch.device) -> list[EncodedGroup]:
    """Encode groups of one width."""
    bases, news, quantised_bases = _with_quantised_news(joined([group.bases for group in groups]), joined([group.news for group in groups]))
    each = np.array([len(group.news) for group in groups], np.int64)
    counts = sizes_of(news) * np.repeat([group.type.per_element for group in groups], each)
    seeds = np.concatenate([group.seeds for group in groups])
    columns = [Column.of(bases, device), Column.of(news, device)]
    kinds = [(len(group.news), group.type.code) for group in groups]
    addresses = [column.addresses for column in columns]
    table = KernelTable.of_groups(groups[0].type.width, kinds, addresses[0], counts, seeds, addresses[1], is_float32=_are_masters(news))
    descriptions = _describe_quantised(news, quantised_bases, device)
    if descriptions is not None:
        table.quantised = descriptions[0]
    encoded, blocks = _encode_table(table, columns, device)
    ends = np.append(0, np.cumsum(encoded.sizes))
    changes = np.flatnonzero(encoded.sizes > encoded.unchanged)
    ranges = []
    for first, end in zip(blocks[:-1].tolist(), blocks[1:].tolist(), strict=True):
        # Chunks after the last change are left out.
        last = int(np.searchsorted(changes, end)) - 1
        changed = last >= 0 and changes[last] >= first
        ranges.append((int(ends[first]), int(ends[changes[last] + 1] - encoded.unchanged[changes[last]]) if changed else int(ends[first])))
    found = []
    for pieces, first, end in zip(encoded.cut(ranges), table.group_starts.tolist(), table.group_ends.tolist(), strict=True):
        sums = encoded.sums[first:end]
        before = sums["before"].sum(axis=0, dtype=np.uint32)
        found.append(
            EncodedGroup(
                pieces, sums["changed"].astype(np.int64), _lanes(before), _lanes(before + sums["change"].sum(axis=0, dtype=np.uint32))
            )
        )
    return found


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
    if isinstance(bases, BitsColumn):
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

    `quantised_bases` are the numbers of those that stand for the elements of the base.
    """
    numbers = [] if isinstance(news, BitsColumn) else [number for number, bits in enumerate(news) if type(bits) is QuantisedBits]
    if not numbers:
        return None
    weights = [bits for bits in news if isinstance(bits, QuantisedBits)]
    rows = np.zeros(len(numbers), QUANTISED)
    for name, tensors in zip(ScalesOnDevice._fields, zip(*(bits.scales for bits in weights), strict=True), strict=True):
        rows[name] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    for name, facts in zip(("kind", "source", "group"), zip(*(bits.facts for bits in weights), strict=True), strict=True):
        rows[name] = facts
    rows["flags"] = [
        bits.makes_scales * _MAKES_SCALES + (number in quantised_bases) * _MAKES_BASE for number, bits in zip(numbers, weights, strict=True)
    ]
    rows["columns"] = [bits.tensor.shape[-1] for bits in weights]
    rows["width"] = -(-rows["columns"].astype(np.int64) // 128)
    memory = devices.gpu_at(device).upload(rows)
    addresses = np.zeros(len(news), np.uint64)
    addresses[numbers] = memory.data_ptr() + np.arange(len(numbers), dtype=np.uint64) * QUANTISED.itemsize
    return addresses, memory


def _encode_table(table: KernelTable, columns: Sequence[Column], device: torch.device) -> tuple[EncodedBlocks, Numbers]:
    """Encode all blocks of a table, and copy tensors that kernels cannot read. Return also the number of each group's first block."""
    tensors = table.rows()
    blocks, starts = table.blocks(tensors)
    last = blocks["tile0"].astype(np.int64) + blocks["tiles"] - 1
    first_tensor, last_tensor = (np.searchsorted(tensors.tiles[1:], tile, "right") for tile in (blocks["tile0"].astype(np.int64), last))
    found = []
    for part, (base, next) in readable(columns, first_tensor, last_tensor + 1, device):
        tensors.rows["base"], tensors.rows["next"] = base, next
        found.append(encode_blocks(table, tensors, blocks[part], devices.gpu_at(device)))
    if not found:
        found.append(encode_blocks(table, tensors, blocks, devices.gpu_at(device)))
    sums = found[0].sums
    for more in found[1:]:
        for name in SUMS.names or ():
            sums[name] += more.sums[name]
    sizes, unchanged = (np.concatenate([getattr(part, name) for part in found]) for name in ("sizes", "unchanged"))
    return EncodedBlocks([piece for part in found for piece in part.pieces], sizes, unchanged, sums), starts


def _digest_on_device(column: Sequence[Bits], seeds: NDArray[np.uint64], itemsize: int, device: torch.device) -> Sums:
    numbers = np.arange(len(column))
    codes, counts = np.full(len(column), _INTEGERS[itemsize], np.uint8), sizes_of(column)
    found = np.zeros((len(column), 4), np.uint32)
    for rows, (addresses,) in readable([Column.of(column, device)], numbers, numbers + 1, device):
        facts = addresses[rows], counts[rows], seeds[rows]
        found[rows] = digest_tensors(KernelTable.of_tensors(8 * itemsize, codes[rows], *facts), devices.gpu_at(device))
    return found

"""Cuts a delta of version 3 into windows. A window is a delta over parts of tensors, which is decoded without the rest of the file.

A payload is a sequence of chunks, and no chunk goes over the end of a block (docs/format.md §3). So the chunks of some blocks, and the
elements of these blocks, are a payload and a group of their own. Readers use windows to decode a file with little memory, or only those
parts of it that they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..codec.varints import read_varint
from ..dtypes import PAYLOAD_TYPES, DType, PayloadType, payload_type
from ..errors import CorruptDelta
from ..format.delta_file import DeltaFile, GroupedDelta, Parts, Structure
from ..format.digest import Digest

_TILE = 1 << 14

Specs = Mapping[str, tuple[DType, tuple[int, ...]]]
"""The types and shapes of tensors, by ascending names."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some consecutive blocks of one group.

    Parameters
    ----------
    file
        The delta of these blocks. Its digests are not known: both are zero.
    parts
        The elements that the blocks have, by ascending names.
    decoders
        The bits of all readers that need the window (`cut_windows`).
    """

    file: GroupedDelta
    parts: Parts
    decoders: int


def can_cut(file: DeltaFile) -> TypeGuard[GroupedDelta]:
    """Return whether a delta can be cut into windows: it is of version 3, and only changes values."""
    return isinstance(file, GroupedDelta) and file.structure == Structure()


def cut_windows(file: GroupedDelta, specs: Specs, decoders: Callable[[str], int], most_bytes: int) -> Iterator[Window]:
    """Yield the windows of a file. Together they have all elements that it covers. Raises `CorruptDelta`.

    A window ends where other readers need the next block, or where it would have more than `most_bytes`. It has at least one block. All
    readers with the same arguments get the same windows.

    Parameters
    ----------
    file
        The delta (`can_cut`).
    specs
        All tensors that it is about.
    decoders
        Returns the bits of all readers that need a tensor.
    most_bytes
        The most bytes of the tensors' elements.
    """
    parts: Parts = {name: (0, math.prod(shape)) for name, (_, shape) in specs.items()}
    if file.file_parts is not None:
        parts = file.file_parts.of(list(specs), {name: dtype for name, (dtype, _) in specs.items()})
    groups: dict[int, list[str]] = {}
    for name, (start, stop) in parts.items():
        if stop > start:
            groups.setdefault(payload_type(name, specs[name][0]).code, []).append(name)
    if unknown := file.groups.keys() - groups.keys():
        raise CorruptDelta(f"the delta changes tensors of type {PAYLOAD_TYPES[min(unknown)].name}, which the state does not have.")
    for code, names in sorted(groups.items()):
        kind = PAYLOAD_TYPES[code]
        start, stop = file.groups.get(code, (0, 0))
        yield from _cut_group(kind, file.data[start:stop], {name: parts[name] for name in names}, decoders, most_bytes)


def near_tensors(specs: Specs, is_needed: Callable[[str], bool]) -> set[str]:
    """Return the tensors of which a block can have elements beside those of a needed tensor, wherever files begin and end.

    Needed tensors are among them. Files with parts of tensors are left out: there, any two tensors can share a block.

    Parameters
    ----------
    specs
        All tensors of the state.
    is_needed
        Returns whether a reader needs a tensor.
    """
    groups: dict[int, list[tuple[str, int]]] = {}
    for name, (dtype, shape) in specs.items():
        kind = payload_type(name, dtype)
        groups.setdefault(kind.code, []).append((name, _tiles(kind, math.prod(shape))))
    found: set[str] = set()
    for code, members in groups.items():
        reach = _block_tiles(PAYLOAD_TYPES[code]) - 2  # tiles of others that may lie between, because both have one in the block
        for row in (members, members[::-1]):
            between = math.inf
            for name, tiles in row:
                if is_needed(name):
                    found.add(name)
                    between = 0
                elif tiles:
                    if between <= reach:
                        found.add(name)
                    between += tiles
    return found


def _cut_group(kind: PayloadType, payload: memoryview, parts: Parts, decoders: Callable[[str], int], most_bytes: int) -> Iterator[Window]:
    names = list(parts)
    ends = np.cumsum([_tiles(kind, stop - start) for start, stop in parts.values()])
    total, per_block = int(ends[-1]), _block_tiles(kind)
    bits = [decoders(name) for name in names]
    payloads = _block_starts(payload, total, per_block)
    first, needs = 0, _needs(bits, ends, 0, min(per_block, total))
    for block in range(1, len(payloads)):
        tile, end = block * per_block, min((block + 1) * per_block, total)
        others = _needs(bits, ends, tile, end) if tile < total else -1
        is_full = (end - first * per_block) * _TILE * kind.width // 8 > most_bytes
        if others != needs or is_full:
            some = _parts(kind, names, parts, ends, first * per_block, min(tile, total))
            yield Window(_sub_delta(kind, payload[payloads[first] : payloads[block]], len(some)), some, needs)
            first, needs = block, others


def _block_starts(payload: memoryview, total: int, per_block: int) -> list[int]:
    """Return where the chunks of each block begin, and the end of the payload. Blocks that do not change have no bytes."""
    starts, at, tile = [0], 0, 0
    while at < len(payload):
        head, at = read_varint(payload, at)
        size, at = read_varint(payload, at)
        tiles = head >> 2
        if not 0 < tiles <= min(per_block - tile % per_block, total - tile) or size > len(payload) - at:
            raise CorruptDelta("a chunk goes over the end of its block, or of the file.")
        tile, at = tile + tiles, at + size
        if tile % per_block == 0 or tile == total:
            starts.append(at)
    return starts + [len(payload)] * (-(-total // per_block) + 1 - len(starts))


def _needs(bits: Sequence[int], ends: NDArray[np.int64], start: int, stop: int) -> int:
    found = 0
    for number in range(*_members(ends, start, stop)):
        found |= bits[number]
    return found


def _members(ends: NDArray[np.int64], start: int, stop: int) -> tuple[int, int]:
    """Return the range of tensors that have tiles from `start` to `stop`."""
    return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop - 1, "right")) + 1


def _parts(kind: PayloadType, names: Sequence[str], parts: Parts, ends: NDArray[np.int64], start: int, stop: int) -> Parts:
    """Return the elements of some tiles of a group."""
    found = {}
    per_tile = _TILE // kind.per_element
    for number in range(*_members(ends, start, stop)):
        first, last = parts[names[number]]
        before = int(ends[number - 1]) if number else 0
        begin = first + max(start - before, 0) * per_tile
        found[names[number]] = begin, min(first + (stop - before) * per_tile, last)
    return found


def _sub_delta(kind: PayloadType, payload: memoryview, tensors: int) -> GroupedDelta:
    groups = {kind.code: (0, len(payload))} if len(payload) else {}
    return GroupedDelta(Digest(), Digest(), payload, tensors, Structure(), None, groups)


def _tiles(kind: PayloadType, elements: int) -> int:
    return -(-elements * kind.per_element // _TILE)


def _block_tiles(kind: PayloadType) -> int:
    return {4: 1 << 12, 8: 1 << 11}.get(kind.width, 1 << 10)

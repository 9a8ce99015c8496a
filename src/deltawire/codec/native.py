"""The codec in C++ (`native/`), for one instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..dtypes import DTYPES, PAYLOAD_TYPES, DType, PayloadType
from ..errors import CodecUnavailable, CorruptDelta, DtypeMismatch, ShapeMismatch
from . import join_pieces
from .base import (
    Buffer,
    EncodedGroup,
    EncodeGroup,
    GroupOutcome,
    GroupSink,
    Outcomes,
    Pace,
    ResolveGroup,
    ResolveJob,
    Sums,
    sums,
)
from .bits import Bits, BitsColumn, HostBits, Indices, in_host_memory

_TYPES = [(kind.code, kind.dtype.itemsize, kind.width, kind.exponent_shift, kind.exponent_bits) for kind in PAYLOAD_TYPES]


def instruction_sets() -> list[str]:
    """Return the instruction sets that this machine runs, best first. The last is always `scalar`."""
    return _native.instruction_sets()


class NativeCodec:
    """A codec that gives the same bytes as the reference. It runs without the GIL, in memory that does not grow with the tensors.

    Parameters
    ----------
    isa
        The instruction set to use; by default the best one of this machine.
    """

    prefers_whole_state = False
    prepares = True

    def __init__(self, isa: str | None = None) -> None:
        sets = instruction_sets()
        if isa is not None and isa not in sets:
            raise CodecUnavailable(f"this machine does not run {isa!r}; it has {', '.join(sets)}.")
        self.name = isa or sets[0]

    def encode_groups(self, groups: Sequence[EncodeGroup], threads: int, encoded: GroupSink | None = None) -> Sequence[EncodedGroup]:
        native = [(_TYPES[group.type.code], native_tensors(group.bases), native_tensors(group.news), group.seeds) for group in groups]
        preparation = next((group.preparation for group in groups if group.preparation is not None), None)
        more = () if preparation is None else (preparation,)
        found = _native.encode_groups(native, threads, self.name, *more)
        each = [EncodedGroup([block.data for block in blocks], changed, before, after) for blocks, changed, before, after in found]
        if encoded is not None:
            for number, group in enumerate(each):
                encoded(number, group)
        return each

    def resolution(self, threads: int, budget: int) -> NativeResolution:
        return NativeResolution(self.name, threads, budget, False)

    def deferred_resolution(self, threads: int, pace: Pace | None = None) -> NativeResolution:
        return NativeResolution(self.name, threads, 0, True)

    def join(self, pieces: Sequence[Buffer], threads: int) -> Buffer:
        return join_pieces(pieces, threads)

    def digest(self, tensors: Sequence[Bits], seeds: NDArray[np.uint64], threads: int) -> Sums:
        return _native.digest(native_tensors(tensors), seeds, threads, self.name).reshape(-1, 4)

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        flat = np.ascontiguousarray(in_host_memory(values)).view(np.uint8)
        _native.write_elements(in_host_memory(bits), np.ascontiguousarray(indices), flat)


class NativeResolution:
    """A `codec.base.Resolution` in C++."""

    def __init__(self, isa: str, threads: int, budget: int, defer: bool) -> None:
        self._native = _native.Resolution(threads, budget, defer, isa)
        self._kinds = np.empty(0, np.uint8)  # the code of the own type of each tensor
        self._counts = np.empty(0, np.int64)

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        whole = _bytes(data)
        counts, seeds = np.array([job.count for job in jobs], np.int64), np.array([job.seed for job in jobs], np.uint64)
        writes = np.array([job.write for job in jobs], np.bool_)
        native = []
        for index, job in enumerate(jobs):
            payload = None if job.payload is None else whole[slice(*job.payload)]
            one = slice(index, index + 1)
            native.append((_TYPES[job.dtype.code], [job.base], counts[one], seeds[one], payload, writes[one]))
        found = self._add(native, True)
        self._note(np.array([job.dtype.code for job in jobs], np.uint8), counts)
        changed, before, after = zip(*found, strict=True) if found else ([], [], [])
        return Outcomes(np.array(changed, np.int64).ravel(), sums(before), sums(after))

    def add_groups(self, groups: Sequence[ResolveGroup], data: Buffer) -> Sequence[GroupOutcome]:
        whole = _bytes(data)
        native = []
        for group in groups:
            payload = None if group.payload is None else whole[slice(*group.payload)]
            writes = np.full(len(group.bases), group.writes) if isinstance(group.writes, bool) else np.array(group.writes, np.bool_)
            native.append((_TYPES[group.type.code], native_tensors(group.bases), group.counts, group.seeds, payload, writes))
        found = self._add(native, False)
        for group in groups:
            self._note(np.full(len(group.bases), group.type.dtype.code, np.uint8), group.counts)
        return [GroupOutcome(*outcome) for outcome in found]

    def _add(self, native: Sequence[_native.ResolveGroup], old: bool) -> list[_native.Outcome]:
        try:
            return self._native.add(native, old)
        except _native.Corrupt as error:
            raise CorruptDelta(str(error)) from None
        except _native.WrongCount as error:
            raise ShapeMismatch(str(error)) from None
        except _native.WrongType:
            raise DtypeMismatch("a tensor has another element type than its delta.") from None

    def _note(self, kinds: NDArray[np.uint8], counts: NDArray[np.int64]) -> None:
        self._kinds, self._counts = np.concatenate([self._kinds, kinds]), np.concatenate([self._counts, counts])

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[NDArray[np.int64], HostBits]]:
        numbers = np.array(tensors, np.int64)
        indices, values, *columns = self._native.extract(numbers)
        found = []
        for code, start, first, count in zip(self._kinds[numbers].tolist(), *columns, strict=True):
            bits = DTYPES[code].bits
            found.append((indices[start : start + count], values[first : first + count * bits.itemsize].view(bits)))
        return found

    def dense(self, tensors: Sequence[int]) -> Sequence[HostBits]:
        numbers = np.array(tensors, np.int64)
        columns = zip(self._kinds[numbers].tolist(), self._counts[numbers].tolist(), strict=True)
        found: list[HostBits] = [np.zeros(count, DTYPES[code].bits) for code, count in columns]
        self._native.extract_dense(numbers, found)
        return found

    def settle(self) -> None:
        self._native.settle()

    def revert(self) -> None:
        self._native.revert()

    def exchange(self, *, wait: bool = True) -> None:
        self._native.exchange()

    def compact(self) -> None:
        self._native.compact()
        self._kinds, self._counts = self._kinds[:0], self._counts[:0]


Facts: TypeAlias = tuple[NDArray[np.int64], list[int], list[int]]
"""A row for each chunk (mode, size, changed, bytes), then the number of changes by value mode, then by bit length of their step."""


def bytes_done() -> int:
    """Return how many bytes of weights native code has encoded or decoded in this process.

    Returns 0 if the extension was built before it had this function, as in a source tree after an update.
    """
    return _native.bytes_done() if hasattr(_native, "bytes_done") else 0


def inspect_payload(payload: Buffer, dtype: DType) -> Facts:
    """Return what a payload of version 1 or 2 says without its base. The size of a chunk is its number of elements."""
    return _inspect(payload, PAYLOAD_TYPES[dtype.code], True)


def inspect_group(payload: Buffer, kind: PayloadType) -> Facts:
    """Return what the payload of a group says without its tensors. The size of a chunk is its number of tiles."""
    return _inspect(payload, kind, False)


def find_chunks(payload: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """Return a row for each chunk of a group's payload: where its body begins, the first number of its header, and the bytes of its body.

    Returns None if the extension was built before it had this function, as in a source tree after an update.
    """
    if not hasattr(_native, "find_chunks"):
        return None
    try:
        return _native.find_chunks(payload).reshape(-1, 3)
    except _native.Corrupt as error:
        raise CorruptDelta(str(error)) from None


def _inspect(payload: Buffer, kind: PayloadType, old: bool) -> Facts:
    try:
        chunks, by_mode, by_length = _native.inspect(_bytes(payload), _TYPES[kind.code], old)
        return np.asarray(chunks, np.int64).reshape(-1, 4), by_mode, by_length
    except _native.Corrupt as error:
        raise CorruptDelta(str(error)) from None
    except _native.WrongType:
        raise CorruptDelta("a payload has an unknown element type.") from None


_T = TypeVar("_T")


def native_tensors(column: Sequence[_T]) -> list[_T] | tuple[_T, ...] | _native.Addresses:
    """Return tensors as functions in C++ take them: by their addresses if they are in a column, and contiguous; else one by one."""
    if isinstance(column, list | tuple):
        return column
    if isinstance(column, BitsColumn) and column.device is None and column.are_plain and hasattr(_native, "Addresses"):
        return _native.Addresses(column.addresses, column.sizes, column.itemsizes, column)
    return list(column)


def _bytes(payload: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(payload, np.uint8)

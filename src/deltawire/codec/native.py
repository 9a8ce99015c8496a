"""The codec in C++ (`native/`), for one instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..dtypes import DTYPES, DType
from ..errors import CodecUnavailable, CorruptDelta, DtypeMismatch, ShapeMismatch
from .base import Buffer, EncodeJob, Encodings, Outcomes, ResolveJob, Sums, sums
from .bits import Bits, HostBits, Indices, in_host_memory

_CODES = [bytes([dtype.code]) for dtype in DTYPES]
"""The first byte of a payload, for each element type."""

_TYPES = [(dtype.code, dtype.itemsize, dtype.exponent_shift, dtype.exponent_bits) for dtype in DTYPES]


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

    def __init__(self, isa: str | None = None) -> None:
        sets = instruction_sets()
        if isa is not None and isa not in sets:
            raise CodecUnavailable(f"this machine does not run {isa!r}; it has {', '.join(sets)}.")
        self.name = isa or sets[0]

    def encode(self, jobs: Sequence[EncodeJob], threads: int) -> Encodings:
        native = [(job.base, job.new, _TYPES[job.dtype.code], job.seed) for job in jobs]
        found = _native.encode(native, threads, self.name)
        pieces: list[Any] = []
        sizes = [0] * len(jobs)
        for index, (job, (blocks, changed, _, _)) in enumerate(zip(jobs, found, strict=True)):
            if changed or job.base is None:
                pieces += [_CODES[job.dtype.code], *blocks]
                sizes[index] = 1 + sum(map(len, blocks))
        _, changes, before, after = zip(*found, strict=True) if found else ([], [], [], [])
        return Encodings([b"".join(pieces)], np.array(sizes, np.int64), np.array(changes, np.int64), sums(before), sums(after))

    def resolution(self, threads: int, budget: int) -> NativeResolution:
        return NativeResolution(self.name, threads, budget, False)

    def deferred_resolution(self, threads: int) -> NativeResolution:
        return NativeResolution(self.name, threads, 0, True)

    def digest(self, arrays: Sequence[tuple[Bits, int]], threads: int) -> Sums:
        return sums(_native.digest(list(arrays), threads, self.name))

    def write_elements(self, bits: Bits, indices: Indices, values: Bits) -> None:
        flat = np.ascontiguousarray(in_host_memory(values)).view(np.uint8)
        _native.write_elements(in_host_memory(bits), np.ascontiguousarray(indices), flat)


class NativeResolution:
    """A `codec.base.Resolution` in C++."""

    def __init__(self, isa: str, threads: int, budget: int, defer: bool) -> None:
        self._native = _native.Resolution(threads, budget, defer, isa)
        self._dtypes: list[DType] = []
        self._counts: list[int] = []
        self._changed: list[int] = []

    def add(self, jobs: Sequence[ResolveJob], data: Buffer) -> Outcomes:
        whole = _bytes(data)
        payloads = [None if job.payload is None else whole[slice(*job.payload)] for job in jobs]
        native = [
            (job.base, job.count, payload, _TYPES[job.dtype.code], job.seed, job.write) for job, payload in zip(jobs, payloads, strict=True)
        ]
        try:
            found = self._native.add(native)
        except _native.Corrupt as error:
            raise CorruptDelta(str(error)) from None
        except _native.WrongCount as error:
            raise ShapeMismatch(str(error)) from None
        except _native.WrongType:
            raise DtypeMismatch("a tensor has another element type than its delta.") from None
        changed, before, after = zip(*found, strict=True) if found else ([], [], [])
        self._dtypes += [job.dtype for job in jobs]
        self._counts += [job.count for job in jobs]
        self._changed += changed
        return Outcomes(np.array(changed, np.int64), sums(before), sums(after))

    def changes(self, tensors: Sequence[int]) -> Sequence[tuple[NDArray[np.int64], HostBits]]:
        found = []
        for tensor in tensors:
            indices, values = np.empty(self._changed[tensor], np.int64), np.empty(self._changed[tensor], self._dtypes[tensor].bits)
            self._native.extract(tensor, indices, values.view(np.uint8))
            found.append((indices, values))
        return found

    def dense(self, tensors: Sequence[int]) -> Sequence[HostBits]:
        found = []
        for tensor in tensors:
            found.append(np.empty(self._counts[tensor], self._dtypes[tensor].bits))
            self._native.extract_dense(tensor, found[-1].view(np.uint8))
        return found

    def settle(self) -> None:
        self._native.settle()

    def revert(self) -> None:
        self._native.revert()

    def exchange(self) -> None:
        self._native.exchange()

    def compact(self) -> None:
        self._native.compact()
        for column in (self._dtypes, self._counts, self._changed):
            column.clear()


def inspect_payload(payload: Buffer, dtype: DType) -> tuple[list[tuple[int, int, int, int]], list[int], list[int]]:
    """Return what a payload says without its base.

    The result is a list of chunks (mode, elements, changed, bytes), then the number of changes by value mode, then by bit length of their
    step.
    """
    try:
        return _native.inspect(_bytes(payload), _TYPES[dtype.code])
    except _native.Corrupt as error:
        raise CorruptDelta(str(error)) from None
    except _native.WrongType:
        raise CorruptDelta("a payload has an unknown element type.") from None


def _bytes(payload: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(payload, np.uint8)

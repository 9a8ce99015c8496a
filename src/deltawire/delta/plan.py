"""Which tensor of a state meets which payload of a delta, and which memory the delta writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codec.base import ResolveJob
from ..codec.bits import on_gpu
from ..dtypes import DTYPES, DType
from ..errors import CorruptDelta, DeltaTooLarge, DtypeMismatch, TensorMissing, TensorsTied, TensorUnexpected
from ..format.delta_file import ByteRange, DeltaFile, Parts
from ..format.digest import PART_ALIGNMENT, TensorKeys
from ..tensors.bits import State, TensorBits, keys_of, named_bits
from ..tensors.names import check_names
from .patch import check_writable

_ADDED_BYTES, _ADDED_BYTES_PER_PAYLOAD_BYTE = 1 << 30, 1024
"""Added tensors may have this many bytes, plus this many for each byte of the payloads. Only zeros compress better than that."""


@dataclass(slots=True)
class ResolutionPlan:
    """The jobs of one delta. Jobs are numbered: first the `tensors` of the state, then the `added` ones."""

    file: DeltaFile
    tensors: list[TensorBits]
    added: list[tuple[str, DType, tuple[int, ...]]]
    keys: TensorKeys
    payloads: list[ByteRange | None] = field(default_factory=list)
    """The payload of each of `tensors`; None if it does not change."""
    writes: list[bool] = field(default_factory=list)
    """Whether each of `tensors` is written to."""
    first: set[int] = field(default_factory=set)
    """Jobs that must be done before anything is written, because their tensors share memory with tensors that are written."""
    resolution_numbers: dict[int, int] = field(default_factory=dict)
    """The number that the tensor of each job has in the resolution."""

    def __len__(self) -> int:
        return len(self.tensors) + len(self.added)

    def jobs(self, numbers: Sequence[int]) -> list[ResolveJob]:
        return [self._job(number, seed) for number, seed in zip(numbers, self.keys.seeds[numbers].tolist(), strict=True)]

    def _job(self, number: int, seed: int) -> ResolveJob:
        if number < len(self.tensors):
            tensor = self.tensors[number]
            return ResolveJob(tensor.bits, tensor.size, self.payloads[number], tensor.dtype, seed, self.writes[number])
        name, dtype, shape = self.added[number - len(self.tensors)]
        return ResolveJob(None, math.prod(shape), self.file.payloads[name], dtype, seed)

    def nbytes(self, number: int) -> int:
        """Return the bytes of weights of a job."""
        if number < len(self.tensors):
            return self.tensors[number].nbytes
        _, dtype, shape = self.added[number - len(self.tensors)]
        return math.prod(shape) * dtype.itemsize


def plan_resolution(state: State, file: DeltaFile) -> ResolutionPlan:
    """Match the tensors of a state with the payloads of a delta. Raise a `DeltaError` or `StateError` if they do not fit."""
    structure = file.structure
    removed = set(structure.removed)
    for name in sorted({*file.payloads, *structure.removed, *structure.aliases, *(file.parts or ())} - structure.added.keys()):
        if name not in state:
            raise TensorMissing(f"the state has no tensor {name!r}.")
    for name in structure.added.keys() & state.keys():
        if name not in removed:
            raise TensorUnexpected(f"the state already has a tensor {name!r}.")
    added_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in structure.added.values())
    tensors = _covered_tensors(state, file.parts)
    added = [(name, dtype, shape) for name, (dtype, shape) in sorted(structure.added.items())]
    plan = ResolutionPlan(file, tensors, added, keys_of(tensors).followed_by(TensorKeys.of(added)))
    for tensor in tensors:
        payload = None if tensor.name in removed else file.payload(tensor.name)
        if payload is not None and payload[0] < payload[1] and file.data[payload[0]] != tensor.dtype.code:
            raise _wrong_type(tensor, file.data[payload[0]])
        plan.payloads.append(payload)
    plan.writes = [False] * len(tensors)
    if added_bytes > _ADDED_BYTES + _ADDED_BYTES_PER_PAYLOAD_BYTE * len(file.data):
        raise DeltaTooLarge(f"the delta adds tensors of {added_bytes:,} bytes.")
    return plan


def _covered_tensors(state: State, parts: Parts | None) -> list[TensorBits]:
    """Return what a delta covers, in the order of names: the whole state, or parts of some of its tensors."""
    names = state if parts is None else parts
    check_names(names)
    tensors = [named_bits(name, state[name]) for name in sorted(names)]
    if parts is None:
        return tensors
    for tensor in tensors:
        start = parts[tensor.name][0]
        if start * tensor.dtype.itemsize % PART_ALIGNMENT:
            raise CorruptDelta(
                f"the part of tensor {tensor.name!r} starts at element {start}, which is not at a multiple of {PART_ALIGNMENT} bytes."
            )
    return [tensor.cut(*parts[tensor.name]) for tensor in tensors]


def _wrong_type(tensor: TensorBits, code: int) -> DtypeMismatch:
    theirs = DTYPES[code].name if code < len(DTYPES) else f"unknown ({code})"
    return DtypeMismatch(f"tensor {tensor.name!r} is {tensor.dtype.name}, its delta is for {theirs}.")


def mark_writes(plan: ResolutionPlan) -> None:
    """Decide which jobs write: those of tensors that change, each memory once.

    Raise `StateNotWritable` or `TensorsTied`, before anything is written, if the state cannot take the changes.
    """
    written: dict[object, ByteRange] = {}
    held = list(zip(plan.tensors, plan.payloads, strict=True))
    are_separate = _are_separate(plan.tensors)
    for index, (tensor, payload) in enumerate(held):
        if payload is None or not tensor.size:
            continue
        check_writable(tensor)
        if are_separate:
            plan.writes[index] = True
        elif tensor.memory in written:
            plan.first.add(index)
        else:
            written[tensor.memory] = payload
            plan.writes[index] = True
    if are_separate:
        return
    # Tied tensors change together if their payloads are the same bytes, even if the delta was made from copies that were not tied.
    together = {tensor.name for tensor, payload in held if _is_same_change(plan.file.data, payload, written.get(tensor.memory))}
    targets = [tensor for tensor, write in zip(plan.tensors, plan.writes, strict=True) if write]
    changing = {tensor.name for tensor, payload in held if payload is not None}
    _check_overlap(targets, [tensor for tensor in plan.tensors if tensor.name not in together], changing)


def _is_same_change(data: memoryview, one: ByteRange | None, other: ByteRange | None) -> bool:
    return one is not None and other is not None and (one == other or data[slice(*one)] == data[slice(*other)])


def _are_separate(tensors: Sequence[TensorBits]) -> bool:
    """Tell whether no two tensors overlap in memory. In nearly all states this is so, and no other check is needed."""
    bounds = np.array([tensor.byte_bounds for tensor in tensors if tensor.size], np.int64).reshape(-1, 2)
    ordered = bounds[np.argsort(bounds[:, 0])]
    return bool((ordered[1:, 0] >= ordered[:-1, 1]).all())


def _check_overlap(targets: Sequence[TensorBits], others: Sequence[TensorBits], changing: Collection[str]) -> None:
    """Raise `TensorsTied` if a write to a target would change another tensor. `others` does not include tensors that change together."""
    tensors = [tensor for tensor in [*targets, *others] if tensor.size]
    bounds = sorted((*tensor.byte_bounds, index) for index, tensor in enumerate(tensors))
    open_: list[tuple[int, int]] = []  # the ends and indices of tensors that extend beyond the start of the next one
    for start, end, index in bounds:
        open_ = [(earlier_end, earlier) for earlier_end, earlier in open_ if earlier_end > start]
        for _, earlier in open_:
            if min(index, earlier) < len(targets) and _share_memory(tensors[index], tensors[earlier]):
                a, b = sorted([tensors[index].name, tensors[earlier].name])
                raise TensorsTied.of(a, b, changed=[name for name in (a, b) if name in changing])
        open_.append((end, index))


def _share_memory(a: TensorBits, b: TensorBits) -> bool:
    one, other = a.bits, b.bits
    if on_gpu(one) or on_gpu(other):
        return True  # on a GPU, overlapping ranges of addresses are enough
    shares_memory: Any = np.shares_memory  # releases of NumPy declare its arguments differently
    try:
        return bool(shares_memory(one, other, max_work=10_000))
    except np.exceptions.TooHardError:
        return True

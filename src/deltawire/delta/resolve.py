"""From a delta file and the state it was made from to the next state."""

from __future__ import annotations

import math
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Codec, Resolution, ResolveJob
from ..dtypes import DTYPES, DType
from ..errors import (
    BaseMismatch,
    CorruptDelta,
    DeltaTooLarge,
    DtypeMismatch,
    ResultMismatch,
    ShapeMismatch,
    TensorMissing,
    TensorsTied,
    TensorUnexpected,
)
from ..format import delta_file
from ..format.delta_file import DeltaBytes, DeltaFile, Parts, Span
from ..format.digest import PART_ALIGNMENT, Digest, TensorKeys
from ..tensors.bits import State, Tensor, TensorBits, check_names, keys_of, named_bits, typed
from ..tensors.state import Progress, batches, codec_for, digest_tensors, thread_count
from .patch import ResolvedPatch, TensorPatch, change_structure, check_writable

_KEPT_CHANGES = 32 << 20
"""Decoded changes that `apply_delta` keeps, in bytes, beyond the size of the delta itself."""

_MOST_ADDED, _MOST_ADDED_TIMES = 1 << 30, 1024
"""Tensors that appear may have so many bytes, and so many times the size of the payloads. Only zeros shrink a thousandfold."""


def resolve_delta(state: State, delta: DeltaBytes, *, threads: int | None = None) -> ResolvedPatch:
    """Decode a delta against the state it was made from, into absolute indices and values. Nothing is changed.

    Raises a `DeltaError` for a delta that cannot be used, `BaseMismatch` (or another `StateError`) for a state that it was not made from.
    """
    plan = plan_resolution(state, delta_file.parse(delta))
    codec = codec_for(plan.tensors)
    resolution = codec.resolution(thread_count(threads), 2**63)
    resolve_plan(plan, resolution, thread_count(threads), codec, None)
    changing = [index for index, payload in enumerate(plan.payloads) if payload is not None]
    changed = {}
    for index, (indices, values) in zip(changing, resolution.changes([plan.place[index] for index in changing]), strict=True):
        tensor = plan.tensors[index]
        if tensor.whole is None:
            changed[tensor.name] = TensorPatch(indices, typed(values, tensor.dtype), tensor.shape)
        else:
            changed[tensor.name] = TensorPatch(indices + tensor.start, typed(values, tensor.dtype), tensor.whole)
    return ResolvedPatch(plan.file.before, plan.file.after, changed, _added(plan, resolution), plan.file.structure.removed)


def apply_delta(
    state: MutableMapping[str, Tensor], delta: DeltaBytes, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Turn a state into the next one, in place.

    The base is checked by digest in the same pass that decodes, then the result. On any error the state is as it was; but while the call
    runs, other threads may see a mix of both. (Who cannot have that resolves first, and applies the patch in a pause.) Tensors that vanish
    are deleted from `state`, tensors that appear are put into it. Beyond its inputs it needs at most 64 MiB and twice the size of the delta
    (and what appears): a larger patch is decoded a second time to be written.
    Raises as `resolve_delta` does, `StateNotWritable`, and `TensorsTied`.
    """
    plan = plan_resolution(state, delta_file.parse(delta))
    mark_writes(plan)
    codec = codec_for(plan.tensors)
    resolution = codec.resolution(thread_count(threads), _KEPT_CHANGES + memoryview(delta).nbytes)
    try:
        resolve_plan(plan, resolution, thread_count(threads), codec, progress)
        change_structure(state, _added(plan, resolution), plan.file.structure.removed)
    except BaseException:
        resolution.revert()
        raise
    resolution.settle()


@dataclass(slots=True)
class ResolutionPlan:
    """Which tensor of a state meets which payload. Jobs are counted over `tensors`, then those that appear."""

    file: DeltaFile
    tensors: list[TensorBits]
    added: list[tuple[str, DType, tuple[int, ...]]]
    keys: TensorKeys
    payloads: list[Span | None] = field(default_factory=list)
    """Of `tensors`."""
    writes: list[bool] = field(default_factory=list)
    """Which of them are written to."""
    first: set[int] = field(default_factory=set)
    """Jobs to be done before anything is written: their tensors are the same memory as others that are."""
    place: dict[int, int] = field(default_factory=dict)
    """Where the resolution has the tensor of a job."""

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
        """Bytes of weights of a job."""
        if number < len(self.tensors):
            return self.tensors[number].nbytes
        _, dtype, shape = self.added[number - len(self.tensors)]
        return math.prod(shape) * dtype.itemsize


def plan_resolution(state: State, file: DeltaFile) -> ResolutionPlan:
    structure = file.structure
    removed = set(structure.removed)
    for name in sorted({*file.payloads, *structure.removed, *structure.aliases, *(file.parts or ())} - structure.added.keys()):
        if name not in state:
            raise TensorMissing(f"the state has no tensor {name!r}.")
    for name in structure.added.keys() & state.keys():
        if name not in removed:
            raise TensorUnexpected(f"the state already has a tensor {name!r}.")
    added_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in structure.added.values())
    tensors = _covered(state, file.parts)
    added = [(name, dtype, shape) for name, (dtype, shape) in sorted(structure.added.items())]
    plan = ResolutionPlan(file, tensors, added, keys_of(tensors).followed_by(TensorKeys.of(added)))
    for tensor in tensors:
        payload = None if tensor.name in removed else file.payload(tensor.name)
        if payload is not None and payload[0] < payload[1] and file.data[payload[0]] != tensor.dtype.code:
            raise _wrong_type(tensor, file.data[payload[0]])
        plan.payloads.append(payload)
    plan.writes = [False] * len(tensors)
    if added_bytes > _MOST_ADDED + _MOST_ADDED_TIMES * len(file.data):
        raise DeltaTooLarge(f"the delta adds tensors of {added_bytes:,} bytes.")
    return plan


def _covered(state: State, parts: Parts | None) -> list[TensorBits]:
    """What a delta is about, in order of names: all of the state, or parts of some of its tensors."""
    names = state if parts is None else parts
    check_names(names)
    tensors = [named_bits(name, state[name]) for name in sorted(names)]
    if parts is None:
        return tensors
    for tensor in tensors:
        if parts[tensor.name][0] * tensor.dtype.itemsize % PART_ALIGNMENT:
            raise CorruptDelta(f"the part of tensor {tensor.name!r} begins at element {parts[tensor.name][0]}, where none may.")
    return [tensor.cut(*parts[tensor.name]) for tensor in tensors]


def _wrong_type(tensor: TensorBits, code: int) -> DtypeMismatch:
    theirs = DTYPES[code].name if code < len(DTYPES) else f"unknown ({code})"
    return DtypeMismatch(f"tensor {tensor.name!r} is {tensor.dtype.name}, its delta is for {theirs}.")


def resolve_plan(plan: ResolutionPlan, resolution: Resolution, threads: int, codec: Codec, progress: Progress | None) -> NDArray[np.int64]:
    """Decode everything and check both digests. How many elements change, by job."""
    before, after = Digest(), Digest()
    changed = np.zeros(len(plan), np.int64)
    removed = set(plan.file.structure.removed)
    held = len(plan.tensors)
    stays = np.array([tensor.name not in removed for tensor in plan.tensors] + [True] * len(plan.added), np.bool_)
    groups = [sorted(plan.first), [index for index in range(held) if index not in plan.first], range(held, len(plan))]
    try:
        for batch in (batch for group in groups for batch in batches(group, plan.nbytes, codec)):
            try:
                outcomes = resolution.add(plan.jobs(batch), plan.file.data)
            except (DtypeMismatch, ShapeMismatch) as error:
                if batch[0] < held:
                    raise
                raise CorruptDelta(f"a tensor that the delta adds is not of the type and size that it says: {error}") from None
            numbers = np.array(batch)
            changed[numbers] = outcomes.changed
            plan.place.update(zip(batch, range(len(plan.place), len(plan.place) + len(batch)), strict=True))
            if batch[0] < held:
                before += plan.keys.digest(outcomes.before, numbers)
            after += plan.keys.digest(outcomes.after[stays[numbers]], numbers[stays[numbers]])
            if progress:
                progress(sum(map(plan.nbytes, batch)))
    except CorruptDelta:
        # Decoded against another state than its own, a sound delta can look broken in many ways. Say what is really wrong.
        resolution.revert()
        actual = digest_tensors(plan.tensors, threads, codec)
        if actual != plan.file.before:
            raise _base_mismatch(actual, plan.file) from None
        raise
    if before != plan.file.before:
        raise _base_mismatch(before, plan.file)
    if after != plan.file.after:
        raise ResultMismatch(f"the delta promises a state with digest {plan.file.after}, but leads to {after}.")
    return changed


def _base_mismatch(found: Digest, file: DeltaFile) -> BaseMismatch:
    return BaseMismatch(f"the state has digest {found}; the delta was made from {file.before} and leads to {file.after}.")


def mark_writes(plan: ResolutionPlan) -> None:
    """Decide which jobs write: those of tensors that change, each memory once. Raises `StateNotWritable` before anything is done."""
    written: dict[object, Span] = {}
    held = list(zip(plan.tensors, plan.payloads, strict=True))
    apart = _are_apart(plan.tensors)
    for index, (tensor, payload) in enumerate(held):
        if payload is None or not tensor.size:
            continue
        check_writable(tensor)
        if apart:
            plan.writes[index] = True
        elif tensor.memory in written:
            plan.first.add(index)
        else:
            written[tensor.memory] = payload
            plan.writes[index] = True
    if apart:
        return
    # Tied tensors change together if their payloads are the same bytes, also where the delta was made from copies that were not tied.
    together = {tensor.name for tensor, payload in held if _is_same_change(plan.file.data, payload, written.get(tensor.memory))}
    targets = [tensor for tensor, write in zip(plan.tensors, plan.writes, strict=True) if write]
    changing = {tensor.name for tensor, payload in held if payload is not None}
    _check_overlap(targets, [tensor for tensor in plan.tensors if tensor.name not in together], changing)


def _is_same_change(data: memoryview, one: Span | None, other: Span | None) -> bool:
    return one is not None and other is not None and (one == other or data[slice(*one)] == data[slice(*other)])


def _are_apart(tensors: Sequence[TensorBits]) -> bool:
    """Whether no two tensors reach into each other: of nearly all states that is the end of it."""
    bounds = np.array([tensor.byte_bounds for tensor in tensors if tensor.size], np.int64).reshape(-1, 2)
    ordered = bounds[np.argsort(bounds[:, 0])]
    return bool((ordered[1:, 0] >= ordered[:-1, 1]).all())


def _check_overlap(targets: Sequence[TensorBits], others: Sequence[TensorBits], changing: Collection[str]) -> None:
    """Writing to a tensor must change no other one, unless they are the same memory and change in the same way."""
    tensors = [tensor for tensor in [*targets, *others] if tensor.size]
    bounds = sorted((*tensor.byte_bounds, index) for index, tensor in enumerate(tensors))
    open_: list[tuple[int, int]] = []  # the ends and indices of those that reach beyond the start of the next
    for start, end, index in bounds:
        open_ = [(reach, earlier) for reach, earlier in open_ if reach > start]
        for _, earlier in open_:
            if min(index, earlier) < len(targets) and _share_memory(tensors[index], tensors[earlier]):
                a, b = sorted([tensors[index].name, tensors[earlier].name])
                raise TensorsTied.of(a, b, changed=[name for name in (a, b) if name in changing])
        open_.append((end, index))


def _share_memory(a: TensorBits, b: TensorBits) -> bool:
    if not (a.on_host and b.on_host):
        return True  # on a device, to reach into the same range is enough
    shares_memory: Any = np.shares_memory  # releases of NumPy differ in how they declare its arguments
    try:
        return bool(shares_memory(a.bits, b.bits, max_work=10_000))
    except np.exceptions.TooHardError:
        return True


def _added(plan: ResolutionPlan, resolution: Resolution) -> dict[str, NDArray[Any]]:
    places = [plan.place[index] for index in range(len(plan.tensors), len(plan))]
    added = zip(plan.added, resolution.dense(places), strict=True)
    return {name: typed(elements, dtype, shape) for (name, dtype, shape), elements in added}

"""Deltas of whole states: encode two states, resolve or apply the result. The public functions of the codec."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .codec import default_codec
from .codec.base import Buffer, Codec, EncodeJob, Resolution, ResolveJob
from .errors import (
    BaseMismatch,
    CorruptDelta,
    DtypeMismatch,
    ResultMismatch,
    ShapeMismatch,
    StateNotWritable,
    TensorMissing,
    TensorUnexpected,
)
from .format import delta_file
from .format.delta_file import DeltaBytes, DeltaFile, Structure
from .format.digest import Digest, TensorKey
from .patch import ResolvedPatch, TensorPatch, change_structure, check_writable
from .tensors import State, Tensor, TensorBits, byte_bounds, check_name, tensor_bits

Progress = Callable[[int], None]
"""Called with the number of bytes of weights done since the last call."""

_BATCH = 1 << 29
"""Bytes of weights handed to the codec at a time: between batches Python reports progress and takes signals."""

_KEPT_CHANGES = 32 << 20
"""Decoded changes that `apply_delta` keeps, beyond the size of the delta itself."""


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """What a written delta came to."""

    bytes: int
    weight_bytes: int
    elements: int
    changed: int
    tensors_changed: int
    before: Digest
    after: Digest


def encode_delta(base: State, new: State, *, threads: int | None = None) -> bytes:
    """The delta file that turns the state `base` into the state `new`, bit for bit.

    States map names to NumPy arrays (bf16 and fp8 as `ml_dtypes`) or torch CPU tensors, of any shape and strides. Beyond its inputs it
    needs about twice the size of the result. The same states give the same bytes, whatever the number of threads.
    Raises a `TensorError` for what cannot be encoded.
    """
    pieces: list[Buffer] = []
    header, _ = _encode(base, new, _threads(threads), default_codec(), pieces.append, None)
    return b"".join([header, *pieces])


def write_delta(
    base: State, new: State, path: Path, *, threads: int | None = None, progress: Progress | None = None
) -> DeltaSummary:
    """Like `encode_delta`, into a file that appears whole or not at all, in memory that does not grow with the states."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as spool:
        header, summary = _encode(base, new, _threads(threads), default_codec(), spool.write, progress)
        spool.seek(0)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as out:
                out.write(header)
                shutil.copyfileobj(spool, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return summary


def resolve_delta(state: State, delta: DeltaBytes, *, threads: int | None = None) -> ResolvedPatch:
    """Decode a delta against the state it was made from, into absolute indices and values. Nothing is changed.

    Raises a `DeltaError` for a delta that cannot be used, `BaseMismatch` (or another `StateError`) for a state that it was not made from.
    """
    plan = _plan(state, delta_file.parse(delta))
    codec = default_codec()
    resolution = codec.resolution(_threads(threads), 2**63)
    _resolve(plan, resolution, _threads(threads), codec, None)
    changed = {}
    for tensor, job in zip(plan.tensors, plan.jobs, strict=False):
        if job.payload is not None:
            indices, values = resolution.changes(plan.place[tensor.name])
            changed[tensor.name] = TensorPatch(indices, values.view(tensor.dtype.numpy), tensor.shape)
    return ResolvedPatch(plan.file.before, plan.file.after, changed, _added(plan, resolution), plan.file.structure.removed)


def apply_delta(
    state: MutableMapping[str, Tensor], delta: DeltaBytes, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Turn a state into the next one, in place.

    The base is checked by digest in the same pass that decodes, then the result. On any error the state is as it was; but while the call runs,
    other threads may see a mix of both. (Who cannot have that resolves first, and applies the patch in a pause.) Tensors that vanish are deleted from `state`, tensors that appear are put into it. Beyond its inputs it needs
    at most 64 MiB and twice the size of the delta (and what appears): a larger patch is decoded a second time while it is written.
    Raises as `resolve_delta` does, and `StateNotWritable`.
    """
    plan = _plan(state, delta_file.parse(delta))
    _mark_writes(plan)
    codec = default_codec()
    resolution = codec.resolution(_threads(threads), _KEPT_CHANGES + memoryview(delta).nbytes)
    try:
        _resolve(plan, resolution, _threads(threads), codec, progress)
        change_structure(state, _added(plan, resolution), plan.file.structure.removed)
    except BaseException:
        resolution.revert()
        raise
    resolution.settle()


def state_digest(state: State, *, threads: int | None = None) -> Digest:
    """The digest of a state: equal for equal names, types, shapes and bits, in whatever order or memory layout (docs/format.md §2).

    It is linear: `patch.after - patch.before` of a resolved patch, added to the digest of its base, gives that of its result.
    """
    return _digest([tensor_bits(name, tensor) for name, tensor in state.items()], _threads(threads), default_codec())


# Encoding


@dataclass(slots=True)
class _Pair:
    """One tensor on its way into a delta; `old` None where it appears."""

    new: TensorBits
    old: TensorBits | None

    @property
    def nbytes(self) -> int:
        return self.new.bits.nbytes


def _encode(
    base: State, new: State, threads: int, codec: Codec, write: Callable[[Buffer], object], progress: Progress | None
) -> tuple[bytes, DeltaSummary]:
    """Hand the data section to `write`, piece by piece, and return the header that belongs before it."""
    for name in (*base, *new):
        check_name(name)
    names = sorted({*base, *new})
    added: dict[str, tuple[TensorBits, None]] = {}
    gone: list[TensorBits] = []
    pairs: list[_Pair] = []
    for name in names:
        old = tensor_bits(name, base[name]) if name in base else None
        now = tensor_bits(name, new[name]) if name in new else None
        if old is not None and (now is None or (old.dtype, old.shape) != (now.dtype, now.shape)):
            gone.append(old)
            old = None
        if now is not None:
            pairs.append(_Pair(now, old))
            if old is None:
                added[name] = (now, None)
    before = _digest(gone, threads, codec)
    after = Digest()
    aliases = _aliases(pairs)

    hasher = blake3()
    sizes: list[tuple[str, int]] = []
    changed = elements = weight_bytes = 0
    for batch in _batches(pairs, lambda pair: pair.nbytes):
        own = [pair for pair in batch if pair.new.name not in aliases]
        jobs = [EncodeJob(pair.old.bits if pair.old else None, pair.new.bits, pair.new.dtype, pair.new.key.seed) for pair in own]
        for pair, encoded in zip(own, codec.encode(jobs, threads), strict=True):
            key = pair.new.key
            if pair.old:
                before += key.digest(encoded.before)
            after += key.digest(encoded.after)
            changed += encoded.changed
            if encoded.payload:
                sizes.append((pair.new.name, sum(memoryview(piece).nbytes for piece in encoded.payload)))
                for piece in encoded.payload:
                    hasher.update(piece)
                    write(piece)
        tied = [pair for pair in batch if pair.new.name in aliases]
        before += _digest([pair.old for pair in tied if pair.old], threads, codec)
        after += _digest([pair.new for pair in tied], threads, codec)
        elements += sum(pair.new.bits.size for pair in batch)
        weight_bytes += sum(pair.nbytes for pair in batch)
        if progress:
            progress(sum(pair.nbytes for pair in batch))

    changing = {name for name, _ in sizes}
    structure = Structure(
        {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in added.items()},
        tuple(tensor.name for tensor in gone),
        {name: target for name, target in aliases.items() if target in changing},
    )
    header = delta_file.build_header(before, after, hasher.hexdigest(), sizes, structure)
    size = len(header) + sum(size for _, size in sizes)
    return header, DeltaSummary(size, weight_bytes, elements, changed, len(sizes), before, after)


def _aliases(pairs: Sequence[_Pair]) -> dict[str, str]:
    """Tensors that are one memory with an earlier one, in the base as well as in the new state."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for pair in pairs:
        if pair.old is None or pair.new.memory is None:
            continue
        target = first.setdefault((pair.old.memory, pair.new.memory), pair.new.name)
        if target != pair.new.name:
            aliases[pair.new.name] = target
    return aliases


# Decoding


@dataclass(slots=True)
class _Plan:
    """Which tensor of a state meets which payload. `jobs` are those of `tensors`, then those of the tensors that appear, in order of their names."""

    file: DeltaFile
    tensors: list[TensorBits]
    jobs: list[ResolveJob] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keys: list[TensorKey] = field(default_factory=list)
    first: set[str] = field(default_factory=set)
    """Tensors to be resolved before any is written: they are the same memory as another that is."""
    place: dict[str, int] = field(default_factory=dict)
    """Where the resolution has a tensor (those that appear: `+ name`)."""


def _plan(state: State, file: DeltaFile) -> _Plan:
    structure = file.structure
    for name in sorted({*file.payloads, *structure.removed, *structure.aliases} - structure.added.keys()):
        if name not in state:
            raise TensorMissing(f"the state has no tensor {name!r}.")
    for name in structure.added.keys() & state.keys():
        if name not in structure.removed:
            raise TensorUnexpected(f"the state already has a tensor {name!r}.")
    plan = _Plan(file, [tensor_bits(name, state[name]) for name in sorted(map(check_name, state))])
    for tensor in plan.tensors:
        payload = None if tensor.name in structure.removed else file.payload(tensor.name)
        if payload is not None:
            _check_type(tensor, payload)
        key = tensor.key
        plan.jobs.append(ResolveJob(tensor.bits, tensor.bits.size, payload, tensor.dtype, key.seed))
        plan.names.append(tensor.name)
        plan.keys.append(key)
    for name, (dtype, shape) in sorted(structure.added.items()):
        key = TensorKey.of(name, dtype, shape)
        count = math.prod(shape)
        plan.jobs.append(ResolveJob(None, count, file.payloads[name], dtype, key.seed))
        plan.names.append(name)
        plan.keys.append(key)
    return plan


def _check_type(tensor: TensorBits, payload: memoryview) -> None:
    if len(payload) and payload[0] != tensor.dtype.code:
        from .dtypes import DTYPES

        theirs = DTYPES[payload[0]].name if payload[0] < len(DTYPES) else f"unknown ({payload[0]})"
        raise DtypeMismatch(f"tensor {tensor.name!r} is {tensor.dtype.name}, its delta is for {theirs}.")


def _resolve(plan: _Plan, resolution: Resolution, threads: int, codec: Codec, progress: Progress | None) -> None:
    """Decode everything and check both digests."""
    before, after = Digest(), Digest()
    removed = set(plan.file.structure.removed)
    order = sorted(range(len(plan.jobs)), key=lambda index: plan.names[index] not in plan.first)
    groups = [order[: len(plan.first)], order[len(plan.first) :]]
    try:
        for batch in (batch for group in groups for batch in _batches(group, lambda index: plan.jobs[index].nbytes)):
            outcomes = resolution.add([plan.jobs[index] for index in batch])
            for index, outcome in zip(batch, outcomes, strict=True):
                appears = index >= len(plan.tensors)
                plan.place[("+ " if appears else "") + plan.names[index]] = len(plan.place)
                if not appears:
                    before += plan.keys[index].digest(outcome.before)
                if appears or plan.names[index] not in removed:
                    after += plan.keys[index].digest(outcome.after)
            if progress:
                progress(sum(plan.jobs[index].nbytes for index in batch))
    except CorruptDelta:
        # Decoded against another state than its own, a sound delta can look broken in many ways. Say what is really wrong.
        resolution.revert()
        found = _digest(plan.tensors, threads, codec)
        if found != plan.file.before:
            raise _base_mismatch(found, plan.file) from None
        raise
    if before != plan.file.before:
        raise _base_mismatch(before, plan.file)
    if after != plan.file.after:
        raise ResultMismatch(f"the delta promises a state with digest {plan.file.after}, but leads to {after}.")


def _base_mismatch(found: Digest, file: DeltaFile) -> BaseMismatch:
    return BaseMismatch(f"the state has digest {found}; the delta was made from {file.before} and leads to {file.after}.")


def _mark_writes(plan: _Plan) -> None:
    """Decide which jobs write: those of tensors that change, each memory once. Raises `StateNotWritable` before anything is done."""
    written: dict[object, tuple[str, memoryview | None]] = {}
    for index, tensor in enumerate(plan.tensors):
        job = plan.jobs[index]
        if job.payload is None or not job.count:
            continue
        check_writable(tensor)
        if tensor.memory in written:
            plan.first.add(tensor.name)
        else:
            written[tensor.memory] = (tensor.name, plan.file.payload(tensor.name))
            plan.jobs[index] = dataclasses.replace(job, write=True)
    targets = [tensor for index, tensor in enumerate(plan.tensors) if plan.jobs[index].write]
    others = [tensor for tensor in plan.tensors if tensor.memory not in written or plan.file.payload(tensor.name) is not written[tensor.memory][1]]
    _check_overlap(targets, others)


def _check_overlap(targets: Sequence[TensorBits], others: Sequence[TensorBits]) -> None:
    """Writing to a tensor must change no other one, unless they are the same memory and change in the same way."""
    tensors = [tensor for tensor in [*targets, *others] if tensor.bits.size]
    bounds = sorted((*byte_bounds(tensor.bits), index) for index, tensor in enumerate(tensors))
    reach, last = 0, -1
    for start, end, index in bounds:
        if start < reach and min(index, last) < len(targets) and _share_memory(tensors[index], tensors[last]):
            a, b = tensors[index].name, tensors[last].name
            raise StateNotWritable(f"tensors {a!r} and {b!r} overlap in memory, but do not change together.")
        if end > reach:
            reach, last = end, index


def _share_memory(a: TensorBits, b: TensorBits) -> bool:
    try:
        return np.shares_memory(a.bits, b.bits, max_work=10_000)
    except (np.exceptions.TooHardError if hasattr(np, "exceptions") else np.TooHardError):  # type: ignore[attr-defined]
        return True


def _added(plan: _Plan, resolution: Resolution) -> dict[str, NDArray[Any]]:
    return {
        name: resolution.dense(plan.place["+ " + name]).view(dtype.numpy).reshape(shape)
        for name, (dtype, shape) in plan.file.structure.added.items()
    }


# Both


def _digest(tensors: Sequence[TensorBits], threads: int, codec: Codec) -> Digest:
    total = Digest()
    keys = [tensor.key for tensor in tensors]
    for key, sums in zip(keys, codec.digest([(t.bits, k.seed) for t, k in zip(tensors, keys, strict=True)], threads), strict=True):
        total += key.digest(sums)
    return total


_Item = TypeVar("_Item")


def _batches(items: Sequence[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= _BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _threads(threads: int | None) -> int:
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return threads

"""The common part of all plans. A plan says which tensor of a state meets which bytes of a delta, and which memory is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Codec, Resolution
from ..codec.bits import Bits, Indices
from ..dtypes import DType
from ..errors import BaseMismatch, CorruptDelta, DeltaTooLarge, ResultMismatch, TensorMissing, TensorUnexpected
from ..format.delta_file import Coverage, DeltaFile, Parts, Structure
from ..format.digest import PART_ALIGNMENT, Digest, TensorKeys
from ..tensors.bits import State, TensorBits
from ..tensors.columns import Columns
from ..tensors.state import Progress, digest_tensors

_ADDED_BYTES, _ADDED_BYTES_PER_BYTE = 1 << 30, 1024
"""Added tensors may have this many bytes, plus this many for each byte of the delta. Only zeros compress better than that."""

AddedTensor: TypeAlias = tuple[str, DType, tuple[int, ...]]


class Plan(Protocol):
    """The work of one delta. Tensors are numbered: first the `tensors` of the state in the order of names, then the `added` ones."""

    tensors: Sequence[TensorBits]
    added: Sequence[AddedTensor]
    keys: TensorKeys
    writes: NDArray[np.bool_]
    """Whether each of `tensors` is written to."""
    changed: NDArray[np.int64]
    """The number of changed elements of each tensor, once the delta is resolved."""
    numbers: NDArray[np.int64]
    """The number of each tensor in the resolution, once the delta is resolved."""

    @property
    def file(self) -> DeltaFile: ...

    def mark_writes(self, codec: Codec, threads: int, *, deferred: bool) -> None:
        """Decide which tensors are written: those that change, each memory once. `deferred` says that all is decoded before any write.

        Raise `StateNotWritable` or `TensorsTied`, before anything is written, if the state cannot take the changes.
        """
        ...

    def check_writes(self) -> None:
        """Raise `StateNotWritable`, once the delta is resolved, if a tensor that changes could not be written."""
        ...

    def resolve(self, resolution: Resolution, codec: Codec, threads: int, progress: Progress | None) -> tuple[Digest, Digest]:
        """Decode everything. Return the digests before and after. Raise `CorruptDelta` or another error if the delta does not fit."""
        ...


def resolve_plan(plan: Plan, resolution: Resolution, codec: Codec, threads: int, progress: Progress | None) -> None:
    """Decode everything and check both digests."""
    try:
        before, after = plan.resolve(resolution, codec, threads, progress)
    except CorruptDelta:
        # A valid delta that is decoded against the wrong state can look corrupt in many ways. Report the real cause.
        resolution.revert()
        check_base(plan, codec, threads)
        raise
    check_digests(plan, before, after)


def check_digests(plan: Plan, before: Digest, after: Digest) -> None:
    """Raise `BaseMismatch` or `ResultMismatch` unless a delta was made from the state with the digest `before`, and leads to `after`."""
    check_file(plan.file, before, after)


def check_file(file: DeltaFile, before: Digest, after: Digest) -> None:
    """Raise as `check_digests` does."""
    if before != file.before:
        raise _base_mismatch(before, file)
    if after != file.after:
        raise ResultMismatch(f"the delta promises a state with digest {file.after}, but leads to {after}.")


def check_base(plan: Plan, codec: Codec, threads: int) -> None:
    """Raise `BaseMismatch` if a delta was made from another state."""
    actual = digest_tensors(plan.tensors, threads, codec)
    if actual != plan.file.before:
        raise _base_mismatch(actual, plan.file) from None


def changes_of(plan: Plan, tensors: Sequence[int], codec: Codec, threads: int) -> Sequence[tuple[Indices, Bits]]:
    """Decode the delta only to see what happens to some tensors. Nothing is written."""
    writes, plan.writes = plan.writes, np.zeros_like(plan.writes)
    try:
        resolution = codec.resolution(threads, 0)
        resolve_plan(plan, resolution, codec, threads, None)
        return resolution.changes(plan.numbers[list(tensors)].tolist())
    finally:
        plan.writes = writes


def cover(coverage: Coverage, plan: Plan) -> None:
    """Note the elements that a delta covers. Raise `CorruptDelta` if an earlier one covered some of them."""
    if isinstance(plan.tensors, Columns):
        coverage.add_whole(plan.tensors.layout.names)
    else:
        coverage.add({tensor.name: (tensor.start, tensor.start + tensor.size) for tensor in plan.tensors})


def addresses_of(tensors: Sequence[TensorBits]) -> NDArray[np.uint64]:
    """Return the addresses of tensors that have elements."""
    if isinstance(tensors, Columns):
        return tensors.addresses[tensors.layout.sizes > 0]
    return np.array([tensor.address for tensor in tensors if tensor.size], np.uint64)


def itemsizes_of(tensors: Sequence[TensorBits]) -> NDArray[np.int64]:
    """Return the bytes of one element of each tensor."""
    if isinstance(tensors, Columns):
        return tensors.layout.itemsizes
    return np.array([tensor.dtype.itemsize for tensor in tensors], np.int64)


def sizes_of(tensors: Sequence[TensorBits]) -> NDArray[np.int64]:
    """Return the number of elements of each tensor."""
    if isinstance(tensors, Columns):
        return tensors.layout.sizes
    return np.array([tensor.size for tensor in tensors], np.int64)


def check_structure(state: State, structure: Structure, names: Collection[str]) -> None:
    """Raise unless the state has the tensors that a delta removes, ties or otherwise names, and none that it adds."""
    if not (structure.removed or structure.aliases or structure.added or names):
        return
    for name in sorted({*structure.removed, *structure.aliases, *names} - structure.added.keys()):
        if name not in state:
            raise TensorMissing(f"the state has no tensor {name!r}.")
    for name in structure.added.keys() & state.keys():
        if name not in structure.removed:
            raise TensorUnexpected(f"the state already has a tensor {name!r}.")


def check_added(added: Sequence[AddedTensor], delta_bytes: int) -> None:
    """Raise `DeltaTooLarge` if the added tensors are out of proportion to the delta."""
    added_bytes = sum(size_of(dtype, shape) for _, dtype, shape in added)
    if added_bytes > _ADDED_BYTES + _ADDED_BYTES_PER_BYTE * delta_bytes:
        raise DeltaTooLarge(f"the delta adds tensors of {added_bytes:,} bytes.")


def size_of(dtype: DType, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def cut_parts(tensors: Sequence[TensorBits], parts: Parts) -> list[TensorBits]:
    """Return the parts of tensors that a delta covers."""
    for tensor in tensors:
        start = parts[tensor.name][0]
        if start * tensor.dtype.itemsize % PART_ALIGNMENT:
            raise CorruptDelta(
                f"the part of tensor {tensor.name!r} starts at element {start}, which is not at a multiple of {PART_ALIGNMENT} bytes."
            )
    return [tensor.cut(*parts[tensor.name]) for tensor in tensors]


def _base_mismatch(found: Digest, file: DeltaFile) -> BaseMismatch:
    return BaseMismatch(f"the state has digest {found}; the delta was made from {file.before} and leads to {file.after}.")

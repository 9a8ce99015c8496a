"""From a delta file and the state it was made from to a patch, or to the next state."""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Codec, Resolution
from ..errors import BaseMismatch, CorruptDelta, DtypeMismatch, ResultMismatch, ShapeMismatch
from ..format import delta_file
from ..format.delta_file import DeltaBytes, DeltaFile
from ..format.digest import Digest
from ..tensors.bits import State, Tensor, typed
from ..tensors.state import Progress, batches, codec_for, digest_tensors, thread_count
from .patch import ResolvedPatch, TensorPatch, change_structure
from .plan import ResolutionPlan, mark_writes, plan_resolution

_KEPT_CHANGES = 32 << 20
"""Bytes of decoded changes that `apply_delta` keeps, in addition to as many as the delta has."""


def resolve_delta(state: State, delta: DeltaBytes, *, threads: int | None = None) -> ResolvedPatch:
    """Decode a delta against the state it was made from, into absolute indices and values. Nothing is changed.

    Raises a `DeltaError` if the delta cannot be used, and `BaseMismatch` or another `StateError` if it was made from another state.

    Parameters
    ----------
    state
        Names to NumPy arrays or torch tensors, on the CPU or a GPU.
    delta
        The bytes of a delta file.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    plan = plan_resolution(state, delta_file.parse(delta))
    codec = codec_for(plan.tensors)
    resolution = codec.resolution(thread_count(threads), 2**63)
    resolve_plan(plan, resolution, thread_count(threads), codec, None)
    changing = [index for index, payload in enumerate(plan.payloads) if payload is not None]
    changed = {}
    for index, (indices, values) in zip(changing, resolution.changes([plan.resolution_numbers[index] for index in changing]), strict=True):
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

    One pass decodes the delta and checks the digests of the base and of the result. After any error the state is as it was. While the
    call runs, other threads may see a mix of both states; to avoid that, use `resolve_delta` and apply the patch in a pause. Tensors that
    the delta removes are deleted from `state`, and tensors that it adds are put into it. Beyond its inputs and the added tensors, the call
    needs at most 64 MiB and twice the size of the delta: it decodes a larger patch a second time to write it.

    Raises as `resolve_delta` does, and `StateNotWritable` or `TensorsTied`.

    Parameters
    ----------
    state
        Names to NumPy arrays or torch tensors, on the CPU or a GPU. They are changed.
    delta
        The bytes of a delta file.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    progress
        Called now and then with the number of bytes of weights processed since its last call.
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


def resolve_plan(plan: ResolutionPlan, resolution: Resolution, threads: int, codec: Codec, progress: Progress | None) -> NDArray[np.int64]:
    """Decode everything and check both digests. Return how many elements change, by job."""
    before, after = Digest(), Digest()
    changed = np.zeros(len(plan), np.int64)
    removed = set(plan.file.structure.removed)
    held = len(plan.tensors)
    stays = np.array([tensor.name not in removed for tensor in plan.tensors] + [True] * len(plan.added), np.bool_)
    groups = [sorted(plan.first), [index for index in range(held) if index not in plan.first], range(held, len(plan))]
    numbers_in_resolution = plan.resolution_numbers
    try:
        for batch in (batch for group in groups for batch in batches(group, plan.nbytes, codec)):
            try:
                outcomes = resolution.add(plan.jobs(batch), plan.file.data)
            except (DtypeMismatch, ShapeMismatch) as error:
                if batch[0] < held:
                    raise
                raise CorruptDelta(f"a tensor that the delta adds has another type or size than the delta says: {error}") from None
            numbers = np.array(batch)
            changed[numbers] = outcomes.changed
            first = len(numbers_in_resolution)
            numbers_in_resolution.update(zip(batch, range(first, first + len(batch)), strict=True))
            if batch[0] < held:
                before += plan.keys.digest(outcomes.before, numbers)
            after += plan.keys.digest(outcomes.after[stays[numbers]], numbers[stays[numbers]])
            if progress:
                progress(sum(map(plan.nbytes, batch)))
    except CorruptDelta:
        # A valid delta that is decoded against the wrong state can look corrupt in many ways. Report the real cause.
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


def _added(plan: ResolutionPlan, resolution: Resolution) -> dict[str, Tensor]:
    numbers = [plan.resolution_numbers[index] for index in range(len(plan.tensors), len(plan))]
    added = zip(plan.added, resolution.dense(numbers), strict=True)
    return {name: typed(elements, dtype, shape) for (name, dtype, shape), elements in added}

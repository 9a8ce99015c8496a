"""From a delta file and the state it was made from to a patch, or to the next state."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np

from ..codec.base import Codec, Resolution
from ..errors import CorruptDelta
from ..format import delta_file
from ..format.delta_file import Coverage, DeltaBytes, DeltaFile, GroupedDelta
from ..tensors.bits import State, Tensor, typed
from ..tensors.state import Progress, codec_for, thread_count
from .grouped_plan import GroupedPlan, resolve_together
from .named_plan import NamedPlan
from .patch import ResolvedPatch, TensorPatch, change_structure
from .plan import Plan, check_base, check_digests, cover, resolve_plan

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
    return resolve_file(state, delta_file.parse(delta), threads=threads)


def resolve_file(state: State, file: DeltaFile, *, threads: int | None = None) -> ResolvedPatch:
    """Like `resolve_delta`, for a delta that is parsed already."""
    plan = plan_delta(state, file)
    codec = codec_for(plan.tensors)
    resolution = codec.resolution(thread_count(threads), 2**63)
    resolve_plan(plan, resolution, codec, thread_count(threads), None)
    changing = np.flatnonzero(plan.changed[: len(plan.tensors)]).tolist()
    changed = {}
    for index, (indices, values) in zip(changing, resolution.changes(plan.numbers[changing].tolist()), strict=True):
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
    apply_file(state, delta_file.parse(delta), threads=threads, progress=progress)


def apply_file(
    state: MutableMapping[str, Tensor],
    file: DeltaFile,
    *,
    coverage: Coverage | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Like `apply_delta`, for a delta that is parsed already. Return the number of tensors that are changed or added.

    `coverage` notes the elements that the delta covers, and may refuse them.
    """
    plan = plan_delta(state, file)
    if coverage is not None:
        cover(coverage, plan)
    _apply_plan(state, plan, codec_for(plan.tensors), thread_count(threads), progress)
    return int(np.count_nonzero(plan.changed[: len(plan.tensors)])) + len(plan.added)


def _apply_plan(state: MutableMapping[str, Tensor] | None, plan: Plan, codec: Codec, threads: int, progress: Progress | None) -> None:
    """Apply a delta. The state is only needed if tensors are added or removed."""
    plan.mark_writes(codec, threads, deferred=False)
    resolution = codec.resolution(threads, _KEPT_CHANGES + len(plan.file.data))
    try:
        resolve_plan(plan, resolution, codec, threads, progress)
        plan.check_writes()
        if state is not None:
            change_structure(state, _added(plan, resolution), plan.file.structure.removed)
    except BaseException:
        resolution.revert()
        raise
    resolution.settle()


def apply_many(states: Sequence[tuple[State, DeltaBytes]], *, threads: int | None = None) -> None:
    """Do what `apply_delta` does with each pair of a state and a delta. The deltas must not add or remove tensors.

    A GPU decodes all of them at once, which takes little more time than one of them, and then writes them all: after an error all states
    are as they were. On the host they are applied one after the other, and an error leaves those before it changed.

    Raises as `apply_delta` does, and `CorruptDelta` if a delta adds or removes tensors.

    Parameters
    ----------
    states
        The pairs. The states must not share memory.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    if not states:
        return
    files = [delta_file.parse(delta, names=state) for state, delta in states]
    if any(file.structure.added or file.structure.removed for file in files):
        raise CorruptDelta("a delta adds or removes tensors, but only values can be changed here.")
    count = thread_count(threads)
    plans = [plan_delta(state, file) for (state, _), file in zip(states, files, strict=True)]
    codecs = [codec_for(plan.tensors) for plan in plans]
    together = [plan for plan, codec in zip(plans, codecs, strict=True) if isinstance(plan, GroupedPlan) and codec.prefers_whole_state]
    if len(together) < len(plans):
        for plan, codec in zip(plans, codecs, strict=True):
            _apply_plan(None, plan, codec, count, None)
        return
    resolution = codecs[0].resolution(count, _KEPT_CHANGES + sum(len(file.data) for file in files))
    try:
        for plan in plans:
            plan.mark_writes(codecs[0], count, deferred=False)
        try:
            digests = resolve_together(together, resolution, codecs[0], count)
        except CorruptDelta:
            resolution.revert()
            for plan in plans:
                check_base(plan, codecs[0], count)
            raise
        for plan, (before, after) in zip(plans, digests, strict=True):
            check_digests(plan, before, after)
            plan.check_writes()
    except BaseException:
        resolution.revert()
        raise
    resolution.settle()


def plan_delta(state: State, file: DeltaFile) -> Plan:
    """Match the tensors of a state with a delta. Raise a `DeltaError` or `StateError` if they do not fit."""
    return GroupedPlan(state, file) if isinstance(file, GroupedDelta) else NamedPlan(state, file)


def _added(plan: Plan, resolution: Resolution) -> dict[str, Tensor]:
    numbers = plan.numbers[len(plan.tensors) :].tolist()
    added = zip(plan.added, resolution.dense(numbers), strict=True)
    return {name: typed(elements, dtype, shape) for (name, dtype, shape), elements in added}

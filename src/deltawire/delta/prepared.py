"""A change of a state that is ready to be made: everything decoded and checked, and then only a swap of values."""

from __future__ import annotations

from collections.abc import MutableMapping

from ..codec.base import Resolution
from ..errors import CorruptDelta, TensorsTied
from ..format import delta_file
from ..format.delta_file import Coverage, DeltaBytes, Span
from ..format.digest import Digest
from ..tensors.bits import Tensor
from ..tensors.state import codec_for, thread_count
from .resolve import ResolutionPlan, mark_writes, plan_resolution, resolve_plan


class PreparedUpdate:
    """Deltas decoded against a state, or each against a part of it, to be applied together in the shortest possible time, and taken back.

    >>> update = PreparedUpdate()
    >>> update.add(state, delta)      # decodes and checks; changes nothing
    >>> update.apply()                # all of it; cannot fail half-way
    >>> update.revert()               # the state is again what it was

    It holds on to the arrays, and to about 4 bytes and the old value per changed element (`nbytes`). Between `add` and `apply`, and between
    `apply` and `revert`, the state must not be changed by anything else: the elements would get a mix of values. Parts must not overlap,
    but for tied tensors: the same memory under several names, which must change in the same way under each (`TensorsTied`).
    """

    def __init__(self, *, threads: int | None = None) -> None:
        self._threads = thread_count(threads)
        self._resolution: Resolution | None = None
        self._is_ready = self.is_applied = False
        self._coverage = Coverage()
        self._data: list[memoryview] = []
        """Of the deltas that were added."""
        self._met: dict[object, tuple[str, int, Span | None]] = {}
        """By memory: the tensor that has it, in which delta, and where its payload is there."""
        self.changed = 0
        """Elements that it changes."""
        self.nbytes = 0

    def add(self, state: MutableMapping[str, Tensor], delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against the state that it was made from. Returns the digests before and after. Nothing is changed.

        Raises as `apply_delta` does, after which the update must not be used; and `CorruptDelta` for a delta that adds or removes tensors,
        since that is no change of values.
        """
        if self._is_ready:
            raise ValueError("the update was applied already; nothing can be added to it")
        file = delta_file.parse(delta, names=state)
        if file.structure.added or file.structure.removed:
            raise CorruptDelta("the delta adds or removes tensors, which has no place here.")
        plan = plan_resolution(state, file)
        self._coverage.add({tensor.name: (tensor.start, tensor.start + tensor.size) for tensor in plan.tensors})
        mark_writes(plan)
        self._write_once(plan)
        codec = codec_for(plan.tensors)
        if self._resolution is None:  # all parts are where the first is: on the host, or on one GPU
            self._resolution = codec.deferred_resolution(self._threads)
        found = resolve_plan(plan, self._resolution, self._threads, codec, None)
        for tensor, write, changed in zip(plan.tensors, plan.writes, found.tolist(), strict=True):
            if write:
                self.changed += changed
                self.nbytes += changed * (4 + tensor.dtype.itemsize)
        return file.before, file.after

    def apply(self) -> None:
        """Write the new values. Does nothing if they are written."""
        if not self.is_applied:
            self._exchange()

    def revert(self) -> None:
        """Put the old values back. Does nothing if they are there."""
        if self.is_applied:
            self._exchange()

    def _write_once(self, plan: ResolutionPlan) -> None:
        """Leave out writes to memory that an earlier part writes already, under another name."""
        self._data.append(plan.file.data)
        for number, tensor in enumerate(plan.tensors):
            memory = tensor.memory
            if memory is None:
                continue
            name, part, payload = self._met.setdefault(memory, (tensor.name, len(self._data) - 1, plan.payloads[number]))
            if name == tensor.name:
                continue
            if _bytes(self._data[part], payload) != _bytes(plan.file.data, plan.payloads[number]):  # the same change is the same bytes
                changed = [owner for owner, span in ((name, payload), (tensor.name, plan.payloads[number])) if span is not None]
                raise TensorsTied.of(name, tensor.name, changed=changed)
            plan.writes[number] = False

    def _exchange(self) -> None:
        if not self._is_ready:
            if self._resolution is not None:
                self._resolution.compact()
            self._coverage = Coverage()
            self._met.clear()
            self._data.clear()
            self._is_ready = True
        self.is_applied = not self.is_applied
        if self._resolution is not None:
            self._resolution.exchange()


def _bytes(data: memoryview, payload: Span | None) -> memoryview | None:
    return None if payload is None else data[slice(*payload)]

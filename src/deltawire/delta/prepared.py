"""A change of a state that is decoded and checked, so that applying it is only a swap of values."""

from __future__ import annotations

from collections.abc import MutableMapping

from ..codec.base import Resolution
from ..errors import CorruptDelta, TensorsTied
from ..format import delta_file
from ..format.delta_file import ByteRange, Coverage, DeltaBytes
from ..format.digest import Digest
from ..tensors.bits import Tensor
from ..tensors.state import codec_for, thread_count
from .plan import ResolutionPlan, mark_writes, plan_resolution
from .resolve import resolve_plan


class PreparedUpdate:
    """Deltas that are decoded against a state, or each against a part of it, and then applied together in the shortest possible time.

    >>> update = PreparedUpdate()
    >>> update.add(state, delta)      # decodes and checks; changes nothing
    >>> update.apply()                # all of it; cannot fail half-way
    >>> update.revert()               # the state is again what it was

    It keeps the arrays alive, and needs about 4 bytes and the size of one element for each changed element (`nbytes`). Nothing else may
    change the state between `add` and `apply`, or between `apply` and `revert`: its elements would get a mix of values. The parts must not
    overlap. Only tied tensors may have the same memory, and they must change in the same way under each name (`TensorsTied`).

    Parameters
    ----------
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """

    def __init__(self, *, threads: int | None = None) -> None:
        self._threads = thread_count(threads)
        self._resolution: Resolution | None = None
        self._is_ready = self.is_applied = False
        self._coverage = Coverage()
        self._data: list[memoryview] = []
        """The data of each delta that was added."""
        self._tensor_at: dict[object, tuple[str, int, ByteRange | None]] = {}
        """By memory: the name of its first tensor, the number of that tensor's delta, and the range of its payload."""
        self.changed = 0
        """The number of elements that the update changes."""
        self.nbytes = 0
        """The memory that the update needs, in bytes."""

    def add(self, state: MutableMapping[str, Tensor], delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against the state that it was made from, without changing anything. Return the digests before and after.

        Raises as `apply_delta` does, and `CorruptDelta` if the delta adds or removes tensors, because only values can be swapped. After an
        error the update must not be used.

        Parameters
        ----------
        state
            The state that the delta was made from, or a part of a larger one.
        delta
            The bytes of a delta file.
        """
        if self._is_ready:
            raise ValueError("the update was applied already; nothing can be added to it")
        file = delta_file.parse(delta, names=state)
        if file.structure.added or file.structure.removed:
            raise CorruptDelta("the delta adds or removes tensors, but a prepared update can only change values.")
        plan = plan_resolution(state, file)
        self._coverage.add({tensor.name: (tensor.start, tensor.start + tensor.size) for tensor in plan.tensors})
        mark_writes(plan)
        self._skip_repeated_writes(plan)
        codec = codec_for(plan.tensors)
        if self._resolution is None:  # all parts are on the same device as the first: on the host, or on one GPU
            self._resolution = codec.deferred_resolution(self._threads)
        found = resolve_plan(plan, self._resolution, self._threads, codec, None)
        for tensor, write, changed in zip(plan.tensors, plan.writes, found.tolist(), strict=True):
            if write:
                self.changed += changed
                self.nbytes += changed * (4 + tensor.dtype.itemsize)
        return file.before, file.after

    def apply(self) -> None:
        """Write the new values. Does nothing if they are written already."""
        if not self.is_applied:
            self._exchange()

    def revert(self) -> None:
        """Restore the old values. Does nothing if the new ones are not written."""
        if self.is_applied:
            self._exchange()

    def _skip_repeated_writes(self, plan: ResolutionPlan) -> None:
        """Skip writes to memory that an earlier delta writes already, under another name."""
        self._data.append(plan.file.data)
        for number, tensor in enumerate(plan.tensors):
            memory = tensor.memory
            if memory is None:
                continue
            name, part, payload = self._tensor_at.setdefault(memory, (tensor.name, len(self._data) - 1, plan.payloads[number]))
            if name == tensor.name:
                continue
            if _bytes(self._data[part], payload) != _bytes(plan.file.data, plan.payloads[number]):  # equal changes have equal bytes
                changed = [owner for owner, changes in ((name, payload), (tensor.name, plan.payloads[number])) if changes is not None]
                raise TensorsTied.of(name, tensor.name, changed=changed)
            plan.writes[number] = False

    def _exchange(self) -> None:
        if not self._is_ready:
            if self._resolution is not None:
                self._resolution.compact()
            self._coverage = Coverage()
            self._tensor_at.clear()
            self._data.clear()
            self._is_ready = True
        self.is_applied = not self.is_applied
        if self._resolution is not None:
            self._resolution.exchange()


def _bytes(data: memoryview, payload: ByteRange | None) -> memoryview | None:
    return None if payload is None else data[slice(*payload)]

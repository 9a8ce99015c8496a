"""A change of a state that is decoded and checked, so that applying it is only a swap of values."""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np

from ..codec.base import Codec, Resolution
from ..errors import CorruptDelta, TensorsTied
from ..format import delta_file
from ..format.delta_file import Coverage, DeltaBytes
from ..format.digest import Digest
from ..tensors.bits import Tensor
from ..tensors.state import codec_for, thread_count
from .grouped_plan import is_same_change
from .plan import Plan, addresses_of, changes_of, cover, itemsizes_of, resolve_plan
from .resolve import plan_delta


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
        self._plans: list[Plan] = []
        """The plans of the deltas that were added."""
        self._addresses = np.zeros(0, np.uint64)
        """The addresses of all tensors of these plans."""
        self._tensor_at: dict[object, tuple[Plan, int]] | None = None
        """By memory: the plan of the delta that covered it first, and the number of the tensor there. None until an address repeats."""
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
        plan = plan_delta(state, file)
        cover(self._coverage, plan)
        codec = codec_for(plan.tensors)
        plan.mark_writes(codec, self._threads, deferred=True)
        self._skip_repeated_writes(plan, codec)
        if self._resolution is None:  # all parts are on the same device as the first: on the host, or on one GPU
            self._resolution = codec.deferred_resolution(self._threads)
        resolve_plan(plan, self._resolution, codec, self._threads, None)
        plan.check_writes()
        changed = np.where(plan.writes, plan.changed, 0)
        self.changed += int(changed.sum())
        self.nbytes += int((changed * (4 + itemsizes_of(plan.tensors))).sum())
        return file.before, file.after

    def apply(self) -> None:
        """Write the new values. Does nothing if they are written already."""
        if not self.is_applied:
            self._exchange()

    def revert(self) -> None:
        """Restore the old values. Does nothing if the new ones are not written."""
        if self.is_applied:
            self._exchange()

    def _skip_repeated_writes(self, plan: Plan, codec: Codec) -> None:
        """Skip writes to memory that an earlier delta covers already, under another name. Raise `TensorsTied` if it changes differently."""
        seen, here = self._addresses, addresses_of(plan.tensors)
        self._addresses = np.concatenate([seen, here])
        self._plans.append(plan)
        if self._tensor_at is None:
            if not np.intersect1d(seen, here).size:
                return
            pairs = ((earlier, number) for earlier in self._plans[:-1] for number in range(len(earlier.tensors)))
            self._tensor_at = {}
            for earlier, number in pairs:
                self._tensor_at.setdefault(earlier.tensors[number].memory, (earlier, number))
        for number, tensor in enumerate(plan.tensors):
            memory = tensor.memory
            if memory is None:
                continue
            earlier, first = self._tensor_at.setdefault(memory, (plan, number))
            if earlier is plan or earlier.tensors[first].name == tensor.name:
                continue
            old, new = changes_of(earlier, [first], codec, self._threads)[0], changes_of(plan, [number], codec, self._threads)[0]
            if not is_same_change(old, new):
                changed = [each.name for each, (indices, _) in ((earlier.tensors[first], old), (tensor, new)) if len(indices)]
                raise TensorsTied.of(earlier.tensors[first].name, tensor.name, changed=changed)
            plan.writes[number] = False

    def _exchange(self) -> None:
        if not self._is_ready:
            if self._resolution is not None:
                self._resolution.compact()
            self._coverage = Coverage()
            self._tensor_at = None
            self._plans.clear()
            self._is_ready = True
        self.is_applied = not self.is_applied
        if self._resolution is not None:
            self._resolution.exchange()

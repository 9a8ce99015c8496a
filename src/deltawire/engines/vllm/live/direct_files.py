"""The files of an update that change only direct tensors.

A GPU decodes several of them with one call, because each call takes Python long.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....codec.base import Pace, Resolution
from ....delta.grouped_plan import GroupedPlan, resolve_together
from ....delta.plan import Plan, check_base, check_digests, resolve_plan, sizes_of
from ....errors import CorruptDelta
from ....tensors.columns import Columns
from ....tensors.gpu_handover import on_side_stream
from ....tensors.state import codec_for
from .direct_patches import DirectPatches
from .direct_tensors import DirectTensors

_MOST_ELEMENTS, _MOST_BYTES = 2**32 - 1024, 1 << 28
"""The most elements and bytes of the files that a GPU decodes with one call, unless one file has more. A call cannot find more changes, and
it copies the files into pinned memory.
"""


class DirectFiles:
    """Decodes files. `complete` must be called when all of them are added.

    Parameters
    ----------
    tensors
        All direct tensors.
    patches
        What was decoded goes there.
    threads
        Number of threads for decoding on the host.
    pace
        Waits between parts of the work of a GPU. None if nothing waits.
    """

    def __init__(self, tensors: DirectTensors, patches: DirectPatches, *, threads: int, pace: Pace | None) -> None:
        self._tensors = tensors
        self._patches = patches
        self._threads = threads
        self._pace = pace
        self._waiting: list[GroupedPlan] = []
        """Files that are not decoded yet."""
        self._elements = self._nbytes = 0
        """The elements and bytes of these files."""
        self._alone: Resolution | None = None
        """The changes of files that are decoded one by one."""

    def add(self, plan: Plan) -> Sequence[Plan]:
        """Decode a file now, or later together with others. Return the plans that are decoded now."""
        codec = codec_for(plan.tensors)
        plan.writes[:] = True
        if codec.prefers_whole_state and isinstance(plan, GroupedPlan):
            elements, nbytes = _elements_of(plan), len(plan.file.data)
            is_full = self._elements + elements > _MOST_ELEMENTS or self._nbytes + nbytes > _MOST_BYTES
            decoded = self.resolve() if is_full else ()
            self._waiting.append(plan)
            self._elements, self._nbytes = self._elements + elements, self._nbytes + nbytes
            return decoded
        if self._alone is None:
            self._alone = codec.deferred_resolution(self._threads)
        with on_side_stream(self._tensors.state) as wait:
            resolve_plan(plan, self._alone, codec, self._threads, None)
            wait()
        return (plan,)

    def complete(self) -> Sequence[Plan]:
        """Decode what is left. Return the plans that are decoded now."""
        plans = self.resolve()
        if self._alone is not None:
            self._patches.add(self._alone)
            self._alone = None
        return plans

    def resolve(self) -> Sequence[Plan]:
        """Decode the files that wait with one call of the codec. Return their plans."""
        plans, self._waiting = self._waiting, []
        self._elements = self._nbytes = 0
        if not plans:
            return ()
        codec, threads = codec_for(plans[0].tensors), self._threads if self._pace is None else 1  # the server needs the other cores
        resolution = codec.deferred_resolution(self._threads, self._pace)
        with on_side_stream(self._tensors.state) as wait:
            try:
                digests = resolve_together(plans, resolution, codec, threads)
            except CorruptDelta:  # decoded against wrong weights, a valid delta can look corrupt
                for plan in plans:
                    check_base(plan, codec, self._threads)
                raise
            for plan, (before, after) in zip(plans, digests, strict=True):
                check_digests(plan, before, after)
            self._patches.add(resolution, plans)
            wait()
        return plans


def _elements_of(plan: Plan) -> int:
    """Return the number of elements that a delta may change, or a larger number. Two elements may share a byte."""
    return plan.tensors.layout.elements if isinstance(plan.tensors, Columns) else 2 * int(sizes_of(plan.tensors).sum())

"""The files of an update that change only direct tensors.

A GPU decodes several of them with one call, because each call takes Python long.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....codec.base import Pace, Resolution
from ....delta.grouped_plan import GroupedPlan, resolve_together
from ....delta.plan import Plan, check_base, check_digests, resolve_plan
from ....errors import CorruptDelta
from ....tensors.gpu_handover import on_side_stream
from ....tensors.state import codec_for
from .direct_patches import DirectPatches
from .direct_tensors import DirectTensors

_TOGETHER = 16
"""The number of files that a GPU decodes with one call."""


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
        self._alone: Resolution | None = None
        """The changes of files that are decoded one by one."""

    def add(self, plan: Plan) -> Sequence[Plan]:
        """Decode a file now, or later together with others. Return the plans that are decoded now."""
        codec = codec_for(plan.tensors)
        plan.writes[:] = True
        if codec.prefers_whole_state and isinstance(plan, GroupedPlan):
            self._waiting.append(plan)
            return self.resolve() if len(self._waiting) == _TOGETHER else ()
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
        if not plans:
            return ()
        codec = codec_for(plans[0].tensors)
        resolution = codec.deferred_resolution(self._threads, self._pace)
        with on_side_stream(self._tensors.state) as wait:
            try:
                digests = resolve_together(plans, resolution, codec, self._threads)
            except CorruptDelta:  # decoded against wrong weights, a valid delta can look corrupt
                for plan in plans:
                    check_base(plan, codec, self._threads)
                raise
            for plan, (before, after) in zip(plans, digests, strict=True):
                check_digests(plan, before, after)
            self._patches.add(resolution, plans)
            wait()
        return plans

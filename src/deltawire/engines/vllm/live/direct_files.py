"""The files of an update that change only direct tensors.

A GPU decodes several of them with one call, because each call takes Python long.
"""

from __future__ import annotations

from collections.abc import Callable

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
    note
        Called with the plan of each file when it is decoded.
    threads
        Number of threads for decoding on the host.
    pace
        Waits between parts of the work of a GPU. None if nothing waits.
    """

    def __init__(
        self, tensors: DirectTensors, patches: DirectPatches, note: Callable[[Plan], None], *, threads: int, pace: Pace | None
    ) -> None:
        self._tensors = tensors
        self._patches = patches
        self._note = note
        self._threads = threads
        self._pace = pace
        self._waiting: list[GroupedPlan] = []
        """Files that are not decoded yet."""
        self._alone: Resolution | None = None
        """The changes of files that are decoded one by one."""

    def add(self, plan: Plan) -> None:
        """Decode a file now, or later together with others."""
        codec = codec_for(plan.tensors)
        plan.writes[:] = True
        if codec.prefers_whole_state and isinstance(plan, GroupedPlan):
            self._waiting.append(plan)
            if len(self._waiting) == _TOGETHER:
                self.resolve()
            return
        if self._alone is None:
            self._alone = codec.deferred_resolution(self._threads)
        with on_side_stream(self._tensors.state) as wait:
            resolve_plan(plan, self._alone, codec, self._threads, None)
            wait()
        self._note(plan)

    def complete(self) -> None:
        """Decode what is left."""
        self.resolve()
        if self._alone is not None:
            self._patches.add(self._alone)
            self._alone = None

    def resolve(self) -> None:
        """Decode the files that wait with one call of the codec."""
        plans, self._waiting = self._waiting, []
        if not plans:
            return
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
                self._note(plan)
            self._patches.add(resolution, plans)
            wait()

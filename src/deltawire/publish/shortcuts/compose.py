"""Compose the reverse deltas of several versions to one delta forward (a skip) and one back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...delta.encode import encode_delta, encode_with_summary
from ...delta.resolve import apply_delta
from ...format.records.record_parts import CommitRef
from ...tensors.gpu_handover import on_side_stream
from ..history import Reverse
from ..snapshots import ScratchMemory
from ..upload.data_objects import Segmented


@dataclass(frozen=True, slots=True)
class Composition:
    """Deltas, by segment, from `base` to `target` and back. Segments without one are the same in both versions.

    `forward_bytes` is the size of the deltas forward, and `replaced_bytes` that of the cheapest route without them. If the deltas forward
    are at least as large, `forward` may be incomplete, because encoding was stopped.
    """

    level: int
    end: int
    base: CommitRef
    target: CommitRef
    forward: Mapping[int, bytes]
    backward: Mapping[int, bytes]
    forward_bytes: int
    replaced_bytes: int

    def reverse(self, *, has_skip: bool) -> Reverse:
        """Return the reverse delta that replaces those it was made from. `has_skip` tells whether readers get the deltas forward."""
        cost = self.forward_bytes if has_skip else self.replaced_bytes
        return Reverse(self.level, self.end, self.base, self.target, self.backward, cost)


def compose(baseline: Segmented, level: int, parts: Sequence[Reverse], *, threads: int | None, break_off: bool) -> Composition:
    """Compose reverse deltas that start at the baseline, given from the newest to the oldest, to one of `level`.

    It works segment by segment, so it needs memory for a copy of one segment, and for the deltas. With `break_off`, it stops encoding
    deltas forward once they are as large as what they would replace.
    """
    replaced = sum(part.forward_bytes for part in parts)
    forward: dict[int, bytes] = {}
    backward: dict[int, bytes] = {}
    size = 0
    scratch = ScratchMemory()
    for index in sorted({index for part in parts for index in part.deltas}):
        now = baseline.part(index)
        with on_side_stream(now) as wait:  # on a GPU, this may run while the next step is trained
            then = scratch.copy(now)
            for part in parts:
                if index in part.deltas:
                    apply_delta(then, part.deltas[index], threads=threads)
            delta, summary = encode_with_summary(now, then, threads=threads)
            if summary.tensors_changed:
                backward[index] = delta
                if size < replaced or not break_off:
                    forward[index] = encode_delta(then, now, threads=threads)
                    size += len(forward[index])
            wait()
    oldest, newest = parts[-1], parts[0]
    return Composition(level, newest.end, oldest.base, newest.target, forward, backward, size, replaced)

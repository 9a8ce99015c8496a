"""Several versions in one step, made from the way back over each of them: what skips are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...delta.encode import encode_delta, encode_with_summary
from ...delta.resolve import apply_delta
from ...format.records.chain_records import CommitRef
from ..history import Reverse
from ..snapshots import copy_of
from ..upload.data_objects import Segmented


@dataclass(frozen=True, slots=True)
class Composition:
    """The step from `base` to `target` and the one back, as deltas by segment. Segments without one are the same in both.

    `forward_bytes` is what the step costs a reader, `replaced_bytes` what the cheapest way by smaller ones does. Where `forward` was broken
    off for having come to that, it is not complete.
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
        """The way back, to be kept in place of those that it was made from; `has_skip` says whether readers get the way forward."""
        cost = self.forward_bytes if has_skip else self.replaced_bytes
        return Reverse(self.level, self.end, self.base, self.target, self.backward, cost)


def compose(baseline: Segmented, level: int, parts: Sequence[Reverse], *, threads: int | None, break_off: bool) -> Composition:
    """Compose the ways back from the baseline, newest first, to one of `level`.

    Segment by segment, so that it takes the memory of one segment beyond the deltas themselves. With `break_off` nothing more is encoded
    for the way forward once that is as large as what it would replace.
    """
    replaced = sum(part.forward_bytes for part in parts)
    forward: dict[int, bytes] = {}
    backward: dict[int, bytes] = {}
    size = 0
    for index in sorted({index for part in parts for index in part.deltas}):
        now = baseline.part(index)
        then: dict[str, Any] = {name: copy_of(tensor) for name, tensor in now.items()}
        for part in parts:
            if index in part.deltas:
                apply_delta(then, part.deltas[index], threads=threads)
        delta, summary = encode_with_summary(now, then, threads=threads)
        if not summary.tensors_changed:
            continue
        backward[index] = delta
        if size < replaced or not break_off:
            forward[index] = encode_delta(then, now, threads=threads)
            size += len(forward[index])
    oldest, newest = parts[-1], parts[0]
    return Composition(level, newest.end, oldest.base, newest.target, forward, backward, size, replaced)

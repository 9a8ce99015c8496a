"""How the tensors of a state are grouped into segments, which are encoded, uploaded and patched separately. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...dtypes import DType
from ...errors import LimitExceeded, PublishError
from ...format.records.record_parts import Limits
from ...tensors.bits import State, TensorBits, tensor_bits
from ...tensors.casting import Casting
from ...tensors.columns import Columns, ColumnState, Layout
from ...tensors.unwritten_state import PendingState, UnwrittenState

SEGMENT_BYTES = 256 << 20
"""Small enough that uploading a segment overlaps with encoding the next; large enough that requests are few."""

MOST_SEGMENTS = 128
"""A record of 64 KiB has room for this many files and one more."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tensors from index `first` on, in the order of all names. They have `raw` bytes together."""

    first: int
    count: int
    raw: int


@dataclass(frozen=True)
class TensorTable:
    """Names in ascending order, types and shapes of all tensors. A delta is possible only between states with the same table."""

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, state: State, casting: Casting | None = None) -> TensorTable:
        """Return the table of a state. With `casting`, the types are those that it is published as.

        Raises a `TensorError` if a tensor cannot be published, and `PublishError` if `state` is not a state.
        """
        if not isinstance(state, Mapping):
            raise PublishError(f"a state maps names to tensors; this is a {type(state).__qualname__}. Pass model.state_dict(), or a dict.")
        if not state:
            raise PublishError("the state has no tensors. Pass the weights of the model.")
        is_cast = casting is not None and casting.is_given
        columns = Columns.of(state) if not is_cast or (casting is not None and casting.dtype is not None) else None
        if columns is not None:
            table = _table_of_layout(columns.layout)
            if casting is None or not is_cast:
                return table
            each = {dtype: casting.cast_of(dtype) for dtype in set(table.dtypes)}
            return cls(table.names, tuple([each[dtype] for dtype in table.dtypes]), table.shapes)
        tensors = [tensor_bits(name, tensor) for name, tensor in state.items()]
        if any(tensor.whole is not None for tensor in tensors):
            raise PublishError("the state has parts of tensors. Use ShardedPublisher to publish parts from several processes.")
        table = cls.of_bits(tensors)
        if casting is None or not casting.is_given:
            return table
        by_name = {tensor.name: casting.dtype_of(tensor, state[tensor.name]) for tensor in tensors}
        return cls(table.names, tuple(by_name[name] for name in table.names), table.shapes)

    @classmethod
    def of_bits(cls, tensors: Sequence[TensorBits]) -> TensorTable:
        ordered = sorted(tensors, key=lambda tensor: tensor.name)
        return cls(tuple(t.name for t in ordered), tuple(t.dtype for t in ordered), tuple(t.shape for t in ordered))

    @cached_property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True))

    @cached_property
    def state_bytes(self) -> int:
        return sum(self.sizes)

    def check_limits(self, limits: Limits) -> None:
        """Raise `LimitExceeded` if a run with these limits does not allow such a state."""
        for what, found, allowed in [
            ("bytes of weights", self.state_bytes, limits.state_bytes),
            ("tensors", len(self.names), limits.tensors),
            ("bytes in one tensor", max(self.sizes), limits.file_bytes),
        ]:
            if found > allowed:
                raise LimitExceeded(f"the state has {found:,} {what}; this run allows {allowed:,}.")

    def names_of(self, segment: Segment) -> tuple[str, ...]:
        return self.names[segment.first : segment.first + segment.count]


def part_of_state(state: State, table: TensorTable, segment: Segment) -> State:
    """Return the tensors of a segment. The state has this table; or it has the tensors of some segments that are not written."""
    if isinstance(state, (PendingState, UnwrittenState)):
        return state.of(table.names_of(segment))
    if isinstance(state, ColumnState):
        return state.part(segment.first, segment.count)
    return {name: state[name] for name in table.names_of(segment)}


@functools.lru_cache(maxsize=4)
def _table_of_layout(layout: Layout) -> TensorTable:
    """Return the table of a layout. It is the same object for each state of the layout, so comparing two is quick."""
    return TensorTable(tuple(layout.names), tuple(layout.dtypes), tuple(layout.shapes))


def cut_segments(sizes: Sequence[int], *, segment_bytes: int = SEGMENT_BYTES, most: int = MOST_SEGMENTS) -> tuple[Segment, ...]:
    """Group all tensors, in order, into segments of at least `segment_bytes` each; the last one may be smaller.

    Segments are larger if there would be more than `most` + 1 of them otherwise. A single tensor is never cut.
    """
    enough = max(segment_bytes, -(-sum(sizes) // most), 1)
    segments: list[Segment] = []
    first = raw = 0
    for index, size in enumerate(sizes):
        raw += size
        if raw >= enough:
            segments.append(Segment(first, index + 1 - first, raw))
            first, raw = index + 1, 0
    if first < len(sizes):
        segments.append(Segment(first, len(sizes) - first, raw))
    return tuple(segments)


def cut_batches(costs: Sequence[int], most: int) -> tuple[range, ...]:
    """Group segments, in order, into batches whose costs are together at most `most`. A batch has at least one segment."""
    batches: list[range] = []
    first = total = 0
    for index, cost in enumerate(costs):
        if index > first and total + cost > most:
            batches.append(range(first, index))
            first, total = index, 0
        total += cost
    if first < len(costs):
        batches.append(range(first, len(costs)))
    return tuple(batches)

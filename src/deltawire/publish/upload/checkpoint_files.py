"""A state as an ordinary Hugging Face checkpoint: which tensor goes into which shard, and each shard as a stream. Pure.

A shard is a group of whole segments, so that it can be streamed from a source that gives one segment at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...format.checkpoints.checkpoint import SINGLE_FILE
from ...format.safetensors_header import build_header, place_in_order
from ..snapshots import host_array
from .segments import Segment, TensorTable

SHARD_BYTES = 5_000_000_000
"""What Hugging Face libraries write, too."""

_MOST_SHARDS = 64
"""Of a checkpoint so large that it would have more, shards are larger: a record has to name them all."""

_PIECE = 8 << 20
SegmentSource = Callable[[int], Mapping[str, Any]]
"""Gives the tensors of a segment, by its index; C-contiguous, complete (on a GPU: for any stream), and not changed while in use."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its header, then the tensors in `order`, each with the index of its segment. `raw` are the bytes of weights in it."""

    name: str
    header: bytes
    order: tuple[tuple[str, int], ...]
    raw: int

    @property
    def size(self) -> int:
        return len(self.header) + self.raw

    def pieces(self, source: SegmentSource) -> Iterator[memoryview]:
        """The bytes of the file. Holds one segment at a time, on the host: what is sent may be long on its way."""
        yield memoryview(self.header)
        held: int | None = None
        tensors: dict[str, NDArray[Any]] = {}
        for name, segment in self.order:
            if segment != held:
                tensors.clear()
                tensors.update({name: host_array(name, tensor) for name, tensor in source(segment).items()})
                held = segment
            flat = tensors[name].reshape(-1).view(np.uint8).data
            for start in range(0, len(flat), _PIECE):
                yield flat[start : start + _PIECE]


@dataclass(frozen=True, slots=True)
class Layout:
    """All files that hold or list weights. `index` is None where there is one shard, which then needs none."""

    shards: tuple[Shard, ...]
    index: bytes | None


def lay_out(table: TensorTable, segments: Sequence[Segment], *, shard_bytes: int = SHARD_BYTES) -> Layout:
    """Shards of at most `shard_bytes`, or of one segment where that is larger, and the index that goes with them."""
    most = max(shard_bytes, -(-table.state_bytes // _MOST_SHARDS))
    groups: list[list[int]] = []
    room = 0
    for index, segment in enumerate(segments):
        if not groups or segment.raw > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= segment.raw
    if len(groups) == 1:
        return Layout((_shard(SINGLE_FILE, table, segments, groups[0]),), None)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    shards = tuple(_shard(name, table, segments, group) for name, group in zip(names, groups, strict=True))
    weight_map = {tensor: shard.name for shard in shards for tensor, _ in shard.order}
    index_json = {"metadata": {"total_size": table.state_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return Layout(shards, (json.dumps(index_json, indent=2, ensure_ascii=False) + "\n").encode())


def _shard(name: str, table: TensorTable, segments: Sequence[Segment], group: Sequence[int]) -> Shard:
    home = {tensor: index for index in group for tensor in table.names_of(segments[index])}
    first, last = segments[group[0]], segments[group[-1]]
    chosen = slice(first.first, last.first + last.count)
    # Aligned by element size, since torch refuses views that are not; only then may the order jump between segments.
    placed = place_in_order(list(zip(table.names[chosen], table.dtypes[chosen], table.shapes[chosen], strict=True)))
    header = build_header(placed, {"format": "pt"})
    return Shard(name, header, tuple((tensor, home[tensor]) for tensor, _ in placed), sum(segments[index].raw for index in group))

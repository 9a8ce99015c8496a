"""A state as a Hugging Face checkpoint: which tensor goes into which shard, and each shard as a stream of bytes. Pure.

A shard consists of whole segments, so that it can be streamed from a source that gives one segment at a time.
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
"""The size of shards that Hugging Face libraries write."""

MOST_SHARDS = 64
"""Most shards of a checkpoint that one process writes. A record has to name them all. Shards of very large checkpoints are larger."""

_PIECE = 8 << 20
SegmentSource = Callable[[int], Mapping[str, Any]]
"""Returns the tensors of a segment, by its index. They are C-contiguous, complete on all streams, and do not change while in use."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: a header, then the tensors in `order`, each given with the index of its segment. It has `raw` bytes of weights."""

    name: str
    header: bytes
    order: tuple[tuple[str, int], ...]
    raw: int

    @property
    def size(self) -> int:
        return len(self.header) + self.raw

    def pieces(self, source: SegmentSource) -> Iterator[memoryview]:
        """Yield the bytes of the file. It holds one segment at a time, on the host, because sending may take long."""
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
    """All files that hold or list weights. A checkpoint with one shard needs no `index`."""

    shards: tuple[Shard, ...]
    index: bytes | None


def lay_out(table: TensorTable, segments: Sequence[Segment], *, shard_bytes: int = SHARD_BYTES, most_shards: int = MOST_SHARDS) -> Layout:
    """Return shards of at most `shard_bytes`, and their index. A larger segment becomes a separate shard.

    Shards are larger if there would be many more than `most_shards` of them otherwise.
    """
    most = max(shard_bytes, -(-table.state_bytes // most_shards))
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
    # Tensors are ordered by element size, because torch needs aligned views. So the order may switch between segments.
    placed = place_in_order(list(zip(table.names[chosen], table.dtypes[chosen], table.shapes[chosen], strict=True)))
    header = build_header(placed, {"format": "pt"})
    return Shard(name, header, tuple((tensor, home[tensor]) for tensor, _ in placed), sum(segments[index].raw for index in group))

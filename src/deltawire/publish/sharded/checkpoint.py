"""A full checkpoint that all processes write together: each assembles some of its files from parts that the others send.

Every tensor is sent once, to the process that writes its file. Each process writes one file at a time, which is about as large as its own
parts, so no process needs memory for the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ResultMismatch
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ..upload.checkpoint_files import MOST_SHARDS, Layout, Shard, lay_out
from ..upload.data_objects import DataLocation, upload_checkpoint
from ..upload.segments import MOST_SEGMENTS, cut_segments
from .division import Division, PartsByName, pieces_of, whole_tensors
from .ranks import Ranks, collect_at_first, together


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """A checkpoint that is uploaded."""

    files: tuple[FileEntry, ...]
    """All its files, those with weights first. Empty except in the first process."""
    seconds: float
    """How long this process took."""
    sent: int
    """Bytes that this process uploaded."""


def upload_together(
    ranks: Ranks,
    location: DataLocation,
    division: Division,
    parts: PartsByName,
    digest: Digest,
    *,
    shard_bytes: int,
    threads: int | None,
) -> SharedCheckpoint:
    """Upload a checkpoint of which each process has `parts`. The first process also writes the index.

    Raises `ResultMismatch` if the files do not have this digest.
    """
    layout, contents = _files(division, min(shard_bytes, -(-division.table.state_bytes // ranks.size)), ranks.size)
    found: list[FileEntry] = []
    total, seconds, sent = Digest(), 0.0, 0
    for first in range(0, len(layout.shards), ranks.size):
        turn = range(first, min(first + ranks.size, len(layout.shards)))
        tensors = _collect(ranks, division, parts, [contents[index] for index in turn])
        mine: Shard | None = layout.shards[first + ranks.rank] if first + ranks.rank in turn else None
        last = ranks.rank == 0 and turn[-1] == len(layout.shards) - 1
        own = Layout(() if mine is None else (mine,), layout.index if last else None)

        written: list[FileEntry] = []

        def upload(own: Layout = own, tensors: dict[str, NDArray[Any]] = tensors, written: list[FileEntry] = written) -> str:
            nonlocal seconds, sent
            done = upload_checkpoint(location, own, lambda _: tensors, threads)
            seconds += done.seconds
            sent += done.size
            written += done.files
            return done.digest.hex()

        for answer in together(ranks, upload):
            total += Digest.from_hex(answer)
        found += files_at_first(ranks, written)
    if total != digest:
        raise ResultMismatch(f"the checkpoint that the ranks assembled has the digest {total}, not {digest}.")
    weights = {shard.name for shard in layout.shards}
    return SharedCheckpoint(tuple(sorted(found, key=lambda entry: (entry.name not in weights, entry.name))), seconds, sent)


def _files(division: Division, size: int, ranks: int) -> tuple[Layout, list[list[int]]]:
    """Return the layout of files of about `size` bytes each, and the tensors of each file by their indices in the table."""
    segments = cut_segments(division.table.sizes, segment_bytes=max(size, 1), most=max(MOST_SEGMENTS, ranks))
    layout = lay_out(division.table, segments, shard_bytes=max(size, 1), most_shards=max(MOST_SHARDS, ranks))
    indices = {name: index for index, name in enumerate(division.table.names)}
    # Each file is assembled as a whole, so its stream has one segment.
    shards = tuple(Shard(shard.name, shard.header, tuple((name, 0) for name, _ in shard.order), shard.raw) for shard in layout.shards)
    return Layout(shards, layout.index), [[indices[name] for name, _ in shard.order] for shard in shards]


def files_at_first(ranks: Ranks, own: Sequence[FileEntry]) -> list[FileEntry]:
    """Return the files of all processes, by rank, in the first process. Returns [] in the others."""
    return [FileEntry(**entry) for files in collect_at_first(ranks, [entry.plain() for entry in own]) for entry in files]


def _collect(ranks: Ranks, division: Division, parts: PartsByName, contents: list[list[int]]) -> dict[str, NDArray[Any]]:
    """Send each process this one's parts of its file, and return the tensors of this process's own file."""
    pieces: list[memoryview] = []

    def cut() -> None:
        for indices in contents:
            pieces.append(np.concatenate([np.empty(0, np.uint8), *pieces_of(division, indices, parts)]).data)

    together(ranks, cut)
    arrived = ranks.deliver([*pieces, *[b""] * (ranks.size - len(pieces))])
    return whole_tensors(division, contents[ranks.rank], arrived) if ranks.rank < len(contents) else {}

"""A whole checkpoint, written by all processes: each puts together some of its files, from parts that the others send.

Every tensor travels once, to the one process that writes its file; nobody ever holds more than its own files of one round, which are about
as large as its own parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ResultMismatch
from ...format.digest import Digest
from ...format.records.chain_records import FileEntry
from ..upload.checkpoint_files import Layout, Shard, lay_out
from ..upload.data_objects import DataPlace, upload_checkpoint
from ..upload.segments import cut_segments
from .parts import Division, Parts, pieces_of, whole_tensors
from .ranks import Ranks, together


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """A checkpoint that is uploaded: all its files, weights first, and how long it took this process."""

    files: tuple[FileEntry, ...]
    seconds: float
    sent: int
    """Bytes that this process uploaded."""


def upload_together(
    ranks: Ranks,
    place: DataPlace,
    division: Division,
    parts: Parts,
    digest: Digest,
    *,
    shard_bytes: int,
    threads: int | None,
) -> SharedCheckpoint:
    """Upload the checkpoint whose parts these are. `ResultMismatch` if what went into the files has not this digest.

    The index is the first process's.
    """
    layout, contents = _files(division, min(shard_bytes, -(-division.table.state_bytes // ranks.size)))
    found: list[FileEntry] = []
    total, seconds, sent = Digest(), 0.0, 0
    for first in range(0, len(layout.shards), ranks.size):
        turn = range(first, min(first + ranks.size, len(layout.shards)))
        tensors = _collect(ranks, division, parts, [contents[index] for index in turn])
        mine: Shard | None = layout.shards[first + ranks.rank] if first + ranks.rank in turn else None
        last = ranks.rank == 0 and turn[-1] == len(layout.shards) - 1
        own = Layout(() if mine is None else (mine,), layout.index if last else None)

        def upload(own: Layout = own, tensors: dict[str, NDArray[Any]] = tensors) -> dict[str, Any]:
            nonlocal seconds, sent
            done = upload_checkpoint(place, own, lambda _: tensors, threads)
            seconds += done.seconds
            sent += done.size
            return {"files": [entry.plain() for entry in done.files], "digest": done.digest.hex()}

        for answer in together(ranks, upload):
            found += [FileEntry(**entry) for entry in answer["files"]]
            total += Digest.from_hex(answer["digest"])
    if total != digest:
        raise ResultMismatch(f"the checkpoint that was put together has the digest {total}, not {digest}.")
    weights = {shard.name for shard in layout.shards}
    return SharedCheckpoint(tuple(sorted(found, key=lambda entry: (entry.name not in weights, entry.name))), seconds, sent)


def _files(division: Division, size: int) -> tuple[Layout, list[list[int]]]:
    """The files, of about `size` bytes each, and the tensors of each by their places in the table."""
    segments = cut_segments(division.table.sizes, segment_bytes=max(size, 1))
    layout = lay_out(division.table, segments, shard_bytes=max(size, 1))
    places = {name: index for index, name in enumerate(division.table.names)}
    # A file is put together whole, so it is one segment to who streams it.
    shards = tuple(Shard(shard.name, shard.header, tuple((name, 0) for name, _ in shard.order), shard.raw) for shard in layout.shards)
    return Layout(shards, layout.index), [[places[name] for name, _ in shard.order] for shard in shards]


def _collect(ranks: Ranks, division: Division, parts: Parts, contents: list[list[int]]) -> dict[str, NDArray[Any]]:
    """Send everybody one's parts of the file that is theirs, and put together one's own."""
    pieces = [np.concatenate([np.empty(0, np.uint8), *pieces_of(division, indices, parts)]).data for indices in contents]
    arrived = ranks.deliver([*pieces, *[b""] * (ranks.size - len(pieces))])
    return whole_tensors(division, contents[ranks.rank], arrived) if ranks.rank < len(contents) else {}

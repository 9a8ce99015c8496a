"""Encode states and upload them as data objects. Each object is uploaded while the next one is made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...delta.encode import encode_many
from ...format.checkpoints.checkpoint import INDEX_FILE
from ...format.content_hash import content_hash, new_hash
from ...format.digest import Digest
from ...format.records.file_list import MOST_IN_RECORD, FileListRef, list_bytes
from ...format.records.record_parts import FileEntry
from ...store.base import Buffer, Store
from ...store.keys import data_key, parse_data_key
from ...tensors.bits import State
from ...tensors.gpu_handover import on_side_stream
from ...tensors.state import state_digest
from .checkpoint_files import Layout, SegmentSource, Shard
from .segments import Segment

_IN_FLIGHT, _BYTES_IN_FLIGHT = 4, 256 << 20
"""Most uploads, and bytes of them, that wait or run. If there are more, encoding waits, so that deltas do not accumulate in memory."""


@dataclass(frozen=True, slots=True)
class DataLocation:
    """The location of the data objects of a version: the store, the pool that uploads, and the epoch and seq that keys contain."""

    store: Store
    pool: Executor
    epoch: int
    seq: int

    def put(self, data: Buffer, *, name: str | None = None, raw: int = 0, segment: Segment | None = None) -> FileEntry:
        """Upload an object that is in memory. Its key contains its hash."""
        content = content_hash(data)
        key = data_key(self.epoch, self.seq, content, "safetensors" if segment is not None else "file")
        self.store.put(key, data, size=len(data))
        first, count = (None, None) if segment is None else (segment.first, segment.count)
        return FileEntry(key, len(data), raw, content, name, first, count)


def upload_list(store: Store, files: Sequence[FileEntry]) -> FileListRef | None:
    """Upload a file list if a record does not have room for these files. Else returns None. All files must be of the same epoch and seq."""
    if len(files) <= MOST_IN_RECORD:
        return None
    data = list_bytes(files)
    keys_of_files = {parse_data_key(entry.key) for entry in files}
    [(epoch, seq)] = {(key.epoch, key.seq) for key in keys_of_files if key is not None}
    key = data_key(epoch, seq, content_hash(data), "file")
    store.put(key, data, size=len(data))
    return FileListRef(key, len(data), len(files), sum(entry.size for entry in files))


class Uploads:
    """Runs uploads in parallel, and returns their files in the order in which they were started.

    Parameters
    ----------
    pool
        Runs the uploads.
    store
        Uploads of objects in memory run twice as many at the same time as this store has streams. None: four run. Large files
        that are made while they are uploaded take None, because the store sends pieces of each at the same time.
    """

    def __init__(self, pool: Executor, store: Store | None = None) -> None:
        self._pool = pool
        self._store = store
        self._running: deque[tuple[Future[FileEntry], int]] = deque()
        self._bytes = 0
        self._all: list[Future[FileEntry]] = []
        self._started: float | None = None
        self.waited = 0.0
        """The seconds that the caller had to wait for uploads."""

    def start(self, upload: Callable[[], FileEntry], *, size: int = 0) -> None:
        """Start an upload of `size` bytes in memory. Waits while too many are in progress, and raises the error of an earlier one."""
        start = time.perf_counter()
        most = _IN_FLIGHT if self._store is None else 2 * self._store.streams
        while self._running and (len(self._running) >= most or self._bytes + size > _BYTES_IN_FLIGHT):
            earliest, done = self._running.popleft()
            earliest.result()
            self._bytes -= done
        self.waited += time.perf_counter() - start
        if self._started is None:
            self._started = time.perf_counter()
        future = self._pool.submit(upload)
        self._running.append((future, size))
        self._bytes += size
        self._all.append(future)

    def start_delta(
        self, location: DataLocation, delta: bytes, segment: Segment, uploaded: Callable[[FileEntry], None] | None = None
    ) -> None:
        """Start the upload of a segment's delta. `uploaded` is called afterwards, on the thread that uploads. It raises nothing."""

        def upload() -> FileEntry:
            entry = location.put(delta, raw=segment.raw, segment=segment)
            if uploaded is not None:
                uploaded(entry)
            return entry

        self.start(upload, size=len(delta))

    def finish(self) -> tuple[tuple[FileEntry, ...], float]:
        """Wait for all uploads. Returns the files, and the seconds since the first upload was started."""
        start = time.perf_counter()
        files = tuple(future.result() for future in self._all)
        self.waited += time.perf_counter() - start
        return files, 0.0 if self._started is None else time.perf_counter() - self._started

    def abandon(self) -> None:
        """Cancel uploads that have not started, and wait for the others, because they read memory that will be reused."""
        for future in self._all:
            future.cancel()
        wait(self._all)


@dataclass(frozen=True, slots=True)
class Update:
    """The uploaded deltas of a state over the baseline. `deltas` has the same bytes by segment; unchanged segments have none."""

    files: tuple[FileEntry, ...]
    deltas: Mapping[int, bytes]
    make_reverse: Callable[[], Mapping[int, bytes]] | None
    """Returns deltas back to the baseline, by segment, if they were asked for. It encodes those of the last batch, so that the commit need
    not wait for them. Call it once, while the weights and the baseline are as they were."""
    before: Digest
    after: Digest
    changed: int
    quantise_seconds: float
    encode_seconds: float
    upload_seconds: float
    """From the start of the first upload to the end of the last."""
    wait_seconds: float
    """The seconds that encoding waited for uploads, or uploads took after it."""

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


class Segmented(Protocol):
    """A state to encode against, cut into segments. It may be the parts of a state that one process has."""

    @property
    def segments(self) -> Sequence[Segment]: ...

    def part(self, index: int) -> State: ...

    def part_of(self, state: State, index: int) -> State: ...


def upload_update(
    location: DataLocation,
    baseline: Segmented,
    state: State,
    threads: int | None,
    *,
    limit: int,
    segments_of: Callable[[Sequence[int]], State] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    wants_reverse: bool = False,
    uploaded: Callable[[FileEntry], None] | None = None,
) -> Update | None:
    """Encode a state against the baseline, which has the same table, and upload the deltas. Returns None if they reach `limit` bytes.

    Parameters
    ----------
    location
        Where the deltas are uploaded to.
    baseline
        The state to encode against.
    state
        The new state.
    threads
        The number of threads that encode.
    limit
        The most bytes that deltas may have together.
    segments_of
        Makes the tensors of segments, which are freed before those of the next ones are made. None: they are those of `state`.
    batches
        Which segments are made and encoded together: all of them, in order. None: one at a time. A GPU waits for the host between batches.
    wants_reverse
        Whether deltas back to the baseline are wanted, too (`Update.make_reverse`).
    uploaded
        Called with each file when it is uploaded, on another thread. It raises nothing.
    """
    uploads = Uploads(location.pool, location.store)
    deltas: dict[int, bytes] = {}
    reverse: dict[int, bytes] = {}
    before, after = Digest(), Digest()
    changed = size = 0
    making = encoding = 0.0
    last: Callable[[], dict[int, bytes]] | None = None
    try:
        for batch in [[index] for index in range(len(baseline.segments))] if batches is None else batches:
            start = time.perf_counter()
            if last is not None:  # while its deltas are uploaded, and before the weights of this batch are made
                reverse |= last()
                last = None
            begin = time.perf_counter()
            new = state if segments_of is None else segments_of(batch)
            made = time.perf_counter()
            encoded = encode_many([(baseline.part(index), baseline.part_of(new, index)) for index in batch], threads=threads)
            making += made - begin
            encoding += time.perf_counter() - made + begin - start
            changing: list[int] = []
            for index, (delta, summary) in zip(batch, encoded, strict=True):
                before += summary.before
                after += summary.after
                changed += summary.changed
                if summary.tensors_changed:
                    changing.append(index)
                    deltas[index] = delta
                    size += len(delta)
                    if size >= limit:
                        uploads.abandon()
                        return None
                    uploads.start_delta(location, delta, baseline.segments[index], uploaded)
            if wants_reverse:
                last = partial(_deltas_back, baseline, new, changing, threads)
            del new
        files, uploading = uploads.finish()
    except BaseException:
        uploads.abandon()
        raise
    make_reverse = (lambda: reverse | (last() if last is not None else {})) if wants_reverse else None
    return Update(files, deltas, make_reverse, before, after, changed, making, encoding, uploading, uploads.waited)


def _deltas_back(baseline: Segmented, new: State, changing: Sequence[int], threads: int | None) -> dict[int, bytes]:
    """Return the deltas of some segments from a new state back to the baseline."""
    back = encode_many([(baseline.part_of(new, index), baseline.part(index)) for index in changing], threads=threads)
    return {index: delta for index, (delta, _) in zip(changing, back, strict=True)}


@dataclass(slots=True)
class CheckpointUpload:
    """An uploaded checkpoint: its files, those with weights first, and the digest of its state."""

    files: tuple[FileEntry, ...] = ()
    digest: Digest = field(default_factory=Digest)
    seconds: float = 0.0

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


def upload_checkpoint(location: DataLocation, layout: Layout, source: SegmentSource, threads: int | None) -> CheckpointUpload:
    """Upload the shards and the index. Each shard is streamed twice, first to compute the hash that its key contains.

    The source must give the same bits every time.
    """
    done = CheckpointUpload()
    uploads = Uploads(location.pool)
    seen: set[int] = set()

    def digested(index: int) -> State:
        arrays = source(index)
        if index not in seen:
            seen.add(index)
            with on_side_stream(arrays):
                done.digest += state_digest(arrays, threads=threads)
        return arrays

    try:
        for shard in layout.shards:
            hasher = new_hash()
            for piece in shard.pieces(digested):
                hasher.update(piece)
            uploads.start(_shard_upload(location, shard, source, hasher.hexdigest()))
        if layout.index is not None:
            uploads.start(file_upload(location, layout.index, INDEX_FILE))
        done.files, done.seconds = uploads.finish()
    except BaseException:
        uploads.abandon()
        raise
    return done


def file_upload(location: DataLocation, data: bytes, name: str) -> Callable[[], FileEntry]:
    """Return a function that uploads a file of a checkpoint without weights."""
    return lambda: location.put(data, name=name)


def _shard_upload(location: DataLocation, shard: Shard, source: SegmentSource, content: str) -> Callable[[], FileEntry]:
    def upload() -> FileEntry:
        key = data_key(location.epoch, location.seq, content, "safetensors")
        location.store.put(key, shard.pieces(source), size=shard.size)
        return FileEntry(key, shard.size, shard.raw, content, shard.name)

    return upload

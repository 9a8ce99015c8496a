"""Make the full checkpoints and skips of a chain in the region, from what the region has (docs/protocol.md §11).

Their records belong to the chain's writer, which may have signed them, and are copied. Their files do not cross the link.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.reader_options import ReaderOptions
from ..errors import CorruptRecord, DeltawireError, LimitExceeded, SignatureInvalid, UnsupportedVersion, VersionGone
from ..events import OnEvent, emit
from ..format.content_hash import content_hash
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit, Shortcut
from ..store import keys
from ..store.base import Store
from ..subscribe import Subscriber
from .data_copy import DataCopy, has_object
from .rebuild import State, rebuild_shard, rebuild_skip
from .region_records import put_record, region_floor

_WINDOW = 64
"""Shortcuts to this many versions before the newest are looked for each time. Older ones are looked for now and then."""

_LOOK_FAR_EVERY = 600.0

ENDING = 5.0
"""Seconds to wait for a shortcut that is being made when the relay ends."""


class _LeftOut(Exception):
    """A shortcut cannot be made in the region, and is not worth a transfer."""


@dataclasses.dataclass
class _Made:
    """Counts the bytes of a shortcut's files that were made in the region, and those that crossed the link."""

    rebuilt: int = 0
    fetched: int = 0


class ShortcutCopy:
    """Gives the region the shortcuts of a chain. It keeps a replica of the model, which it updates from the region's own store.

    Parameters
    ----------
    log
        The chain to copy from.
    target
        The region's store.
    data
        Copies objects that cannot be made in the region.
    options
        Which chain to accept.
    mirror
        The directory of the replica. None keeps the replica in memory.
    with_skips
        Whether to make skips, too.
    threads
        Number of threads. None means one per core.
    is_stopped
        Returns whether to end early.
    on_event
        Called with each event.
    clock
        Returns seconds on a clock that never goes back.
    """

    def __init__(
        self,
        log: ChainLog,
        target: Store,
        data: DataCopy,
        *,
        options: ReaderOptions,
        mirror: Path | None = None,
        with_skips: bool = True,
        threads: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._target = target
        self._data = data
        self._options = options
        self._mirror = mirror
        self._with_skips = with_skips
        self._threads = threads
        self._is_stopped = is_stopped
        self._on_event = on_event
        self._clock = clock
        self._replica: Subscriber | None = None
        self._left_out: set[tuple[int, int | None]] = set()
        self._looked_upto = -1
        self._look_far_at = -1.0
        self._stop = threading.Event()
        self._busy = threading.Lock()

    def copy(self, upto: int) -> int:
        """Make the shortcuts that the region lacks to versions up to number `upto`, which it has. Return how many were made."""
        with self._busy:
            made = 0
            for shortcut in self._missing(upto):
                if self._stop.is_set() or self._is_stopped():
                    break
                made += self._make(shortcut)
            else:
                self._looked_upto = upto
            return made

    def stop(self) -> None:
        """End `copy` soon. It makes nothing afterwards."""
        self._stop.set()

    def close(self) -> None:
        """Release the replica, unless a shortcut is being made that does not end in time."""
        self._stop.set()
        if self._busy.acquire(timeout=ENDING):
            try:
                if self._replica is not None:
                    self._replica.close()
                    self._replica = None
            finally:
                self._busy.release()

    def _missing(self, upto: int) -> Iterator[Shortcut]:
        """Yield shortcuts that the chain has and the region lacks, in the order of the versions that they are made from."""
        floor = region_floor(self._target, self._log.run)
        after = max(floor, self._looked_upto - _WINDOW)
        if self._clock() >= self._look_far_at:
            after, self._look_far_at = floor, self._clock() + _LOOK_FAR_EVERY
        region = ChainLog(self._target)
        wanted: list[tuple[int, int | None]] = [(seq, None) for seq in self._log.anchors(max(after, 0), upto)]
        present: set[tuple[int, int | None]] = {(seq, None) for seq in region.anchors(max(after, 0), upto)}
        if self._with_skips:
            wanted += [(seq, base) for seq, base in self._log.skips(max(after, 0), upto) if base >= floor]
            present |= set(region.skips(max(after, 0), upto))
        for seq, base in sorted(
            set(wanted) - present - self._left_out, key=lambda name: (name[0] if name[1] is None else name[1], name[0])
        ):
            shortcut = self._sound(seq, base)
            if shortcut is not None:
                yield shortcut

    def _sound(self, seq: int, base: int | None) -> Shortcut | None:
        """Return the record of a shortcut, if the chain confirms it."""
        try:
            shortcut = self._log.shortcut(seq, base)
        except (CorruptRecord, SignatureInvalid, LimitExceeded, UnsupportedVersion):
            return None
        target = self._log.read(seq)
        if shortcut is None or target is None or self._log.is_void(target):
            return None
        fits = shortcut.target == self._log.ref(target) and (shortcut.state_bytes, shortcut.tensors) == (target.state_bytes, target.tensors)
        if base is not None:
            from_commit = self._log.read(base)
            fits = fits and from_commit is not None and shortcut.base == self._log.ref(from_commit)
        return shortcut if fits else None

    def _make(self, shortcut: Shortcut) -> bool:
        seq, base = shortcut.target.seq, None if shortcut.base is None else shortcut.base.seq
        kind = "anchor" if base is None else "skip"
        try:
            made = self._make_anchor(shortcut) if base is None else self._make_skip(shortcut, base)
        except _LeftOut as reason:
            self._left_out.add((seq, base))
            emit(self._on_event, "shortcut-left-out", kind=kind, seq=seq, base=base, reason=str(reason))
            return False
        except DeltawireError as error:
            if isinstance(error, VersionGone):
                self._left_out.add((seq, base))
            emit(self._on_event, "shortcut-failed", kind=kind, seq=seq, reason=str(error))
            return False
        key = keys.anchor_key(seq) if base is None else keys.skip_key(seq, base)
        put_record(self._target, key, shortcut.to_bytes())
        emit(self._on_event, "shortcut-relayed", kind=kind, seq=seq, base=base, rebuilt=made.rebuilt, fetched=made.fetched)
        return True

    def _make_anchor(self, shortcut: Shortcut) -> _Made:
        made = _Made()
        state = None
        for entry in self._files(shortcut, made):
            if has_object(self._target, entry):
                continue
            shard = None
            if entry.name is not None and entry.name.endswith(".safetensors"):
                state = self._state_at(shortcut.target.seq) if state is None else state
                shard = rebuild_shard(self._log.store, entry, state, most_tensors=shortcut.tensors)
            if shard is None:  # an index, or a file of a writer that made it in another way
                self._data.copy([entry], self._log.limits)
                made.fetched += entry.size
            else:
                self._target.put(entry.key, shard.pieces(), size=entry.size)
                made.rebuilt += entry.size
        return made

    def _make_skip(self, shortcut: Shortcut, base: int) -> _Made:
        made = _Made()
        path = self._path(shortcut.target.seq, base)
        state = None
        runs: dict[tuple[int, int], list[FileEntry]] = {}
        for entry in self._files(shortcut, made):
            assert entry.first is not None
            assert entry.count is not None
            if not has_object(self._target, entry):
                runs.setdefault((entry.first, entry.count), []).append(entry)
        for (first, count), entries in runs.items():
            steps = [self._deltas_of(commit, first, count) for commit in path]
            state = self._state_at(base) if state is None else state
            names = sorted(state)[first : first + count]
            found = {content_hash(data): data for data in rebuild_skip(state, names, steps, threads=self._threads)}
            for entry in entries:
                if entry.blake3 not in found:
                    raise _LeftOut("this release makes another file from the same versions")
                self._target.put(entry.key, found[entry.blake3], size=entry.size)
                made.rebuilt += entry.size
        return made

    def _files(self, shortcut: Shortcut, made: _Made) -> tuple[FileEntry, ...]:
        """Return the files of a shortcut. A file list is copied, because it is small."""
        if shortcut.file_list is not None:
            entry = shortcut.file_list.entry
            made.fetched += 0 if has_object(self._target, entry) else entry.size
            self._data.copy([entry], self._log.limits)
        return self._log.files_of(shortcut, fetcher=self._fetcher())

    def _path(self, seq: int, base: int) -> list[Commit]:
        """Return the commits whose deltas lead from version `base` to version `seq`, in order."""
        path: list[Commit] = []
        commit = self._log.read(seq)
        while commit is not None and commit.seq > base:
            if commit.base is None:
                break
            if commit.kind == "delta":
                path.append(commit)
            commit = self._log.ancestor(commit, commit.base.seq)
        if commit is None or commit.seq != base:
            raise _LeftOut("its versions are not connected by deltas")
        return path[::-1]

    def _deltas_of(self, commit: Commit, first: int, count: int) -> list[bytes]:
        """Return the delta files of a commit that cover a run of tensors."""
        wanted = []
        for file in self._log.files_of(commit, fetcher=self._fetcher()):
            assert file.first is not None
            assert file.count is not None
            if (file.first, file.count) == (first, count):
                wanted.append(file)
            elif file.first < first + count and first < file.first + file.count:
                raise _LeftOut("its files cover other tensors than those of its versions")
        return [bytes(data) for _, data in self._fetcher().prefetch(wanted)]

    def _state_at(self, seq: int) -> State:
        if self._replica is None:
            options = dataclasses.replace(self._options, run=self._log.run.run, pin=False, max_silence=None, patience=0.0)
            self._replica = Subscriber(self._target, self._mirror, options=options, threads=self._threads)
        self._replica.sync(seq=seq)
        return self._replica.state

    def _fetcher(self) -> Fetcher:
        return Fetcher(self._target, limits=self._log.limits, patience=0, is_stopped=self._is_stopped)


def _position(name: tuple[int, int | None]) -> tuple[int, int]:
    """Return the version that a shortcut is made from, and its target. In this order the replica moves forward."""
    seq, base = name
    return seq if base is None else base, seq

"""Copy the versions of a chain to another store: for each commit first its data, then its record (docs/protocol.md §11).

The copy is the same chain: records and data have the same keys and bytes. So it has the same hashes, digests and signatures, and readers
check it like the chain that it was copied from.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..chain.fetch import Fetcher, WasCollected
from ..chain.log import ChainLog
from ..chain.newest_number import newest_number
from ..chain.routes.remaining_routes import was_collected
from ..chain.routes.restore import FAR, Hop, find_route
from ..errors import (
    ChainBroken,
    ChainError,
    CorruptRecord,
    DataDamaged,
    DataMissing,
    NoChain,
    ObjectMissing,
    RelayConflict,
    StoreError,
    UnsupportedVersion,
    VersionGone,
)
from ..events import OnEvent, emit
from ..format.records.record_parts import FileEntry
from ..format.records.relay_records import CopyRecord
from ..format.records.run_records import Epoch, Head, check_same_run
from ..format.records.signing import check_signature
from ..format.records.version_records import Commit, Shortcut
from ..store import keys, probe
from ..store.base import Store
from ..store.occupancy import refuse_occupied
from ..subscribe.pin_keeper import PinKeeper
from ..telemetry.trace_context import traced
from .data_copy import DataCopy, finish
from .region_records import has_record, put_record, raise_floor, read_record, region_floor

_AHEAD_COMMITS, _AHEAD_BYTES = 64, 256 << 20
"""The data of at most this many commits, with about this many bytes, are copied before the oldest of them is complete."""

_READ_AT_ONCE = 32
_HEAD_EVERY = 64


@dataclass(frozen=True, slots=True)
class _Start:
    """A full checkpoint from which the copy begins. `record` is the commit itself, or the shortcut."""

    commit: Commit
    record: Commit | Shortcut

    @property
    def seq(self) -> int:
        return self.commit.seq


class VersionCopy:
    """Copies commits with their data to the region's store. Each call continues where the store's own records end.

    Parameters
    ----------
    log
        The chain to copy from.
    target
        The region's store.
    data
        Copies data objects.
    pins
        Keeps the data that are copied next from being collected.
    on_event
        Called with each event.
    """

    def __init__(self, log: ChainLog, target: Store, data: DataCopy, pins: PinKeeper, *, on_event: OnEvent | None = None) -> None:
        self.log = log
        self._target = target
        self._data = data
        self._pins = pins
        self._on_event = on_event
        self._epochs = 0
        """All epochs up to this one are in the region's store."""
        self._is_first = True
        """Whether no call of `copy` has ended yet. An earlier process may have died half-way then."""
        self.newest: Commit | None = None
        """The newest commit that the region's store has. None before the first call, and if it has none."""
        self.version: Commit | None = None
        """The version that this commit leaves in force. None if there is none."""

    def has_news(self) -> bool:
        """Return whether the chain has commits that the region's store does not have. This takes one request."""
        if self.newest is None or self.log.known is None or self.log.read(self.log.known.seq + 1) is not None:
            return True
        self.log.check_known()
        return False

    def head_in_force(self) -> Commit | None:
        """Return the newest commit that the region has and that is not void. None if it has none."""
        return None if self.newest is None else self.log.in_force(self.newest)

    def copy(self) -> int:
        """Copy all commits that are new, and return their number.

        Raises `RelayConflict` before anything is written, if the store holds another chain. Raises `NoChain` if nothing is published.
        Errors of the stores, and of reading the chain, leave the store with a shorter copy of the chain.
        """
        copied = self._copy_next()
        if copied is not None and (not copied or not self.has_news()):
            return copied
        return (copied or 0) + self._copy_all()

    def _copy_next(self) -> int | None:
        """Copy the next commit, and return how many there were: 0 or 1. None if only `_copy_all` can tell.

        A relay that keeps up needs nothing else, and begins to copy data after one request to its source.
        """
        newest, known = self.newest, self.log.known
        if self._is_first or newest is None or known is None or known.seq != newest.seq:
            return None
        commit = self.log.read(newest.seq + 1)
        if commit is None:
            self.log.check_known()
            return 0
        self.log.accept(commit)
        try:
            self._copy_versions(commit.seq, commit)
        except VersionGone:
            return None
        return 1

    def _copy_all(self) -> int:
        is_shown = self._check_run()
        head = self.log.head()
        if head is None:
            raise NoChain(f"nothing is published at {self.log.store.url}.")
        if not is_shown:
            refuse_occupied(self._target)
            probe(self._target)
            put_record(self._target, keys.COPY, CopyRecord(self.log.run.id).to_bytes())
        at = self._common_end(head)
        try:
            copied = self._copy_after(at, head, self._start(head, at, is_shown=is_shown), is_shown=is_shown)
        except VersionGone:  # the chain was collected faster than it was copied, so continue with a full checkpoint
            newest = self._common_end(head)
            start = self._start(head, newest, is_shown=is_shown, is_forced=True)
            if start is None:
                raise
            copied = newest - at + self._copy_after(newest, head, start, is_shown=is_shown)
        self._is_first = False
        return copied

    def _copy_after(self, at: int, head: Commit, start: _Start | None, *, is_shown: bool) -> int:
        first = at + 1
        if start is not None:
            self._pins.hold(self.log.run, max(0, start.seq - 1))
            size = self._copy_start(start, at)
            for commit in self._read_ahead(first, start.seq):
                self._commit(commit, is_last=commit.seq == start.seq)
            at = start.seq
            self._report(start.commit, size, head)
            if not is_shown:
                self._show()
        elif at >= 0:
            self._pins.hold(self.log.run, at)
        self._copy_versions(at + 1, head)
        if not is_shown:
            self._show()
        return max(0, head.seq + 1 - first)

    def _check_run(self) -> bool:
        """Return whether the region's store shows a chain. Raises `RelayConflict` if it is another one."""
        if read_record(self._target, keys.RUN) is None:
            return False
        if not has_record(self._target, keys.RUN, self.log.run.to_bytes()):
            raise RelayConflict(f"{self._target.url} holds another run than {self.log.store.url}.")
        if read_record(self._target, keys.COPY) is None:
            raise RelayConflict(f"{self._target.url} is not a copy: no relay has made the chain there. It may be the origin itself.")
        return True

    def _show(self) -> None:
        """Show the chain to readers of the region, now that its newest commit has its data. Without this record there is no chain."""
        put_record(self._target, keys.RUN, self.log.run.to_bytes())

    # Where to begin

    def _common_end(self, head: Commit) -> int:
        """Return the number of the newest commit that both stores have, or −1. Raises `RelayConflict` if the commits differ."""
        last = min(self._newest_seq(), head.seq)
        if last >= 0:
            commit = self.log.ancestor(head, last)
            if not has_record(self._target, keys.commit_key(last), self.log.raw(last)):
                raise RelayConflict(f"commit {last} in {self._target.url} is not the one in {self.log.store.url}.")
            self.newest, in_force = commit, self.log.in_force(commit)
            self.version = None if in_force.state_seq is None else self.log.state_commit(in_force)
        return last

    def _newest_seq(self) -> int:
        """Return the highest seq that has a commit in the region's store, or −1. Seqs have no gaps."""
        hint = -1 if self.newest is None else self.newest.seq
        if hint < 0:
            data = read_record(self._target, keys.HEAD)
            try:
                hint = -1 if data is None else Head.parse(data).seq
            except (CorruptRecord, UnsupportedVersion):
                hint = -1
            if hint >= 0 and not self._has_commit(hint):
                hint = -1
        return newest_number(hint, self._has_commit)

    def _has_commit(self, seq: int) -> bool:
        try:
            self._target.head(keys.commit_key(seq))
        except ObjectMissing:
            return False
        return True

    def _start(self, head: Commit, at: int, *, is_shown: bool, is_forced: bool = False) -> _Start | None:
        """Return the full checkpoint to begin with, or None to continue after commit `at` with the next one.

        A copy begins with a full checkpoint if the region shows no version yet. It also does so if the deltas that it lacks have more
        bytes than the checkpoint, or if `is_forced` says that they were collected.
        """
        in_force = self.log.in_force(head)
        if in_force.state_seq is None:
            return None
        if not is_forced:
            floor = region_floor(self._target, self.log.run) if self._is_first else -1
            if (not is_shown or floor > at) and (resumed := self._resumed_start(in_force, floor)) is not None:
                return resumed
            if is_shown and head.seq - at <= FAR:
                return None
        first = find_route(self.log, None, self.log.state_commit(in_force))[0]
        start = _Start(first.target, first.record)
        if is_forced:
            lowest = self._resumed_start(in_force, self.log.floor())
            if lowest is not None and lowest.seq > start.seq:  # a rewind leads back to a version before those that were collected
                start = lowest
        if not is_shown:
            return start
        return start if start.seq > at and (is_forced or self._is_cheaper(start, at)) else None

    def _resumed_start(self, head: Commit, floor: int) -> _Start | None:
        """Return the checkpoint with which an earlier process began, if the chain still has it. Its files need not be copied again."""
        if not 0 < floor <= head.seq:
            return None
        commit = self.log.ancestor(head, floor)
        if commit.kind == "anchor":
            return _Start(commit, commit)
        record = self.log.shortcut(floor) if commit.kind == "delta" else None
        return _Start(commit, record) if record is not None and record.target == self.log.ref(commit) else None

    def _is_cheaper(self, start: _Start, at: int) -> bool:
        if self.log.floor() > at:
            return True
        return start.record.stored_bytes < sum(commit.stored_bytes for commit in self._read_ahead(at + 1, start.seq))

    def _copy_start(self, start: _Start, at: int) -> int:
        """Copy a full checkpoint, and announce that the region has no data of the versions before it. Return the bytes of its objects."""
        lowest_with_data = 1 if at < 0 else at + 1
        if start.seq > lowest_with_data or start.record is not start.commit:
            raise_floor(self._target, self.log.run, start.seq, epoch=start.commit.epoch)
        hop = Hop(start.commit, None, (), "anchor", None, start.record if isinstance(start.record, Shortcut) else None)
        entries = self._objects_of(start.record, hop, start.commit)
        self._data.copy(entries, self.log.limits, collected=was_collected(self.log, hop))
        if isinstance(start.record, Shortcut):
            put_record(self._target, keys.anchor_key(start.seq), start.record.to_bytes())
        return _size(entries)

    def _objects_of(self, record: Commit | Shortcut, hop: Hop, commit: Commit) -> list[FileEntry]:
        """Return all data objects of a record: its files, its file list, and the attachments of its version.

        The file list is copied first and then read in the region, so that it crosses the link once.
        """
        if record.file_list is not None:
            self._data.copy([record.file_list.entry], self.log.limits, collected=was_collected(self.log, hop))
        files = self.log.files_of(record, fetcher=Fetcher(self._target, limits=self.log.limits, patience=0))
        return list(dict.fromkeys([*record.named_objects, *files, *(commit.attachments or ())]))

    # Copying

    def _read_ahead(self, first: int, last: int) -> Iterator[Commit]:
        """Yield commits in order, each checked against its parent. The next ones are read at the same time."""
        with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="deltawire-relay-read") as pool:
            reading: deque[Future[Commit | None]] = deque()
            following = first
            try:
                for seq in range(first, last + 1):
                    while following <= last and len(reading) < _READ_AT_ONCE:
                        reading.append(pool.submit(self.log.read, following))
                        following += 1
                    commit = reading.popleft().result()
                    if commit is None:
                        raise DataMissing(f"commit {seq} is not in {self.log.store.url}, although later ones are.")
                    if seq > 0 and commit.parent != self.log.hash(seq - 1):
                        raise ChainBroken(f"commit {seq} in {self.log.store.url} does not follow commit {seq - 1}: its parent is another.")
                    yield commit
            finally:
                for future in reading:
                    future.cancel()

    def _copy_versions(self, first: int, head: Commit) -> None:
        """Copy commits with their data. The data of the next commits are copied at the same time."""
        under_way: deque[tuple[Commit, list[Future[None]], int]] = deque()
        size = 0
        try:
            for commit in self._read_ahead(first, head.seq):
                entries = self._needed(commit)
                under_way.append((commit, self._data.begin(entries, self.log.limits, collected=self._collected(commit)), _size(entries)))
                size += _size(entries)
                while len(under_way) > _AHEAD_COMMITS or (size > _AHEAD_BYTES and len(under_way) > 1):
                    size -= self._complete(under_way, head)
            while under_way:
                size -= self._complete(under_way, head)
        finally:
            for _, futures, _ in under_way:
                for future in futures:
                    future.cancel()

    def _complete(self, under_way: deque[tuple[Commit, list[Future[None]], int]], head: Commit) -> int:
        commit, futures, size = under_way[0]
        finish(futures)
        self._commit(commit, is_last=commit.seq == head.seq)
        under_way.popleft()
        self._pins.hold(self.log.run, commit.seq)
        self._report(commit, size, head)
        return size

    def _report(self, commit: Commit, size: int, head: Commit) -> None:
        behind = head.updates - commit.updates
        if commit.kind != "fence" and not self.log.is_void(commit):
            self.version = commit
            fields = {"seq": commit.seq, "step": commit.step, "updates": commit.updates, "bytes": size, "behind": behind}
            emit(self._on_event, "relayed", **fields, **traced(commit.meta))

    def _needed(self, commit: Commit) -> list[FileEntry]:
        """Return the data objects that the region needs before the record of a commit is created."""
        if self.log.is_void(commit):
            return []
        hop = Hop(commit, None, commit.files, "commit")
        if commit.kind == "rewind" and commit.base is not None:
            self._copy_rewound_to(commit, commit.base.seq)
        return self._objects_of(commit, hop, commit)

    def _copy_rewound_to(self, rewind: Commit, seq: int) -> None:
        """Copy the data that lead to the version that a rewind puts in force again, as far as the region does not have them.

        Nothing here depends on marks, because a store may leave them out of a listing. Data that were collected are left out, because they
        are collected only after a later commit has led elsewhere.
        """
        made = self.log.state_commit(self.log.ancestor(rewind, seq))
        if self.newest is not None and made.seq > self.newest.seq:
            return  # it builds on the version that the region has, and its own data are being copied
        self.copy_version(made)

    def copy_version(self, made: Commit) -> None:
        """Copy the data that lead to an earlier version, as far as the region does not have them. Data that were collected are left out.

        Raises `DataMissing` or `DataDamaged` if the source cannot serve the version either, and the errors of the stores.

        Parameters
        ----------
        made
            The commit that made the version.
        """
        region = ChainLog(self._target, run=self.log.run.run, trusted_keys=self.log.trusted_keys)
        try:
            hops = find_route(region, None, made)  # what the region has need not cross the link
        except (ChainError, StoreError):  # the region has begun with a later version, or its copy is damaged
            hops = None
        if hops is not None:
            with contextlib.suppress(VersionGone, DataMissing):
                self._copy_route(hops)
                return
        with contextlib.suppress(VersionGone):
            self._copy_route(find_route(self.log, None, made))

    def _copy_route(self, hops: Sequence[Hop]) -> None:
        for hop in hops:
            if hop.files or hop.has_unread_list:
                entries = self._objects_of(hop.record, hop, hop.target)
                self._data.copy(entries, self.log.limits, collected=was_collected(self.log, hop))
            if hop.shortcut is not None:
                key = keys.anchor_key(hop.target.seq) if hop.base is None else keys.skip_key(hop.target.seq, hop.base)
                put_record(self._target, key, hop.shortcut.to_bytes())

    def _collected(self, commit: Commit) -> WasCollected:
        return was_collected(self.log, Hop(commit, None, (), "commit"))

    def _commit(self, commit: Commit, *, is_last: bool) -> None:
        self._copy_epochs(commit)
        data = self.log.raw(commit.seq)
        assert data is not None
        put_record(self._target, keys.commit_key(commit.seq), data)
        self.newest = commit
        if is_last or commit.seq % _HEAD_EVERY == 0:
            self._target.put(keys.HEAD, Head(commit.seq).to_bytes(), durable=False)

    def _copy_epochs(self, commit: Commit) -> None:
        """Copy the epochs up to that of a commit. Readers of the region conclude from a missing epoch that no commit is of a later one."""
        epoch = commit.epoch
        if epoch <= self._epochs:
            return
        after = keys.epoch_key(self._epochs) if self._epochs else None
        found = [number for info in self.log.store.list(keys.EPOCHS, after=after) if (number := keys.parse_epoch_key(info.key)) is not None]
        for number in sorted({number for number in found if number < epoch} | {epoch}):
            key = keys.epoch_key(number)
            data = self.log.object(key)
            if data is None:
                raise DataMissing(f"{key} is not in {self.log.store.url}.")
            if self.log.object(key) != data:  # no hash protects it, and what is written to the region stays there
                raise DataDamaged(f"{key} in {self.log.store.url} has other bytes when it is read once more.")
            if number == epoch:  # others may be claims that nobody used, and any writer may have put them there
                self._check_epoch(key, data, commit)
            put_record(self._target, key, data)
        self._epochs = epoch

    def _check_epoch(self, key: str, data: bytes, commit: Commit) -> None:
        record = Epoch.parse(data)
        check_same_run(record.id, self.log.run, key)
        if record.epoch != commit.epoch:
            raise CorruptRecord(f"{key} in {self.log.store.url} holds {record.describe()}.")
        if commit.version > 1 or record.signature is not None:
            check_signature(record, self.log.trusted_keys)


def _size(entries: Sequence[FileEntry]) -> int:
    return sum(entry.size for entry in entries)

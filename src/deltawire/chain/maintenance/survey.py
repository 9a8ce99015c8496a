"""Find out what a chain's location holds and what must stay (docs/protocol.md §6). Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from ...errors import (
    CorruptRecord,
    DataDamaged,
    DataMissing,
    LimitExceeded,
    NoChain,
    ObjectMissing,
    SignatureInvalid,
    UnsupportedVersion,
)
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit, Shortcut
from ...store import keys
from ...store.base import ObjectInfo
from ..channels import kept_targets
from ..log import ChainLog
from ..records.pins import lowest_pin


@dataclass(frozen=True, slots=True)
class Anchor:
    """A full checkpoint in the store, and its version's attachments. `record` is a commit, or a shortcut."""

    seq: int
    record: Commit | Shortcut
    attachments: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """A chain at one moment: its head in force, the highest claimed epoch, the verified anchors, newest first, the lowest pin, and the
    versions that channels need.
    """

    head: Commit
    epoch: int
    anchors: tuple[Anchor, ...]
    pin: int | None
    channels: frozenset[int] = frozenset()

    def floor(self, keep_anchors: int) -> int | None:
        """Return the highest floor that keeps this many verified anchors and everything that is pinned. Return None if nothing may be
        deleted.
        """
        if len(self.anchors) < keep_anchors:
            return None
        floor = self.anchors[keep_anchors - 1].seq
        return floor if self.pin is None else min(floor, self.pin)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects that may be deleted: records of shortcuts, and data."""

    shortcuts: tuple[ObjectInfo, ...]
    data: tuple[ObjectInfo, ...]
    kept: int
    """The number of data objects that stay."""

    @property
    def bytes(self) -> int:
        return sum(info.size for info in (*self.shortcuts, *self.data))

    def __len__(self) -> int:
        return len(self.shortcuts) + len(self.data)


def survey(log: ChainLog, keep_anchors: int, now: datetime) -> Survey:
    """Look at a chain. `now` is the store's time, by which pins expire."""
    head = log.head()
    if head is None:
        raise NoChain(f"nothing is published at {log.store.url}.")
    head = log.in_force(head)
    anchors = []
    for anchor in _live_anchors(log, head):
        if _is_whole(log, anchor):
            anchors.append(anchor)
        if len(anchors) == keep_anchors:
            break
    return Survey(head, log.highest_epoch(), tuple(anchors), lowest_pin(log.store, log.run, now), kept_targets(log))


def find_garbage(log: ChainLog, found: Survey, floor: int) -> Garbage:
    """Return the objects that nothing above `floor` and no channel needs. Data that a writer may be about to commit are not garbage."""
    kept = _Kept()
    kept.add_anchor(_newest_anchor_upto(log, found, floor))
    for seq in range(found.head.seq, floor, -1):
        kept.add(log.ancestor(found.head, seq))
    for target in sorted(seq for seq in found.channels if seq <= floor):
        _keep_version(log, kept, log.ancestor(found.head, target))
    data = list(log.store.list(keys.DATA))
    there = {info.key for info in data}
    shortcuts, collected, unread = [], set(), []
    for info, shortcut in _shortcut_records(log):
        seq = _target_seq(info.key)
        if shortcut is not None and shortcut.epoch < found.head.epoch and _lacks_files(log, shortcut, there):
            shortcuts.append(info)
        elif seq > floor or info.key in kept.records:
            if shortcut is None:  # a cache may hide it now, or a later release have written it: its data lie under no lower number
                unread.append(seq)
            else:
                kept.add(shortcut)
        else:
            shortcuts.append(info)
            collected |= _keys_of(log, shortcut) if shortcut is not None else set()
    garbage, staying = [], 0
    for info in data:
        data_key = keys.parse_data_key(info.key)
        if data_key is None or info.key in kept or (unread and data_key.seq >= min(unread)):
            staying += 1
        # A writer commits what it has uploaded before it uploads for a higher number, so nobody will commit what is at or below the floor.
        elif data_key.epoch < found.head.epoch or (data_key.epoch == found.head.epoch and data_key.seq <= floor) or info.key in collected:
            garbage.append(info)
        else:
            staying += 1
    return Garbage(tuple(shortcuts), tuple(garbage), staying)


class _Kept:
    """The data objects that stay. For a record with a file list, everything under the epoch and seq of the list stays.

    So the list need not be read, and a list that cannot be read now loses no files.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._folders: set[str] = set()
        self.records: set[str] = set()
        """The keys of records of anchors that stay, although their version is not above the floor."""

    def add_anchor(self, anchor: Anchor | None) -> None:
        if anchor is not None:
            self.add(anchor.record, anchor.attachments)
            if isinstance(anchor.record, Shortcut):
                self.records.add(keys.anchor_key(anchor.seq))

    def add(self, record: Commit | Shortcut, attachments: Iterable[FileEntry] = ()) -> None:
        self._keys.update(entry.key for entry in (*record.named_objects, *attachments))
        if record.file_list is not None:
            self._folders.add(record.file_list.folder)

    def __contains__(self, key: str) -> bool:
        return key in self._keys or key.rpartition("/")[0] in self._folders


def _live_anchors(log: ChainLog, head: Commit) -> Iterator[Anchor]:
    """Yield the anchors in the history of `head`, newest first. Anchors that a rewind abandoned do not count."""
    listed = set(log.anchors(None, head.seq))
    commit: Commit | None = head
    while commit is not None:
        if commit.kind == "anchor":
            yield Anchor(commit.seq, commit, commit.attachments or ())
        elif commit.seq in listed:
            shortcut = _shortcut(log, commit.seq, None)
            if shortcut is not None and shortcut.target == log.ref(commit):
                yield Anchor(commit.seq, shortcut, commit.attachments or ())
        abandoned_to = commit.base.seq if commit.kind == "rewind" and commit.base is not None else None
        commit = log.previous(commit) if abandoned_to is None else log.ancestor(commit, abandoned_to)


def _keep_version(log: ChainLog, kept: _Kept, version: Commit) -> None:
    """Keep what leads to a version from its newest full checkpoint that is whole. If there is none, nothing leads there anyway."""
    for anchor in _live_anchors(log, version):
        if _is_whole(log, anchor):
            kept.add_anchor(anchor)
            for seq in range(version.seq, anchor.seq, -1):
                kept.add(log.ancestor(version, seq))
            return


def _newest_anchor_upto(log: ChainLog, found: Survey, floor: int) -> Anchor | None:
    for anchor in found.anchors:
        if anchor.seq <= floor:
            return anchor
    for anchor in _live_anchors(log, found.head):
        if anchor.seq <= floor and _is_whole(log, anchor):
            return anchor
    return None


def _is_whole(log: ChainLog, anchor: Anchor) -> bool:
    """Return whether all files of an anchor, which include its version's attachments, exist with the right size."""
    files = _files_of(log, anchor.record)
    return files is not None and all(is_stored(log, entry) for entry in (*anchor.record.named_objects, *files, *anchor.attachments))


def _files_of(log: ChainLog, record: Commit | Shortcut) -> tuple[FileEntry, ...] | None:
    """Return the files of a record, or None if its file list is missing or damaged."""
    try:
        return log.files_of(record)
    except (DataMissing, DataDamaged, CorruptRecord, LimitExceeded, UnsupportedVersion):
        return None


def _keys_of(log: ChainLog, record: Commit | Shortcut) -> set[str]:
    """Return the keys of all data objects of a record. If its file list cannot be read, only those that the record itself names."""
    return {entry.key for entry in (*record.named_objects, *(_files_of(log, record) or ()))}


def _shortcut_records(log: ChainLog) -> Iterator[tuple[ObjectInfo, Shortcut | None]]:
    """Return all shortcuts, with their record if it can be read."""
    for prefix in (keys.ANCHORS, keys.SKIPS):
        for info in log.store.list(prefix):
            skip = keys.parse_skip_key(info.key)
            seq, base = skip if skip is not None else (keys.parse_anchor_key(info.key), None)
            if seq is not None:
                yield info, _shortcut(log, seq, base)


def _target_seq(key: str) -> int:
    skip = keys.parse_skip_key(key)
    seq = skip[0] if skip is not None else keys.parse_anchor_key(key)
    assert seq is not None
    return seq


def _shortcut(log: ChainLog, seq: int, base: int | None) -> Shortcut | None:
    try:
        return log.shortcut(seq, base)
    except (CorruptRecord, SignatureInvalid, LimitExceeded, UnsupportedVersion):
        return None


def _lacks_files(log: ChainLog, shortcut: Shortcut, there: set[str]) -> bool:
    """Return whether files of a shortcut are missing, for example because they were collected before its writer wrote the record.

    `there` are the keys of a listing, which may be out of date.
    """
    objects = (*shortcut.named_objects, *(_files_of(log, shortcut) or ()))
    return not {entry.key for entry in objects} <= there and not all(is_stored(log, entry) for entry in objects)


def is_stored(log: ChainLog, entry: FileEntry) -> bool:
    """Tell whether an object is in the store with the size that its record says."""
    try:
        return log.store.head(entry.key).size == entry.size
    except (ObjectMissing, DataDamaged):
        return False

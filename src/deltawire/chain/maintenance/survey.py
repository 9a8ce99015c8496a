"""Find out what a chain's location holds and what must stay (docs/protocol.md §6). Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from ...errors import CorruptRecord, DataDamaged, LimitExceeded, NoChain, ObjectMissing, SignatureInvalid, UnsupportedVersion
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit, Shortcut
from ...store import keys
from ...store.base import ObjectInfo
from ..log import ChainLog
from ..pins import lowest_pin


@dataclass(frozen=True, slots=True)
class Anchor:
    """A full checkpoint in the store. All its files, which include its version's attachments, exist with the right size."""

    seq: int
    files: tuple[FileEntry, ...]
    is_shortcut: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """A chain at one moment: its head in force, the highest claimed epoch, the verified anchors, newest first, and the lowest pin."""

    head: Commit
    epoch: int
    anchors: tuple[Anchor, ...]
    pin: int | None

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
    """How many data objects stay."""

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
        if all(is_stored(log, entry) for entry in anchor.files):
            anchors.append(anchor)
        if len(anchors) == keep_anchors:
            break
    return Survey(head, log.highest_epoch(), tuple(anchors), lowest_pin(log.store, log.run, now))


def find_garbage(log: ChainLog, found: Survey, floor: int) -> Garbage:
    """Return the objects that nothing above `floor` needs. Data that a writer may be about to commit are not garbage."""
    kept_anchor = _newest_anchor_upto(log, found, floor)
    kept = {entry.key for entry in kept_anchor.files} if kept_anchor else set()
    for seq in range(found.head.seq, floor, -1):
        kept |= {entry.key for entry in log.ancestor(found.head, seq).all_files}
    data = list(log.store.list(keys.DATA))
    there = {info.key for info in data}
    shortcuts, collected, unread = [], set(), []
    for info, shortcut in _shortcut_records(log):
        seq = _target_seq(info.key)
        files = {entry.key for entry in shortcut.files} if shortcut else set()
        if shortcut is not None and shortcut.epoch < found.head.epoch and not files <= there and _is_dangling(log, shortcut):
            shortcuts.append(info)
        elif seq > floor or (kept_anchor and kept_anchor.is_shortcut and info.key == keys.anchor_key(kept_anchor.seq)):
            kept |= files
            if shortcut is None:  # a cache may hide it now, or a later release have written it: its data lie under no lower number
                unread.append(seq)
        else:
            shortcuts.append(info)
            collected |= files
    garbage, staying = [], 0
    for info in data:
        data_key = keys.parse_data_key(info.key)
        if data_key is None or info.key in kept or (unread and data_key.seq >= min(unread)):
            staying += 1
        elif data_key.epoch < found.head.epoch or info.key in collected or _was_committed(log, data_key.seq, floor, info.key):
            garbage.append(info)
        else:
            staying += 1
    return Garbage(tuple(shortcuts), tuple(garbage), staying)


def _live_anchors(log: ChainLog, head: Commit) -> Iterator[Anchor]:
    """Yield the anchors in the history of `head`, newest first. Anchors that a rewind abandoned do not count."""
    listed = set(log.anchors(None, head.seq))
    commit: Commit | None = head
    while commit is not None:
        if commit.kind == "anchor":
            yield Anchor(commit.seq, commit.all_files, False)
        elif commit.seq in listed:
            shortcut = _shortcut(log, commit.seq, None)
            if shortcut is not None and shortcut.target == log.ref(commit):
                yield Anchor(commit.seq, (*shortcut.files, *(commit.attachments or ())), True)
        abandoned_to = commit.base.seq if commit.kind == "rewind" and commit.base is not None else None
        commit = log.previous(commit) if abandoned_to is None else log.ancestor(commit, abandoned_to)


def _newest_anchor_upto(log: ChainLog, found: Survey, floor: int) -> Anchor | None:
    for anchor in found.anchors:
        if anchor.seq <= floor:
            return anchor
    for anchor in _live_anchors(log, found.head):
        if anchor.seq <= floor and all(is_stored(log, entry) for entry in anchor.files):
            return anchor
    return None


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


def _is_dangling(log: ChainLog, shortcut: Shortcut) -> bool:
    """Return whether files of a shortcut are missing, for example because they were collected before its writer wrote the record."""
    return not all(is_stored(log, entry) for entry in shortcut.files)


def _was_committed(log: ChainLog, seq: int, floor: int, key: str) -> bool:
    """Return whether the commit that an object was uploaded for uses it and is no longer needed. If not, its writer may still commit it."""
    commit = log.read(seq) if seq <= floor else None
    return commit is not None and any(entry.key == key for entry in commit.all_files)


def is_stored(log: ChainLog, entry: FileEntry) -> bool:
    """Tell whether an object is in the store with the size that its record says."""
    try:
        return log.store.head(entry.key).size == entry.size
    except (ObjectMissing, DataDamaged):
        return False

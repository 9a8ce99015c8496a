"""Copy files of the next version before its commit exists, because an announcement names them, and pass the announcement on."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..chain.records.announcements import AnnouncementReader
from ..errors import DeltawireError
from ..format.records.announcement_records import Announcement
from ..format.records.record_parts import CommitRef, FileEntry
from ..format.records.version_records import Commit
from ..store import keys
from ..store.base import Store
from .data_copy import DataCopy

_SHARE, _LEAST = 4, 16 << 20
"""Announced files of a version have at most this share of the state's bytes, but 16 MiB are always allowed."""


class AnnouncementCopy:
    """Passes announcements on. They are only hints, so nothing here raises an error, and bytes are bounded whatever is announced.

    Parameters
    ----------
    log
        The chain to copy from.
    target
        The region's store.
    data
        Copies the files.
    """

    def __init__(self, log: ChainLog, target: Store, data: DataCopy) -> None:
        self._target = target
        self._data = data
        self._log = log
        self._reader = AnnouncementReader(log)
        self._done: Announcement | None = None
        self._base: CommitRef | None = None
        """The commit that the last announcement builds on."""
        self._files: frozenset[FileEntry] = frozenset()
        """The files of the last announcement, which count already."""
        self._spent = 0

    def copy(self, head: Commit) -> bool:
        """Copy what is announced of the version after `head`, and then the announcement. Return whether there was something to do.

        The announcement comes after its files, so readers of the region find them there. If a file cannot be copied, the announcement is
        not passed on. The relay does not wait for one that is missing, because the next commit must not wait for a hint.
        """
        announcement = self._reader.read(head)
        if announcement is None or announcement == self._done:
            return False
        if announcement.base != self._base:
            self._base, self._files, self._spent = announcement.base, frozenset(), 0
        files = frozenset(announcement.files)
        size = sum(entry.size for entry in files - self._files)
        if self._spent + size > max(head.state_bytes // _SHARE, _LEAST):
            return False
        self._files, self._spent = files, self._spent + size
        try:
            self._data.copy(announcement.files, self._log.limits, waits=False)
            self._target.put(keys.COMING, announcement.to_bytes(), durable=False)
        except DeltawireError:
            return False
        self._done = announcement
        return True

"""Read announcements: files of the next version that are uploaded before its commit exists (docs/protocol.md §5)."""

from __future__ import annotations

from ...errors import ChainError, StoreError, UnsupportedVersion
from ...format.records.announcement_records import Announcement
from ...format.records.canonical import MAX_RECORD_BYTES
from ...format.records.signing import check_signature
from ...format.records.version_records import Commit
from ...store import keys
from ..log import ChainLog


class AnnouncementReader:
    """Reads the announcement of a chain. It is only a hint, so nothing here raises an error of the store or of the record.

    Parameters
    ----------
    log
        The chain. With trusted keys, an announcement that none of them signed is ignored.
    """

    def __init__(self, log: ChainLog) -> None:
        self._log = log
        self._tag: str | None = None
        self._newest: Announcement | None = None

    def read(self, head: Commit) -> Announcement | None:
        """Return the announcement of the version after `head`, or None if there is none. Takes one small request.

        An announcement of another run, of a replaced writer or for another base is ignored. The caller must compare the files with their
        hashes, and must not use them before a commit names them.

        Parameters
        ----------
        head
            The newest commit that is in force, which was read from this chain.
        """
        log = self._log
        try:
            found = log.store.get_if_changed(keys.COMING, limit=MAX_RECORD_BYTES, tag=self._tag)
            if found is not None:
                self._newest = None
                data, self._tag = found
                announcement = Announcement.parse(data)
                check_signature(announcement, log.trusted_keys)
                self._newest = announcement
            newest, base = self._newest, log.ref(head)
        except (StoreError, ChainError, UnsupportedVersion):
            return None
        if newest is None or newest.id != log.run.id or newest.epoch != head.epoch or newest.base != base:
            return None
        return newest

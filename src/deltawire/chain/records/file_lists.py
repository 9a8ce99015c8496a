"""The files of commits and shortcuts, also of those that have a file list (docs/protocol.md §2). Each list is fetched once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ...errors import CorruptRecord
from ...format.records.file_list import parse_list
from ...format.records.record_parts import FileEntry, Limits
from ...format.records.version_records import Commit, Shortcut
from ..fetch import Fetcher, WasCollected

_KEPT_FILES = 1 << 16
"""Most files of lists that are kept in memory."""


class FileLists:
    """Reads file lists, checks them, and keeps those that were used last. May be used from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], tuple[FileEntry, ...]] = OrderedDict()
        """The files by their list and by everything in a record that the rules for files depend on."""
        self._kept_files = 0
        self._lock = threading.Lock()

    def files_of(
        self, record: Commit | Shortcut, fetcher: Fetcher, limits: Limits, *, collected: WasCollected | None = None
    ) -> tuple[FileEntry, ...]:
        """Return the files of a record. If it has a file list, the list is fetched and checked first.

        Raises `DataMissing`, `VersionGone` and `DataDamaged` as `Fetcher.fetch` does. A list that breaks a rule or does not fit its record
        raises `CorruptRecord`, `LimitExceeded` or `UnsupportedVersion`.
        """
        if record.file_list is None:
            return record.files
        name = (record.base is None, record.may_have_other_files, record.state_bytes, record.tensors, record.file_list, limits)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        data = fetcher.fetch(record.file_list.entry, collected=collected)
        try:
            files = parse_list(bytes(data), record, limits)
        except CorruptRecord as error:
            raise CorruptRecord(f"{record.file_list.key}, the file list of {record.describe()}: {error.message}") from None
        with self._lock:
            if name not in self._kept:
                self._kept[name] = files
                self._kept_files += len(files)
            while self._kept_files > _KEPT_FILES and len(self._kept) > 1:
                self._kept_files -= len(self._kept.popitem(last=False)[1])
        return files

    def forget(self) -> None:
        """Drop all lists that are kept."""
        with self._lock:
            self._kept.clear()
            self._kept_files = 0

"""The attachments of each version: what changed is uploaded, what did not is referred to where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..chain.attachments import read_attachments_of
from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.survey import is_stored
from ..errors import DataMissing
from ..events import OnEvent, emit
from ..format.content_hash import content_hash
from ..format.records import Commit, FileEntry
from .upload import DataPlace, Uploads, file_upload


class AttachedFiles:
    """Knows the attachments of the newest version, `commit`, and names those of the next one. None is the commit of an empty chain.

    With `keeps_others`, attachments of the newest version stay if the next one is not given a file of that name.

    An object is only referred to again if the newest version refers to it: collection keeps such objects, and may delete any other.
    """

    def __init__(self, log: ChainLog, commit: Commit | None, *, keeps_others: bool = False, on_event: OnEvent | None = None) -> None:
        self._log = log
        self._keeps_others = keeps_others
        self._on_event = on_event
        self._commit = commit
        self._checked: tuple[FileEntry, ...] | None = None
        """The attachments in force, once all of them were seen in the store. None before that."""

    def took(self, commit: Commit) -> None:
        """Note that a commit landed: its attachments are in force."""
        before = self._in_force()
        self._commit = commit
        self._checked = commit.attachments
        changes = _changes(before, commit.attachments or ())
        if before is not None and changes and commit.updates > 1:
            emit(self._on_event, "attachments-changed", seq=commit.seq, files=", ".join(changes))

    def require(self) -> None:
        """Raise `DataMissing` if an attachment in force is not in the store, so that the next version could not refer to it."""
        missing = [entry for entry in self._in_force() or () if not is_stored(self._log, entry)]
        if missing:
            raise DataMissing(f"{missing[0].name}, an attachment of the newest version, is not in {self._log.store.url}.")
        self._checked = self._in_force()

    def upload(self, place: DataPlace, wanted: Mapping[str, bytes] | None, *, anew: bool = False) -> tuple[FileEntry, ...]:
        """Return the attachments of the next version, after uploading those that are not in the store.

        `wanted` are all attachments by name; None keeps those in force. `anew` uploads all of `wanted`, so that a full checkpoint does not
        depend on objects of earlier versions.
        """
        in_force = self._in_force()
        if wanted is None and in_force is not None:
            return in_force
        if in_force is None and (wanted is None or self._keeps_others):  # it is of a time when commits did not name them
            assert self._commit is not None
            there_yet = read_attachments_of(self._log, self._commit, Fetcher(self._log.store, limits=self._log.limits))
            wanted = {**there_yet, **(wanted or {})}
        assert wanted is not None
        there = {} if anew else {entry.blake3: entry for entry in self._seen()}
        uploads = Uploads(place.pool)
        names = {name.casefold() for name in wanted}
        kept = [entry for entry in in_force or () if self._keeps_others and str(entry.name).casefold() not in names]
        try:
            for name, data in sorted(wanted.items()):
                known = there.get(content_hash(data))
                if known is not None:
                    kept.append(replace(known, name=name))
                else:
                    uploads.start(file_upload(place, data, name))
            sent, _ = uploads.finish()
        except BaseException:
            uploads.abandon()
            raise
        return tuple(sorted((*kept, *sent), key=lambda entry: str(entry.name)))

    def _in_force(self) -> tuple[FileEntry, ...] | None:
        """The attachments of the newest version; None where its commit does not name them."""
        return () if self._commit is None else self._commit.attachments

    def _seen(self) -> tuple[FileEntry, ...]:
        """Those in force that are in the store. An earlier writer's may have been lost."""
        if self._checked is None:
            self._checked = tuple(entry for entry in self._in_force() or () if is_stored(self._log, entry))
        return self._checked


def _changes(before: tuple[FileEntry, ...] | None, after: tuple[FileEntry, ...]) -> list[str]:
    """Name the files that differ. Removed ones are marked with a minus sign."""
    old = {entry.name: entry.blake3 for entry in before or ()}
    new = {entry.name: entry.blake3 for entry in after}
    changed = sorted(str(name) for name in new if old.get(name) != new[name])
    return changed + sorted(f"-{name}" for name in old.keys() - new.keys())

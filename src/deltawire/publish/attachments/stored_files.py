"""The attachments of each version: changed files are uploaded, and stored files that did not change are referred to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...chain.attachments import changed_names, read_attachments_of
from ...chain.fetch import Fetcher
from ...chain.log import ChainLog
from ...chain.maintenance.survey import is_stored
from ...errors import DataDamaged, DataMissing, VersionGone
from ...events import OnEvent, emit
from ...format.content_hash import content_hash
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ..upload.data_objects import DataLocation, Uploads, file_upload

_MOST_READ = 256 << 20
"""Most bytes of attachments that a publisher reads back when it opens. For further objects, it compares only the sizes."""


_ALWAYS_OF_TOKENIZER = "tokenizer_config.json"
_SOMETIMES_OF_TOKENIZER = ("chat_template.jinja", "chat_template.json", "added_tokens.json", "special_tokens_map.json")
"""Files that a tokenizer has only if it needs them. It always has tokenizer_config.json."""


class StoredFiles:
    """Knows which attachments in the store are intact, by reading each of them once.

    `given` are the files that the publisher has itself: these can be uploaded again if the stored ones are damaged.
    """

    def __init__(self, log: ChainLog, given: Mapping[str, bytes] | None = None) -> None:
        self._log = log
        self._fetcher = Fetcher(log.store, limits=log.limits, patience=0)
        self._given = dict(given or {})
        self._known: dict[str, bool] = {}
        self._read = 0
        self._spare: dict[str, bytes] = {}

    def is_intact(self, entry: FileEntry) -> bool:
        """Return whether the object is in the store as its record says."""
        if entry.key not in self._known:
            self._known[entry.key] = is_stored(self._log, entry) and self._reads_well(entry)
        return self._known[entry.key]

    def trust(self, entries: Sequence[FileEntry]) -> None:
        """Note that these objects are intact, because they were just uploaded or checked."""
        self._known.update((entry.key, True) for entry in entries)

    def spare(self, entry: FileEntry) -> bytes | None:
        """Return the bytes that a damaged object should have, if the publisher was given them."""
        if entry.blake3 not in self._spare:
            self._spare.update((content_hash(data), data) for data in self._given.values())
        return self._spare.get(entry.blake3)

    def _reads_well(self, entry: FileEntry) -> bool:
        self._read += entry.size
        if self._read > _MOST_READ:
            return True
        try:
            self._fetcher.fetch(entry)
        except (DataDamaged, DataMissing, VersionGone):
            return False
        return True


class AttachedFiles:
    """Knows the attachments of the newest version, and determines those of the next one.

    An object is only referred to again if the newest version refers to it, because garbage collection may delete any other. It must also be
    intact.

    Parameters
    ----------
    log
        The chain.
    commit
        The commit of the newest version. None if nothing is published yet.
    stored
        Knows which stored files are intact.
    keeps_others
        Attachments of the newest version stay unless the next version has files of the same names. The files of a tokenizer count as a
        whole: if the next version has a tokenizer without a chat template, the old chat template does not stay.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        log: ChainLog,
        commit: Commit | None,
        stored: StoredFiles | None = None,
        *,
        keeps_others: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        self._log = log
        self._keeps_others = keeps_others
        self._on_event = on_event
        self._commit = commit
        self._stored = stored or StoredFiles(log)

    def at(self, commit: Commit) -> AttachedFiles:
        """Return the attachments of another version. None of the others stay."""
        return AttachedFiles(self._log, commit, self._stored)

    def took(self, commit: Commit) -> None:
        """Note that a commit landed, so that its attachments are in force."""
        before = self._in_force()
        self._commit = commit
        self._stored.trust(commit.attachments or ())
        changes = changed_names(before, commit.attachments or ())
        if before is not None and changes and commit.updates > 1:
            emit(self._on_event, "attachments-changed", seq=commit.seq, files=", ".join(changes))

    def require(self, given: Mapping[str, bytes], *, rewinds: bool) -> None:
        """Raise `DataDamaged` or `DataMissing` if the next version needs a damaged or missing attachment that is not in `given`.

        With `rewinds`, the next version has all attachments of this one. Call it before the chain is taken over.
        """
        in_force = self._in_force()
        if in_force is None and (rewinds or self._keeps_others):
            self.contents()
        names = _replaced(given)
        for entry in in_force or ():
            is_kept = rewinds or (self._keeps_others and str(entry.name).casefold() not in names)
            if not self._stored.is_intact(entry) and is_kept and self._stored.spare(entry) is None:
                raise self._lost(entry)

    def contents(self) -> dict[str, bytes]:
        """Return the attachments in force, by name. Raises as `Fetcher.fetch` does."""
        in_force = self._in_force()
        fetcher = Fetcher(self._log.store, limits=self._log.limits)
        if in_force is None:  # commits of version 1 do not name them
            assert self._commit is not None
            return read_attachments_of(self._log, self._commit, fetcher)
        found = {str(entry.name): entry for entry in in_force}
        return {name: bytes(fetcher.fetch(entry)) if self._stored.is_intact(entry) else self._spare(entry) for name, entry in found.items()}

    def read(self, name: str) -> bytes | None:
        """Return one of the attachments in force. None if there is none of this name. Raises as `Fetcher.fetch` does."""
        in_force = self._in_force()
        if in_force is None:
            return self.contents().get(name)
        entry = next((entry for entry in in_force if entry.name == name), None)
        if entry is None:
            return None
        is_intact = self._stored.is_intact(entry)
        return bytes(Fetcher(self._log.store, limits=self._log.limits).fetch(entry)) if is_intact else self._spare(entry)

    def upload(self, location: DataLocation, wanted: Mapping[str, bytes] | None, *, anew: bool = False) -> tuple[FileEntry, ...]:
        """Return the attachments of the next version. Uploads those that are not in the store, or are damaged there.

        `wanted` are all attachments by name; None keeps those in force. `anew` uploads all of `wanted`, so that a full checkpoint does not
        depend on objects of earlier versions.
        """
        in_force = self._in_force()
        keeps_others = self._keeps_others or wanted is None
        wanted = dict(wanted or {})
        names = _replaced(wanted)
        if in_force is None and keeps_others:
            wanted |= {name: data for name, data in self.contents().items() if name.casefold() not in names}
        others = [entry for entry in in_force or () if keeps_others and str(entry.name).casefold() not in names]
        kept = [entry for entry in others if self._stored.is_intact(entry)]
        wanted |= {str(entry.name): self._spare(entry) for entry in others if not self._stored.is_intact(entry)}
        there = {} if anew else {entry.blake3: entry for entry in in_force or () if self._stored.is_intact(entry)}
        uploads = Uploads(location.pool)
        try:
            for name, data in sorted(wanted.items()):
                known = there.get(content_hash(data))
                if known is not None:
                    kept.append(replace(known, name=name))
                else:
                    uploads.start(file_upload(location, data, name))
            sent, _ = uploads.finish()
        except BaseException:
            uploads.abandon()
            raise
        return tuple(sorted((*kept, *sent), key=lambda entry: str(entry.name)))

    def _spare(self, entry: FileEntry) -> bytes:
        data = self._stored.spare(entry)
        if data is None:
            raise self._lost(entry)
        return data

    def _lost(self, entry: FileEntry) -> DataDamaged | DataMissing:
        assert self._commit is not None
        error, how = (DataDamaged, "damaged") if is_stored(self._log, entry) else (DataMissing, "missing")
        return error(
            f"{entry.name}, a file of version {self._commit.updates} in {self._log.store.url}, is {how} ({entry.key}), so the next version "
            "cannot use it.",
            hint="Publish with a directory, or `attachments`, that has this file.",
        )

    def _in_force(self) -> tuple[FileEntry, ...] | None:
        """Return the attachments of the newest version. None if its commit does not name them."""
        return () if self._commit is None else self._commit.attachments


def _replaced(given: Mapping[str, bytes]) -> set[str]:
    """Return the names, in lower case, of files that do not stay if the files `given` are published."""
    names = {name.casefold() for name in given}
    return names.union(_SOMETIMES_OF_TOKENIZER) if _ALWAYS_OF_TOKENIZER in names else names

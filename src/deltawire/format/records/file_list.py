"""File lists: data objects that name the files of a version which has more files than a record has room for (docs/protocol.md §2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import LimitExceeded
from .canonical import Fields, dump
from .record_parts import HASH, FileEntry, Limits, is_data_key
from .record_rules import check_files

if TYPE_CHECKING:
    from .version_records import Commit, Shortcut

MOST_IN_RECORD = 160
"""Most files that a writer names in a record itself. If there are more, it writes a file list."""

MOST_LISTED = 1 << 16
"""Most files in a list."""

MAX_LIST_BYTES = 16 << 20
"""Most bytes of a list."""


@dataclass(frozen=True, slots=True)
class FileListRef:
    """A record's reference to its file list: the list's key and size, and how many files with how many bytes together the list names.

    All files have keys of the same epoch and seq as the list.
    """

    key: str
    size: int
    files: int
    bytes: int

    @property
    def folder(self) -> str:
        """The beginning of the keys of the list and of all its files."""
        return self.key.rpartition("/")[0]

    @property
    def entry(self) -> FileEntry:
        """The list itself as a data object. Its hash is part of its key."""
        return FileEntry(self.key, self.size, 0, self.key.rpartition("/")[2].removesuffix(".file"))

    def plain(self) -> dict[str, Any]:
        return {"key": self.key, "size": self.size, "files": self.files, "bytes": self.bytes}

    @classmethod
    def of(cls, fields: Fields) -> FileListRef:
        found = cls(fields.text("key"), fields.integer("size"), fields.integer("files"), fields.integer("bytes"))
        fields.done()
        if not is_data_key(found.key) or not found.key.endswith(".file"):
            fields.refuse(f"{found.key!r} is not the key of a file list")
        if not 1 <= found.files <= MOST_LISTED or not 1 <= found.size <= MAX_LIST_BYTES:
            fields.refuse(f"a file list names 1 to {MOST_LISTED:,} files in at most {MAX_LIST_BYTES:,} bytes")
        return found


def list_bytes(files: Sequence[FileEntry]) -> bytes:
    """Return the file list of some files. The list must be stored under the same epoch and seq as all of them.

    Raises `LimitExceeded` if there are too many.
    """
    rows = [[entry.blake3, entry.size, entry.raw, entry.name, entry.first, entry.count] for entry in files]
    data = dump({"deltawire": "files", "version": 1, "files": rows})
    if len(rows) > MOST_LISTED or len(data) > MAX_LIST_BYTES:
        raise LimitExceeded(f"a version has {len(rows):,} files; a file list names at most {MOST_LISTED:,} in {MAX_LIST_BYTES:,} bytes.")
    return data


def parse_list(data: bytes, record: Commit | Shortcut, limits: Limits) -> tuple[FileEntry, ...]:
    """Return the files that the list of a record names. `data` must have the hash in the record.

    Raises `CorruptRecord` if the list breaks a rule or does not fit its record, `LimitExceeded` if it claims more than `limits`, and
    `UnsupportedVersion`.
    """
    fields = Fields.parse(data, "files", limit=MAX_LIST_BYTES)
    rows = fields.items("files")
    fields.done()
    reference = record.file_list
    assert reference is not None
    if len(rows) != reference.files:
        fields.refuse(f"its record says that it names {reference.files:,} files, but it names {len(rows):,}")
    files = tuple(_entry(fields, reference.folder, row) for row in rows)
    if sum(entry.size for entry in files) != reference.bytes:
        fields.refuse("its files do not have as many bytes as its record says")
    for entry in files:
        if max(entry.size, entry.raw) > limits.file_bytes:
            raise LimitExceeded(f"{record.describe()} claims {max(entry.size, entry.raw):,} bytes in {entry.key}.")
    check_files(record, files, fields)
    return files


def _entry(fields: Fields, folder: str, row: Any) -> FileEntry:
    if not isinstance(row, list) or len(row) != 6:
        fields.refuse("each of its rows must have 6 values")
    blake3, size, raw, name, first, count = row
    if not isinstance(blake3, str) or HASH.fullmatch(blake3) is None:
        fields.refuse("each of its rows must begin with a hash")
    suffix = "safetensors" if name is None or (isinstance(name, str) and name.endswith(".safetensors")) else "file"
    plain = {"key": f"{folder}/{blake3}.{suffix}", "size": size, "raw": raw, "blake3": blake3, "name": name, "first": first, "count": count}
    return FileEntry.of(Fields(plain, "files.files"))

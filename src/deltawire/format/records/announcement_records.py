"""The record of an announcement: files of the next version that are uploaded before its commit exists (docs/protocol.md §2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .canonical import MAX_INTEGER, CanonicalRecord, Fields
from .record_parts import NONCE, CommitRef, FileEntry, Signature, read_short, read_signature
from .record_rules import check_delta_files


@dataclass(frozen=True, slots=True)
class Announcement(CanonicalRecord):
    """A hint of a writer: it has uploaded `files`, and will probably commit them as a part of a delta from `base`. Nobody may trust it."""

    id: str
    """The id of the run."""
    epoch: int
    """The epoch of the writer."""
    number: int
    """It rises with every announcement of an epoch."""
    seq: int
    """The number of the commit that the writer aims at."""
    base: CommitRef
    """The commit whose state the files apply to."""
    files: tuple[FileEntry, ...]
    """The files that are uploaded so far. All of them have keys of this epoch and seq."""
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the announcement of commit {self.seq}"

    def plain(self) -> dict[str, Any]:
        own = {"id": self.id, "epoch": self.epoch, "number": self.number, "seq": self.seq, "base": self.base.plain()}
        files = [entry.plain() for entry in self.files]
        return {"deltawire": "announcement", "version": 1, **own, "files": files, "signature": self.signature and self.signature.plain()}

    @classmethod
    def parse(cls, data: bytes) -> Announcement:
        fields = Fields.parse(data, "announcement")
        found = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            number=fields.integer("number"),
            seq=fields.integer("seq"),
            base=CommitRef.of(fields.object("base")),
            files=tuple(FileEntry.of(inner) for inner in fields.objects("files")),
            signature=read_signature(fields),
        )
        fields.done()
        if found.base.seq >= found.seq or found.base.digest is None:
            fields.refuse("its base is no earlier version")
        if any([int(part) for part in entry.key.split("/")[1:3]] != [found.epoch, found.seq] for entry in found.files):
            fields.refuse("its files are not of its epoch and seq")
        check_delta_files(MAX_INTEGER, MAX_INTEGER, found.files, fields)
        return found

"""The records of a chain, in canonical form (docs/protocol.md §2). Reading is strict: each record has exactly one spelling.

Every `parse` raises `CorruptRecord`, or `UnsupportedVersion` for a record of another version. Every `to_bytes` refuses what `parse` would
refuse, and raises `LimitExceeded` if the record is too long, so that a writer's mistake is found where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import CorruptRecord, LimitExceeded
from ..digest import Digest
from .canonical import MAX_RECORD_BYTES, Fields, dump
from .record_parts import (
    HASH,
    NONCE,
    READER,
    CommitRef,
    FileEntry,
    Limits,
    Signature,
    hex_or_none,
    holds_weights,
    is_data_key,
    is_reader_name,
    link_targets,
    plain_attachment,
    read_attachments,
    read_digest,
    read_links,
    read_short,
    read_signature,
    record_hash,
)
from .record_rules import check_commit, check_shortcut

__all__ = [
    "MAX_RECORD_BYTES",
    "Commit",
    "CommitRef",
    "Epoch",
    "FileEntry",
    "Head",
    "Limits",
    "Mark",
    "Pin",
    "Run",
    "Shortcut",
    "Signature",
    "check_same_run",
    "holds_weights",
    "is_data_key",
    "is_reader_name",
    "link_targets",
    "record_hash",
]

MAX_RUN_NAME = 200
_Record = TypeVar("_Record", bound="_Canonical")


class _Canonical:
    """The base of all records: conversion from and to bytes."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """Return the record's canonical form."""
        data = dump(self.plain())
        if len(data) > MAX_RECORD_BYTES:
            raise LimitExceeded(f"the record has {len(data):,} bytes; {MAX_RECORD_BYTES:,} are allowed.")
        self.parse(data)
        return data

    def plain(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def parse(cls: type[_Record], data: bytes) -> _Record:
        """Return the record with these bytes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Run(_Canonical):
    """Identity and limits of a chain."""

    run: str
    id: str
    time: int
    limits: Limits

    def plain(self) -> dict[str, Any]:
        limits = {"state_bytes": self.limits.state_bytes, "tensors": self.limits.tensors, "file_bytes": self.limits.file_bytes}
        return {"deltawire": "run", "version": 1, "run": self.run, "id": self.id, "time": self.time, "limits": limits}

    @classmethod
    def parse(cls, data: bytes) -> Run:
        fields = Fields.parse(data, "run")
        inner = fields.object("limits")
        limits = Limits(inner.integer("state_bytes"), inner.integer("tensors"), inner.integer("file_bytes"))
        inner.done()
        run = cls(_read_run_name(fields), fields.matching("id", NONCE), fields.integer("time"), limits)
        fields.done()
        return run


@dataclass(frozen=True, slots=True)
class Epoch(_Canonical):
    """A writer's claim to be the only writer. Records of `version` 1 have no signature."""

    id: str
    epoch: int
    nonce: str
    time: int
    resumed_from: int | None
    signature: Signature | None = None
    version: int = 2

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the record of epoch {self.epoch}"

    def plain(self) -> dict[str, Any]:
        own = {"id": self.id, "epoch": self.epoch, "nonce": self.nonce, "time": self.time, "resumed_from": self.resumed_from}
        signature = {} if self.version == 1 else {"signature": self.signature and self.signature.plain()}
        return {"deltawire": "epoch", "version": self.version, **own, **signature}

    @classmethod
    def parse(cls, data: bytes) -> Epoch:
        fields = Fields.parse(data, "epoch", versions=(1, 2))
        epoch = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            nonce=fields.matching("nonce", NONCE),
            time=fields.integer("time"),
            resumed_from=fields.nullable("resumed_from", fields.integer),
            signature=None if fields.version == 1 else read_signature(fields),
            version=fields.version,
        )
        fields.done()
        return epoch


@dataclass(frozen=True, slots=True)
class Commit(_Canonical):
    """One position in the chain. docs/protocol.md §2 defines every field.

    `run` and `attachments` are None in records of version 1, which do not have these fields.
    """

    id: str
    seq: int
    epoch: int
    nonce: str
    kind: str
    parent: str | None
    links: tuple[tuple[int, str], ...]
    base: CommitRef | None
    state_seq: int | None
    updates: int
    digest: Digest | None
    state_bytes: int
    tensors: int
    changed: int
    step: int | None
    time: int
    files: tuple[FileEntry, ...]
    meta: Mapping[str, str] = field(default_factory=dict)
    signature: Signature | None = None
    run: str | None = None
    attachments: tuple[FileEntry, ...] | None = None

    def describe(self) -> str:
        """Return the name for messages. People count versions, the chain counts commits, and a fence is a commit that makes no version."""
        return f"commit {self.seq} (a fence)" if self.kind == "fence" else f"version {self.updates} (commit {self.seq})"

    @property
    def version(self) -> int:
        """The version of the record."""
        return 1 if self.run is None and self.attachments is None else 2

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """The files that lead to this version, and its attachments."""
        return (*self.files, *(self.attachments or ()))

    @property
    def stored_bytes(self) -> int:
        """The number of bytes to transfer when its files are fetched."""
        return sum(entry.size for entry in self.files)

    def ref(self, data_hash: str) -> CommitRef:
        """Return a reference to this commit. `data_hash` is the hash of its bytes."""
        return CommitRef(self.seq, data_hash, self.digest)

    def plain(self) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if self.version > 1:
            added = {"run": self.run, "attachments": None if self.attachments is None else list(map(plain_attachment, self.attachments))}
        return {
            **added,
            "deltawire": "commit",
            "version": self.version,
            "id": self.id,
            "seq": self.seq,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "kind": self.kind,
            "parent": self.parent,
            "links": [list(link) for link in self.links],
            "base": self.base and self.base.plain(),
            "state_seq": self.state_seq,
            "updates": self.updates,
            "digest": hex_or_none(self.digest),
            "state_bytes": self.state_bytes,
            "tensors": self.tensors,
            "changed": self.changed,
            "step": self.step,
            "time": self.time,
            "files": [entry.plain() for entry in self.files],
            "meta": dict(self.meta),
            "signature": self.signature and self.signature.plain(),
        }

    @classmethod
    def parse(cls, data: bytes) -> Commit:
        fields = Fields.parse(data, "commit", versions=(1, 2))
        commit = cls(
            id=fields.matching("id", NONCE),
            seq=fields.integer("seq"),
            epoch=read_short(fields, "epoch"),
            nonce=fields.matching("nonce", NONCE),
            kind=fields.text("kind"),
            parent=fields.nullable("parent", lambda name: fields.matching(name, HASH)),
            links=read_links(fields),
            base=fields.nullable("base", lambda name: CommitRef.of(fields.object(name))),
            state_seq=fields.nullable("state_seq", fields.integer),
            updates=fields.integer("updates"),
            digest=read_digest(fields),
            state_bytes=fields.integer("state_bytes"),
            tensors=fields.integer("tensors"),
            changed=fields.integer("changed"),
            step=fields.nullable("step", fields.integer),
            time=fields.integer("time"),
            files=tuple(FileEntry.of(inner) for inner in fields.objects("files")),
            meta=fields.strings("meta"),
            signature=read_signature(fields),
            run=None if fields.version == 1 else _read_run_name(fields),
            attachments=None if fields.version == 1 else read_attachments(fields),
        )
        fields.done()
        check_commit(commit, fields)
        return commit


@dataclass(frozen=True, slots=True)
class Shortcut(_Canonical):
    """Another route to a version of the chain: a full checkpoint (`base` is None), or one delta from an earlier version."""

    id: str
    epoch: int
    nonce: str
    time: int
    target: CommitRef
    base: CommitRef | None
    state_bytes: int
    tensors: int
    files: tuple[FileEntry, ...]
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name for messages."""
        if self.base is None:
            return f"the full checkpoint of commit {self.target.seq}"
        return f"the skip from commit {self.base.seq} to {self.target.seq}"

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """The files that lead to its target. Attachments are those of the target's commit."""
        return self.files

    @property
    def stored_bytes(self) -> int:
        """The number of bytes to transfer when its files are fetched."""
        return sum(entry.size for entry in self.files)

    def plain(self) -> dict[str, Any]:
        return {
            "deltawire": "anchor" if self.base is None else "skip",
            "version": 1,
            "id": self.id,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "time": self.time,
            "target": self.target.plain(),
            "base": self.base and self.base.plain(),
            "state_bytes": self.state_bytes,
            "tensors": self.tensors,
            "files": [entry.plain() for entry in self.files],
            "signature": self.signature and self.signature.plain(),
        }

    @classmethod
    def parse(cls, data: bytes) -> Shortcut:
        fields = Fields.parse(data, "anchor", "skip")
        shortcut = cls(
            id=fields.matching("id", NONCE),
            epoch=read_short(fields, "epoch"),
            nonce=fields.matching("nonce", NONCE),
            time=fields.integer("time"),
            target=CommitRef.of(fields.object("target")),
            base=fields.nullable("base", lambda name: CommitRef.of(fields.object(name))),
            state_bytes=fields.integer("state_bytes"),
            tensors=fields.integer("tensors"),
            files=tuple(FileEntry.of(inner) for inner in fields.objects("files")),
            signature=read_signature(fields),
        )
        fields.done()
        check_shortcut(shortcut, fields)
        return shortcut


@dataclass(frozen=True, slots=True)
class Mark(_Canonical):
    """Announces that data which only versions up to `floor` need will be deleted."""

    id: str
    mark: int
    epoch: int
    floor: int
    nonce: str
    time: int

    def plain(self) -> dict[str, Any]:
        own = {"id": self.id, "mark": self.mark, "epoch": self.epoch, "floor": self.floor, "nonce": self.nonce, "time": self.time}
        return {"deltawire": "gc", "version": 1, **own}

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        fields = Fields.parse(data, "gc")
        mark = cls(
            id=fields.matching("id", NONCE),
            mark=read_short(fields, "mark"),
            epoch=read_short(fields, "epoch"),
            floor=fields.integer("floor"),
            nonce=fields.matching("nonce", NONCE),
            time=fields.integer("time"),
        )
        fields.done()
        return mark


@dataclass(frozen=True, slots=True)
class Pin(_Canonical):
    """Says that a reader needs the data which lead from version `seq` on. It holds for `ttl` seconds after it was written."""

    id: str
    reader: str
    seq: int
    ttl: int

    def plain(self) -> dict[str, Any]:
        return {"deltawire": "pin", "version": 1, "id": self.id, "reader": self.reader, "seq": self.seq, "ttl": self.ttl}

    @classmethod
    def parse(cls, data: bytes) -> Pin:
        fields = Fields.parse(data, "pin")
        pin = cls(fields.matching("id", NONCE), fields.matching("reader", READER), fields.integer("seq"), fields.integer("ttl"))
        fields.done()
        return pin


@dataclass(frozen=True, slots=True)
class Head(_Canonical):
    """A hint: the newest commit number. Readers never trust it."""

    seq: int

    def plain(self) -> dict[str, Any]:
        return {"deltawire": "head", "version": 1, "seq": self.seq}

    @classmethod
    def parse(cls, data: bytes) -> Head:
        fields = Fields.parse(data, "head")
        head = cls(fields.integer("seq"))
        fields.done()
        return head


def _read_run_name(fields: Fields) -> str:
    name = fields.text("run")
    if not 1 <= len(name) <= MAX_RUN_NAME:
        fields.refuse(f"a run's name has 1 to {MAX_RUN_NAME} characters")
    return name


def check_same_run(record_id: str, run: Run, what: str) -> None:
    """Raise `CorruptRecord` unless the record belongs to this run."""
    if record_id != run.id:
        raise CorruptRecord(f"{what} is of another run ({record_id}) than the chain it lies in ({run.id}).")

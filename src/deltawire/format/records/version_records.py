"""The records of versions: commits, and the shortcuts to them (docs/protocol.md §2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..digest import Digest
from .canonical import CanonicalRecord, Fields
from .file_list import FileListRef
from .record_parts import (
    HASH,
    NONCE,
    CommitRef,
    FileEntry,
    RecipeRecord,
    Signature,
    hex_or_none,
    plain_attachment,
    read_attachments,
    read_digest,
    read_links,
    read_recipe,
    read_run_name,
    read_short,
    read_signature,
)
from .record_rules import check_commit, check_shortcut


@dataclass(frozen=True, slots=True)
class Commit(CanonicalRecord):
    """One position in the chain. docs/protocol.md §2 defines every field.

    `run` and `attachments` are None in records of version 1, which do not have these fields. `recipe` is None in records of versions 1
    and 2: their versions were published as they are, or another program had quantised them. If `file_list` is not None, `files` is empty:
    the list names the files (`ChainLog.files_of`).
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
    recipe: RecipeRecord | None = None
    file_list: FileListRef | None = None

    def describe(self) -> str:
        """Return the name for messages. People count versions, the chain counts commits, and a fence is a commit that makes no version."""
        return f"commit {self.seq} (a fence)" if self.kind == "fence" else f"version {self.updates} (commit {self.seq})"

    @property
    def version(self) -> int:
        """The version of the record."""
        if self.file_list is not None:
            return 4
        if self.recipe is not None:
            return 3
        return 1 if self.run is None and self.attachments is None else 2

    @property
    def result(self) -> Digest | None:
        """The digest of the state that its files lead to."""
        return self.digest

    @property
    def may_have_other_files(self) -> bool:
        """Whether its checkpoint may have files without weights. Since version 2 they are attachments."""
        return self.attachments is None

    @property
    def named_objects(self) -> tuple[FileEntry, ...]:
        """The data objects that the record itself names: its files or its file list, and its attachments."""
        return (*_own_objects(self), *(self.attachments or ()))

    @property
    def file_count(self) -> int:
        """The number of its files, in the record or in its list."""
        return _file_count(self)

    @property
    def stored_bytes(self) -> int:
        """The number of bytes to transfer when its files are fetched."""
        return _stored_bytes(self)

    def ref(self, data_hash: str) -> CommitRef:
        """Return a reference to this commit. `data_hash` is the hash of its bytes."""
        return CommitRef(self.seq, data_hash, self.digest)

    def plain(self) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if self.version > 1:
            added = {"run": self.run, "attachments": None if self.attachments is None else list(map(plain_attachment, self.attachments))}
        if self.version > 2:
            added["recipe"] = self.recipe and self.recipe.plain()
        if self.file_list is not None:
            added["list"] = self.file_list.plain()
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
        fields = Fields.parse(data, "commit", versions=(1, 2, 3, 4))
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
            run=None if fields.version == 1 else read_run_name(fields),
            attachments=None if fields.version == 1 else read_attachments(fields),
            recipe=_read_recipe(fields),
            file_list=None if fields.version < 4 else FileListRef.of(fields.object("list")),
        )
        fields.done()
        check_commit(commit, fields)
        return commit


@dataclass(frozen=True, slots=True)
class Shortcut(CanonicalRecord):
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
    file_list: FileListRef | None = None

    def describe(self) -> str:
        """Return the name for messages."""
        if self.base is None:
            return f"the full checkpoint of commit {self.target.seq}"
        return f"the skip from commit {self.base.seq} to {self.target.seq}"

    @property
    def result(self) -> Digest | None:
        """The digest of the state that its files lead to."""
        return self.target.digest

    @property
    def may_have_other_files(self) -> bool:
        """Whether its checkpoint may have files without weights: those of a target of version 1."""
        return True

    @property
    def named_objects(self) -> tuple[FileEntry, ...]:
        """The data objects that the record itself names: its files or its file list. Attachments are those of the target's commit."""
        return _own_objects(self)

    @property
    def file_count(self) -> int:
        """The number of its files, in the record or in its list."""
        return _file_count(self)

    @property
    def stored_bytes(self) -> int:
        """The number of bytes to transfer when its files are fetched."""
        return _stored_bytes(self)

    def plain(self) -> dict[str, Any]:
        listed = {} if self.file_list is None else {"list": self.file_list.plain()}
        return {
            **listed,
            "deltawire": "anchor" if self.base is None else "skip",
            "version": 1 if self.file_list is None else 2,
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
        fields = Fields.parse(data, "anchor", "skip", versions=(1, 2))
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
            file_list=None if fields.version == 1 else FileListRef.of(fields.object("list")),
        )
        fields.done()
        check_shortcut(shortcut, fields)
        return shortcut


def _read_recipe(fields: Fields) -> RecipeRecord | None:
    if fields.version < 3:
        return None
    return read_recipe(fields) if fields.version == 3 else fields.nullable("recipe", lambda _: read_recipe(fields))


def _own_objects(record: Commit | Shortcut) -> tuple[FileEntry, ...]:
    return record.files if record.file_list is None else (record.file_list.entry,)


def _file_count(record: Commit | Shortcut) -> int:
    return len(record.files) if record.file_list is None else record.file_list.files


def _stored_bytes(record: Commit | Shortcut) -> int:
    listed = 0 if record.file_list is None else record.file_list.size + record.file_list.bytes
    return listed + sum(entry.size for entry in record.files)

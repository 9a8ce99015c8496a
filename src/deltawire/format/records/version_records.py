"""The records of versions: commits, and the shortcuts to them (docs/protocol.md §2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..digest import Digest
from .canonical import CanonicalRecord, Fields
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
    and 2: their versions were published as they are, or another program had quantised them.
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

    def describe(self) -> str:
        """Return the name for messages. People count versions, the chain counts commits, and a fence is a commit that makes no version."""
        return f"commit {self.seq} (a fence)" if self.kind == "fence" else f"version {self.updates} (commit {self.seq})"

    @property
    def version(self) -> int:
        """The version of the record."""
        if self.recipe is not None:
            return 3
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
        if self.recipe is not None:
            added["recipe"] = self.recipe.plain()
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
        fields = Fields.parse(data, "commit", versions=(1, 2, 3))
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
            recipe=read_recipe(fields) if fields.version > 2 else None,
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

"""The records that say what a chain is, who writes it and how far it goes (docs/protocol.md §2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import CorruptRecord
from .canonical import CanonicalRecord, Fields
from .record_parts import NONCE, Limits, Signature, read_run_name, read_short, read_signature


@dataclass(frozen=True, slots=True)
class Run(CanonicalRecord):
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
        run = cls(read_run_name(fields), fields.matching("id", NONCE), fields.integer("time"), limits)
        fields.done()
        return run


@dataclass(frozen=True, slots=True)
class Epoch(CanonicalRecord):
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
class Head(CanonicalRecord):
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


def check_same_run(record_id: str, run: Run, what: str) -> None:
    """Raise `CorruptRecord` unless the record belongs to this run."""
    if record_id != run.id:
        raise CorruptRecord(f"{what} is of another run ({record_id}) than the chain it lies in ({run.id}).")

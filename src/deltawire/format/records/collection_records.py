"""The records that decide which data may be deleted: marks and pins (docs/protocol.md §2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .canonical import CanonicalRecord, Fields
from .record_parts import NONCE, READER, read_short


@dataclass(frozen=True, slots=True)
class Mark(CanonicalRecord):
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
class Pin(CanonicalRecord):
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

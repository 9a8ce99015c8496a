"""The records of relays: where a copy of the chain is, and that a location is one (docs/protocol.md §11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .canonical import CanonicalRecord, Fields
from .record_parts import NONCE, READER

MAX_URL = 2048


@dataclass(frozen=True, slots=True)
class PublishedRelay(CanonicalRecord):
    """Says where a relay keeps a copy of the chain. It is only a hint, and nobody may trust it."""

    id: str
    """The id of the run."""
    name: str
    """The name of the relay."""
    url: str
    """The location of the copy."""

    def plain(self) -> dict[str, Any]:
        return {"deltawire": "relay", "version": 1, "id": self.id, "name": self.name, "url": self.url}

    @classmethod
    def parse(cls, data: bytes) -> PublishedRelay:
        fields = Fields.parse(data, "relay")
        found = cls(fields.matching("id", NONCE), fields.matching("name", READER), fields.text("url"))
        fields.done()
        if not 1 <= len(found.url) <= MAX_URL or not found.url.isprintable():
            fields.refuse("its url is not a URL")
        return found


@dataclass(frozen=True, slots=True)
class CopyRecord(CanonicalRecord):
    """Says that a location is a copy of a chain, which relays write. It keeps publishers from it, and keeps relays from an origin."""

    id: str
    """The id of the run."""

    def plain(self) -> dict[str, Any]:
        return {"deltawire": "copy", "version": 1, "id": self.id}

    @classmethod
    def parse(cls, data: bytes) -> CopyRecord:
        fields = Fields.parse(data, "copy")
        found = cls(fields.matching("id", NONCE))
        fields.done()
        return found

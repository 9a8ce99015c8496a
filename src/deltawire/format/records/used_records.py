"""Which interactions rounds have used, even after those rounds were deleted (docs/protocol.md §13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import LimitExceeded
from ..live_parts import is_session, read_time
from .canonical import MAX_INTEGER, CanonicalRecord, Fields, dump
from .record_parts import HASH, NONCE, Signature, read_short, read_signature

MAX_USED_BYTES = 64 << 20
"""The size of the largest list of used interactions."""


@dataclass(frozen=True, slots=True)
class UsedSession:
    """The interactions of one session of a gateway that rounds have used.

    Parameters
    ----------
    mark
        No interaction in a file with a lower number will ever be joined again.
    items
        The indices of the used interactions in files from the mark on, by the number of the file.
    """

    mark: int = 0
    items: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def holds(self, number: int, index: int) -> bool:
        """Tell whether an interaction was used, or will never be joined.

        Parameters
        ----------
        number
            The number of its file.
        index
            Its index in the file.
        """
        return number < self.mark or index in self.items.get(number, ())


@dataclass(frozen=True, slots=True)
class UsedList:
    """The interactions that rounds have used, by session.

    Parameters
    ----------
    sessions
        The used interactions of each session.
    """

    sessions: Mapping[str, UsedSession] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the list in canonical form. Raises `LimitExceeded`, or what `parse` raises."""
        sessions = {
            name: {"mark": one.mark, "items": [[number, sorted(indices)] for number, indices in sorted(one.items.items())]}
            for name, one in self.sessions.items()
        }
        data = dump({"deltawire": "used-list", "version": 1, "sessions": sessions})
        if len(data) > MAX_USED_BYTES:
            raise LimitExceeded(f"a list of used interactions has {len(data):,} bytes; {MAX_USED_BYTES:,} are allowed.")
        self.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes) -> UsedList:
        """Return the list with these bytes. Raises `CorruptRecord` or `UnsupportedVersion`.

        Parameters
        ----------
        data
            The bytes of the object.
        """
        fields = Fields.parse(data, "used-list", limit=MAX_USED_BYTES)
        sessions: dict[str, UsedSession] = {}
        for name, value in fields.mapping("sessions").items():
            if not is_session(name) or not isinstance(value, dict):
                fields.refuse(f"{name!r} is not the session of a gateway")
            inner = Fields(value, "used-list.session")
            mark = inner.integer("mark")
            items: dict[int, frozenset[int]] = {}
            for item in inner.items("items"):
                number, indices = _read_item(inner, item)
                if number < max([mark, *([next(reversed(items)) + 1] if items else [])]):
                    inner.refuse("its files are not in ascending order, or are below the mark")
                items[number] = indices
            inner.done()
            sessions[name] = UsedSession(mark, items)
        fields.done()
        return cls(sessions)


@dataclass(frozen=True, slots=True)
class Used(CanonicalRecord):
    """Says which list holds the interactions that all rounds before `round` have used.

    Parameters
    ----------
    id
        The id of the run.
    round
        The number of a round. The list covers all rounds with lower numbers.
    epoch
        The epoch of the trainer that wrote it.
    nonce
        Drawn at random, so that a trainer recognises its own record.
    size
        The number of bytes of the list.
    blake3
        The hash of the list.
    time
        The trainer's clock in milliseconds, for people.
    signature
        The trainer's signature; None on a chain that is not signed.
    """

    id: str
    round: int
    epoch: int
    nonce: str
    size: int
    blake3: str
    time: int
    signature: Signature | None = None

    def describe(self) -> str:
        """Return the name of the record for error messages."""
        return f"the record of the interactions that were used before round {self.round}"

    def plain(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("id", "round", "epoch", "nonce", "size", "blake3", "time")}
        return {"deltawire": "used", "version": 1, **own, "signature": self.signature and self.signature.plain()}

    @classmethod
    def parse(cls, data: bytes) -> Used:
        """Return the record with these bytes. Raises `CorruptRecord` or `UnsupportedVersion`.

        Parameters
        ----------
        data
            The bytes of the object.
        """
        fields = Fields.parse(data, "used")
        found = cls(
            id=fields.matching("id", NONCE),
            round=read_short(fields, "round"),
            epoch=read_short(fields, "epoch"),
            nonce=fields.matching("nonce", NONCE),
            size=fields.integer("size"),
            blake3=fields.matching("blake3", HASH),
            time=read_time(fields),
            signature=read_signature(fields),
        )
        fields.done()
        if found.size > MAX_USED_BYTES:
            fields.refuse(f"its list has {found.size:,} bytes; {MAX_USED_BYTES:,} are allowed")
        return found


def _read_item(fields: Fields, item: Any) -> tuple[int, frozenset[int]]:
    if not isinstance(item, list) or [type(part) for part in item] != [int, list] or not 0 <= item[0] <= MAX_INTEGER:
        fields.refuse("an item is [number, [index, …]]")
    number, indices = item
    if not indices or any(type(index) is not int or not 0 <= index <= MAX_INTEGER for index in indices) or indices != sorted(set(indices)):
        fields.refuse("the indices of an item must be in ascending order")
    return number, frozenset(indices)

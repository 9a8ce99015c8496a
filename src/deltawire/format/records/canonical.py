"""The canonical form of records: JSON with exactly one spelling, read field by field (docs/protocol.md §2).

Reading is strict: each record has exactly one spelling. Every `parse` raises `CorruptRecord`, or `UnsupportedVersion` for a record of
another version. Every `to_bytes` refuses what `parse` would refuse, and raises `LimitExceeded` if the record is too long, so that a
writer's mistake is found where it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Protocol, TypeVar

from ...errors import CorruptRecord, LimitExceeded, UnsupportedVersion

MAX_RECORD_BYTES = 65536
MAX_INTEGER = 2**63 - 1

_Value = TypeVar("_Value")
_Record = TypeVar("_Record", bound="CanonicalRecord")


class _Parsed(Protocol):
    @classmethod
    def parse(cls, data: bytes) -> object: ...


def dump(record: dict[str, Any]) -> bytes:
    """Return the canonical form of a record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def checked_bytes(kind: type[_Parsed], plain: dict[str, Any], limit: int = MAX_RECORD_BYTES) -> bytes:
    """Return the canonical bytes of a record. Raises what `parse` raises for them, or `LimitExceeded`."""
    data = dump(plain)
    if len(data) > limit:
        raise LimitExceeded(f"the record has {len(data):,} bytes; {limit:,} are allowed.")
    kind.parse(data)
    return data


class CanonicalRecord:
    """The base of a chain's records: conversion from and to bytes."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """Return the record's canonical form."""
        return checked_bytes(type(self), self.plain())

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        raise NotImplementedError

    @classmethod
    def parse(cls: type[_Record], data: bytes) -> _Record:
        """Return the record with these bytes."""
        raise NotImplementedError


class Fields:
    """The fields of one JSON object. They are taken one after the other, and each is checked for its type. `done` refuses any that are
    left.
    """

    def __init__(self, values: dict[str, Any], what: str) -> None:
        self.kind = what
        self.version = 1
        """The record's version. Objects inside a record have none."""
        self._what = what
        self._left = dict(values)

    @classmethod
    def parse(cls, data: bytes, *kinds: str, limit: int = MAX_RECORD_BYTES, versions: Collection[int] = (1,)) -> Fields:
        """Return the fields of a record of one of these kinds and versions, `deltawire` and `version` already taken.

        `kind` and `version` say which of them it is. Raises `CorruptRecord`, and `UnsupportedVersion` for any other version.
        """
        what = " or ".join(kinds)
        if len(data) > limit:
            raise CorruptRecord(f"a {what} record has {len(data):,} bytes; {limit:,} are allowed.")
        try:
            values = json.loads(data.decode("ascii"), parse_float=_no_number, parse_constant=_no_number)
            canonical = dump(values) == data
        except (ValueError, RecursionError) as error:
            raise CorruptRecord(f"a {what} record is not JSON of the allowed form ({error}).") from None
        if not isinstance(values, dict) or not canonical:
            raise CorruptRecord(f"a {what} record is not in canonical form.")
        fields = cls(values, what)
        fields.kind = fields.text("deltawire")
        fields.version = fields.integer("version")
        if fields.kind not in kinds:
            fields.refuse(f"it calls itself {fields.kind!r}")
        if fields.version not in versions:
            known = " and ".join(map(str, sorted(versions)))
            raise UnsupportedVersion(f"a {what} record is of version {fields.version}; this release reads {known}.")
        return fields

    def refuse(self, why: str) -> NoReturn:
        raise CorruptRecord(f"a {self._what} record breaks the rules: {why}.")

    def done(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            self.refuse(f"it has the unknown field {min(self._left)!r}")

    def has(self, name: str) -> bool:
        """Tell whether there is a field with this name that was not taken yet."""
        return name in self._left

    def any(self, name: str) -> Any:
        """Return a field of any type. The caller checks it."""
        return self._take(name)

    def integer(self, name: str) -> int:
        value = self._take(name)
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            self.refuse(f"{name} must be an integer from 0 to 2^63-1")
        return value

    def text(self, name: str) -> str:
        return self._checked_text(name, self._take(name))

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.text(name)
        if pattern.fullmatch(value) is None:
            self.refuse(f"{name} must match {pattern.pattern}")
        return value

    def nullable(self, name: str, read: Callable[[str], _Value]) -> _Value | None:
        """Return None for null, otherwise the result of `read`."""
        if name in self._left and self._left[name] is None:
            del self._left[name]
            return None
        return read(name)

    def items(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            self.refuse(f"{name} must be a list")
        return value

    def object(self, name: str) -> Fields:
        return self._nested(name, self._take(name))

    def objects(self, name: str) -> list[Fields]:
        return [self._nested(name, value) for value in self.items(name)]

    def strings(self, name: str) -> dict[str, str]:
        return {key: self._checked_text(name, text) for key, text in self.mapping(name).items()}

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object with arbitrary keys. The caller checks its values."""
        value = self._take(name)
        if not isinstance(value, dict):
            self.refuse(f"{name} must map strings to values")
        return {self._checked_text(name, key): each for key, each in value.items()}

    def _take(self, name: str) -> Any:
        if name not in self._left:
            self.refuse(f"it lacks {name}")
        return self._left.pop(name)

    def _nested(self, name: str, value: Any) -> Fields:
        if not isinstance(value, dict):
            self.refuse(f"{name} must be an object")
        return Fields(value, f"{self._what}.{name}")

    def _checked_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            self.refuse(f"{name} must be a string")
        try:
            value.encode()
        except UnicodeEncodeError:  # "\ud800" is valid JSON, but only half a character
            self.refuse(f"{name} is not valid Unicode")
        return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")

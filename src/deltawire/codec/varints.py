"""Integers of variable length (LEB128), as delta files of version 3 have them."""

from __future__ import annotations

from ..errors import CorruptDelta
from .base import Buffer

_LIMIT = 1 << 40
"""No number in a delta file is as large as this."""


def to_varint(value: int) -> bytes:
    """Return an integer with 7 bits in each byte, the lowest first. All bytes but the last have the top bit set."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it. Raise `CorruptDelta` unless it has its shortest form."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if value >= _LIMIT or (not byte and shift > 7):
            raise CorruptDelta("a number is too large, or longer than it needs to be.")
        if byte < 128:
            return value, at
        if shift >= 42:
            raise CorruptDelta("a number is too large, or longer than it needs to be.")
    raise CorruptDelta("a number is cut off.")

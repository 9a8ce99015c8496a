"""§3 A payload."""

from __future__ import annotations

import struct

from ...dtypes import DType
from ...errors import CorruptDelta, DtypeMismatch

BLOCK = 1 << 24
TILE = 1 << 14
SAME, CODED, RAW = range(3)


def read_chunks(payload: bytes, dtype: DType) -> list[tuple[int, int, bytes]]:
    """Return the number of elements, the mode and the unread body of each chunk of a payload."""
    if not payload:
        raise CorruptDelta("a payload is empty.")
    if payload[0] != dtype.code:
        raise DtypeMismatch(f"the payload has element type {payload[0]}, the tensor {dtype.code} ({dtype.name}).")
    chunks = []
    at = 1
    while at < len(payload):
        if len(payload) - at < 8:
            raise CorruptDelta("the header of a chunk is cut off.")
        word, length = struct.unpack_from("<II", payload, at)
        elements, mode, body = word % (1 << 30), word >> 30, payload[at + 8 : at + 8 + length]
        at += 8 + length
        if mode > RAW:
            raise CorruptDelta(f"a chunk has the unknown mode {mode}.")
        if not 1 <= elements <= BLOCK:
            raise CorruptDelta(f"a chunk has {elements} elements, not 1 … 2^24.")
        if len(body) != length:
            raise CorruptDelta("the body of a chunk is cut off.")
        if mode == SAME and length:
            raise CorruptDelta("a chunk that changes nothing has a body.")
        if mode == RAW and length != elements * dtype.itemsize:
            raise CorruptDelta(f"a raw chunk of {elements} elements has {length} bytes.")
        if at < len(payload) and elements % TILE:
            raise CorruptDelta(f"a chunk before the last has {elements} elements, not a multiple of 2^14.")
        chunks.append((elements, mode, body))
    return chunks

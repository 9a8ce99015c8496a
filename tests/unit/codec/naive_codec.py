"""A second, naive writer, whose bits are the characters "0" and "1" in stream order, and calls of the reference codec."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from old_deltas import encode_payload

from deltawire.codec.base import Lanes, ResolveJob
from deltawire.codec.bits import HostBits
from deltawire.codec.reference import ReferenceCodec, decoder, terms
from deltawire.codec.reference.decoder import BitReader
from deltawire.dtypes import dtype_named

CODEC = ReferenceCodec()
SEED = 0x0123456789ABCDEF
U8, U16, U32, I64, U64, BF16, F32, F64 = map(dtype_named, ["U8", "U16", "U32", "I64", "U64", "BF16", "F32", "F64"])
SAME, CODED, RAW = range(3)
UNIT, RUNS, DIRECT, SYMBOLS = range(4)


def bits(value: int, length: int) -> str:
    assert 0 <= value < 1 << length
    return "".join(str(value >> i & 1) for i in range(length))


def count(n: int) -> str:
    return bits(n.bit_length(), 5) + (bits(n - (1 << (n.bit_length() - 1)), n.bit_length() - 1) if n else "")


def lr(k: int, *values: int) -> str:
    out = ""
    for v in values:
        q = v >> k
        if q < 16:
            out += "0" * q + "1"
        else:
            x = q - 15
            b = x.bit_length() - 1
            out += "0" * 16 + bits(b, 6) + bits(x - (1 << b), b)
        out += bits(v & ((1 << k) - 1), k)
    return out


def naive_k(values: list[int], largest: int) -> int:
    if not values:
        return 0
    k = min(largest, (sum(min(v, 2**47) for v in values) // len(values)).bit_length())
    while k > 0 and len(lr(k - 1, *values)) < len(lr(k, *values)):
        k -= 1
    return k


def pack(*parts: str) -> bytes:
    text = "".join(parts)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


def chunk(elements: int, mode: int, body: bytes = b"") -> bytes:
    return struct.pack("<II", elements | mode << 30, len(body)) + body


def payload(dtype, *chunks: bytes) -> bytes:
    return bytes([dtype.code]) + b"".join(chunks)


class Resolved(NamedTuple):
    indices: NDArray[np.int64]
    values: HostBits
    before: Lanes
    after: Lanes


def encode(base, new, dtype):
    return encode_payload(base, new, dtype, SEED)


def resolve(base, data, dtype, size=None):
    resolution = CODEC.resolution(1, 0)
    span = None if data is None else (0, len(data))
    outcomes = resolution.add([ResolveJob(base, base.size if size is None else size, span, dtype, SEED)], b"" if data is None else data)
    return Resolved(*resolution.changes([0])[0], tuple(outcomes.before[0].tolist()), tuple(outcomes.after[0].tolist()))


def joined(encoded) -> bytes:
    return b"".join(bytes(piece) for piece in encoded.payload)


def split(data: bytes) -> list[tuple[int, int, bytes]]:
    out, at = [], 1
    while at < len(data):
        word, length = struct.unpack_from("<II", data, at)
        out.append((word & (2**30 - 1), word >> 30, data[at + 8 : at + 8 + length]))
        at += 8 + length
    return out


def value_modes(body: bytes, dtype) -> set[int]:
    reader = BitReader(body)
    reader.take(11)
    table, _ = decoder.read_table(reader, dtype.width)
    headers = [decoder.read_context_header(reader, dtype.width, bool(table), 2**15) for _ in range(terms.context_count(dtype))]
    return {h.mode for h in headers if h.n}


def check_round_trip(base, new, dtype) -> bytes:
    encoded = encode(base, new, dtype)
    old = np.zeros_like(new) if base is None else base
    expected = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
    assert encoded.changed == expected.size
    assert [[*encoded.before], [*encoded.after]] == CODEC.digest([old, new], np.array([SEED, SEED], np.uint64), 1).tolist()
    data = joined(encoded)
    result = resolve(base, data if encoded.payload else None, dtype, new.size)
    assert result.indices.dtype == np.int64
    assert result.values.dtype == dtype.bits
    np.testing.assert_array_equal(result.indices, expected)
    np.testing.assert_array_equal(result.values, new.reshape(-1)[expected])
    assert (result.before, result.after) == (encoded.before, encoded.after)
    return data


def table_of(*symbols: int, ks: int = 0) -> str:
    return "1" + bits(len(symbols) - 1, 8) + bits(ks, 3) + "".join(bits(s, 8) for s in symbols)

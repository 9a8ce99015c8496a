"""Test every rule that a reader of payloads enforces. `plain` builds the body of a chunk of one context, and tests replace parts of it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from naive_codec import (
    BF16,
    CODED,
    DIRECT,
    F32,
    RAW,
    RUNS,
    SAME,
    SYMBOLS,
    U8,
    U16,
    U32,
    U64,
    UNIT,
    bits,
    chunk,
    count,
    encode,
    joined,
    lr,
    pack,
    payload,
    resolve,
    table_of,
)

from deltawire.errors import CorruptDelta, DtypeMismatch, ShapeMismatch

PLAIN = {
    "top": bits(0, 11),
    "table": "0",
    "n": count(2),
    "inverted": "0",
    "k": bits(0, 5),
    "mode": bits(UNIT, 2),
    "params": "",
    "positions": lr(0, 1, 0),
    "values": "01",
    "tail": "",
}


def plain(**change: str) -> bytes:
    assert change.keys() <= PLAIN.keys()
    return pack(*(PLAIN | change).values())


def read_body(body: bytes, dtype=U8, size=40):
    return resolve(np.zeros(size, dtype.bits), payload(dtype, chunk(size, CODED, body)), dtype)


ACCEPTED = {
    "plain": ({}, [(1, 1), (2, 255)]),
    "inverted": (
        {"n": count(38), "inverted": "1" + count(2), "positions": lr(0, 0, 0), "values": "0" * 38},
        [(i, 1) for i in range(2, 40)],
    ),
    "unused table": ({"table": table_of(3, 1, 2, ks=7)}, [(1, 1), (2, 255)]),
    "whole table": ({"table": table_of(*range(256)), "mode": bits(SYMBOLS, 2), "values": lr(0, 255, 1)}, [(1, 255), (2, 1)]),
    "symbols": ({"table": table_of(3, 0, 2), "mode": bits(SYMBOLS, 2), "values": lr(0, 0, 2)}, [(1, 3), (2, 2)]),
    "runs": (
        {"mode": bits(RUNS, 2), "params": count(1) + bits(24, 5) + bits(7, 6), "values": "00" + lr(24, 1) + lr(7, 126)},
        [(1, 1), (2, 128)],
    ),
    "direct": ({"mode": bits(DIRECT, 2), "params": bits(0, 6), "values": "01" + lr(0, 127, 0)}, [(1, 128), (2, 255)]),
    "wasteful k": ({"k": bits(24, 5), "positions": lr(24, 1, 0)}, [(1, 1), (2, 255)]),
    "last element": ({"positions": lr(0, 38, 0)}, [(38, 1), (39, 255)]),
}

REFUSED = {
    "top without exponents": ({"top": bits(1, 11)}, "top is 1"),
    "double symbol": ({"table": table_of(3, 1, 3)}, "occurs twice"),
    "symbols without table": ({"mode": bits(SYMBOLS, 2), "values": "11"}, "no table"),
    "symbol outside table": ({"table": table_of(3, 1), "mode": bits(SYMBOLS, 2), "values": lr(0, 0, 2)}, "the table has 2"),
    "huge symbol": ({"table": table_of(3, 1), "mode": bits(SYMBOLS, 2), "values": lr(0, 2**63, 1)}, "the table has 2"),
    "symbol without change": ({"table": table_of(3, 0), "mode": bits(SYMBOLS, 2), "values": lr(0, 0, 1)}, "does not change"),
    "no changes": ({"n": count(0), "inverted": "", "k": "", "mode": "", "positions": "", "values": ""}, "changes nothing"),
    "n of 17 bits": ({"n": bits(17, 5) + "0" * 16}, "bit length"),
    "n of 31 bits": ({"n": bits(31, 5) + "0" * 30}, "bit length"),
    "n over 2^15": ({"n": bits(16, 5) + bits(1, 15)}, "32769"),
    "n over the elements": ({"n": count(41), "positions": lr(0, *[0] * 41), "values": "0" * 41}, "position falls outside"),
    "u over n": (
        {"n": count(19), "inverted": "1" + count(21), "positions": lr(0, *[0] * 21), "values": "0" * 19},
        "unchanged elements is 21",
    ),
    "n + u short": ({"n": count(38), "inverted": "1" + count(1), "positions": lr(0, 0), "values": "0" * 38}, "counts 38 \\+ 1"),
    "n + u long": ({"n": count(38), "inverted": "1" + count(3), "positions": lr(0, 0, 0, 0), "values": "0" * 38}, "counts 38 \\+ 3"),
    "inverted run too long": (
        {"n": count(38), "inverted": "1" + count(2), "positions": lr(0, 38, 1), "values": "0" * 38},
        "position falls outside",
    ),
    "k": ({"k": bits(25, 5), "positions": lr(25, 1, 0)}, "k is 25"),
    "gap too long": ({"positions": lr(0, 38, 1)}, "position falls outside"),
    "gap of 2^63": ({"positions": lr(0, 2**63, 1)}, "position falls outside"),
    "largest gap": ({"k": bits(24, 5), "positions": "0" * 16 + "1" * 6 + "1" * 63 + "1" * 24 + lr(24, 0)}, "position falls outside"),
    "no runs": ({"mode": bits(RUNS, 2), "params": count(0) + bits(0, 5) + bits(0, 6)}, "runs is 0"),
    "too many runs": ({"mode": bits(RUNS, 2), "params": count(3) + bits(0, 5) + bits(0, 6), "values": "00" + lr(0, *[0] * 6)}, "runs is 3"),
    "kr": ({"mode": bits(RUNS, 2), "params": count(1) + bits(25, 5) + bits(0, 6), "values": "00" + lr(25, 1) + lr(0, 0)}, "kr is 25"),
    "kv of runs": ({"mode": bits(RUNS, 2), "params": count(1) + bits(0, 5) + bits(8, 6), "values": "00" + lr(0, 1) + lr(8, 0)}, "kv is 8"),
    "kv of direct": ({"mode": bits(DIRECT, 2), "params": bits(8, 6), "values": "00" + lr(8, 0, 0)}, "kv is 8"),
    "run too long": (
        {"mode": bits(RUNS, 2), "params": count(1) + bits(0, 11), "values": "00" + lr(0, 2) + lr(0, 0)},
        "run of values falls outside",
    ),
    "magnitude of runs": ({"mode": bits(RUNS, 2), "params": count(1) + bits(0, 11), "values": "00" + lr(0, 1) + lr(0, 127)}, "magnitude"),
    "magnitude of direct": ({"mode": bits(DIRECT, 2), "params": bits(0, 6), "values": "10" + lr(0, 128, 0)}, "magnitude"),
    "magnitude that wraps": ({"mode": bits(DIRECT, 2), "params": bits(0, 6), "values": "10" + lr(0, 256, 0)}, "magnitude"),
    "one byte too many": ({"tail": "0" * 8}, "left over"),
    "padding of ones": ({"tail": "1"}, "left over"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_reader_accepts(name):
    change, expected = ACCEPTED[name]
    result = read_body(plain(**change))
    assert list(zip(result.indices.tolist(), result.values.tolist(), strict=True)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_reader_refuses(name):
    change, message = REFUSED[name]
    with pytest.raises(CorruptDelta, match=message):
        read_body(plain(**change))


@pytest.mark.parametrize("name", ACCEPTED)
def test_reader_refuses_missing_bytes(name):
    body = plain(**ACCEPTED[name][0])
    for length in range(len(body)):
        with pytest.raises(CorruptDelta, match="ends too early"):
            read_body(body[:length])


def test_reader_refuses_each_padding_bit():
    body = plain(tail="")
    used = 11 + 1 + 6 + 1 + 5 + 2 + 3 + 2
    assert (len(body), used) == (4, 31)
    body = plain(positions=lr(0, 5, 0), tail="")  # four more bits make 35, so five bits are padding
    read_body(body)
    for bit in range(35 - 32, 8):
        with pytest.raises(CorruptDelta, match="left over"):
            read_body(body[:-1] + bytes([body[-1] | 1 << bit]))


def test_changes_of_a_chunk_are_bounded_over_all_contexts():
    def contexts(*n: int) -> str:
        return "".join(count(m) + ("1" + count(0) + bits(0, 5) + bits(UNIT, 2) if m else "") for m in n)

    size = 2**15
    base = np.full(size + 1, 1 << 7, np.uint16)
    base[-1] = 0  # the only element of context 1
    exact = pack(bits(1, 11), "0", contexts(size, *[0] * 15), "0" * size)
    result = resolve(base[:-1], payload(BF16, chunk(size, CODED, exact)), BF16)
    assert result.indices.size == size
    over = pack(bits(1, 11), "0", contexts(size, 1, *[0] * 14), "0" * (size + 1))
    with pytest.raises(CorruptDelta, match="not in 0 … 0"):
        resolve(base, payload(BF16, chunk(size + 1, CODED, over)), BF16)


def test_symbols_carry_low_bits():
    body = plain(table=table_of(0, 0x80), mode=bits(SYMBOLS, 2), values=lr(0, 0) + bits(5, 24) + lr(0, 1) + bits(0, 24))
    assert read_body(body, U32).values.tolist() == [5, 1 << 31]
    body = plain(table=table_of(0, 0x80), mode=bits(SYMBOLS, 2), values=lr(0, 0) + bits(5, 24) + lr(0, 0) + bits(0, 24))
    with pytest.raises(CorruptDelta, match="does not change"):
        read_body(body, U32)


def test_widest_values():
    body = plain(mode=bits(DIRECT, 2), params=bits(63, 6), values="01" + lr(63, 2**63 - 1, 2**63 - 1))
    assert read_body(body, U64).values.tolist() == [2**63, 2**63]  # + 2^63 is − 2^63
    for value in (2**63, 2**64):
        body = plain(mode=bits(DIRECT, 2), params=bits(63, 6), values="01" + lr(63, 0, value))
        with pytest.raises(CorruptDelta, match="magnitude"):
            read_body(body, U64)


TILE_SAME = chunk(2**14, SAME)


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (b"", 10, "empty"),
        (payload(U8, chunk(10, SAME)[:7]), 10, "header of a chunk is cut off"),
        (payload(U8, chunk(10, SAME), b"\0"), 10, "not a multiple"),
        (payload(U8, TILE_SAME, b"\0"), 2**14, "header of a chunk is cut off"),
        (payload(U8, chunk(10, RAW, b"x" * 10)[:-1]), 10, "body of a chunk is cut off"),
        (payload(U8, struct.pack("<II", 10 | CODED << 30, 0xFFFFFFFF)), 10, "body of a chunk is cut off"),
        (payload(U8, chunk(10, 3)), 10, "unknown mode"),
        (payload(U8, chunk(0, SAME)), 0, "has 0 elements"),
        (payload(U8, TILE_SAME, chunk(0, SAME)), 2**14, "has 0 elements"),
        (payload(U8, chunk(2**24 + 2**14, SAME)), 2**24 + 2**14, "not 1 … 2\\^24"),
        (payload(U8, chunk(2**14 + 1, SAME), TILE_SAME), 2**15 + 1, "not a multiple"),
        (payload(U8, chunk(10, SAME, b"\0")), 10, "has a body"),
        (payload(U8, chunk(10, RAW, b"x" * 9)), 10, "has 9 bytes"),
        (payload(U8, chunk(10, RAW, b"x" * 11)), 10, "has 11 bytes"),
        (payload(U8, chunk(10, CODED)), 10, "ends too early"),
    ],
)
def test_payload_is_refused(data, size, message):
    for base in (np.zeros(size, np.uint8), None):
        with pytest.raises(CorruptDelta, match=message):
            resolve(base, data, U8, size)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (payload(U8), 10),
        (payload(U8, chunk(9, SAME)), 10),
        (payload(U8, chunk(11, RAW, b"x" * 11)), 10),
        (payload(U8, TILE_SAME, chunk(1, SAME)), 2**14),
        (payload(U8, chunk(1, SAME)), 0),
        (payload(U8, chunk(1, SAME)), 2**60),
    ],
)
def test_other_number_of_elements(data, size):
    for base in (None, np.zeros(min(size, 2**15), np.uint8)):
        with pytest.raises(ShapeMismatch, match="is for"):
            resolve(base, data, U8, size)


@pytest.mark.parametrize("code", [0, 2, 15, 16, 255])
def test_other_element_type(code):
    with pytest.raises(DtypeMismatch, match=f"element type {code}"):
        resolve(np.zeros(10, np.uint8), bytes([code]) + chunk(10, SAME), U8)


def test_raw_chunks_list_only_what_differs():
    base = np.array([1, 2, 3, 4], np.uint16)
    result = resolve(base, payload(U16, chunk(4, RAW, struct.pack("<4H", 1, 9, 3, 8))), U16)
    assert (result.indices.tolist(), result.values.tolist()) == ([1, 3], [9, 8])


def test_random_damage_never_escapes_as_another_error():
    rng = np.random.default_rng(11)
    base = rng.standard_normal(600).astype(np.float32).view(np.uint32)
    new = np.where(rng.random(600) < 0.3, base ^ rng.integers(0, 2**26, 600, np.uint32), base)
    good = joined(encode(base, new, F32))
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        try:
            result = resolve(base, bytes(bad[: rng.integers(1, len(bad) + 1)]), F32)
        except (CorruptDelta, ShapeMismatch, DtypeMismatch):
            continue
        assert (base[result.indices] != result.values).all()

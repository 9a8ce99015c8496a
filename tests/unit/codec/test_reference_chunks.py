"""Test where the reference codec ends chunks and which mode it chooses, and that what it writes is read back (docs/format.md §5)."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from naive_codec import (
    BF16,
    CODED,
    I64,
    RAW,
    SAME,
    SYMBOLS,
    U8,
    U16,
    U32,
    UNIT,
    bits,
    check_round_trip,
    chunk,
    count,
    encode,
    joined,
    lr,
    naive_k,
    pack,
    payload,
    resolve,
    split,
    table_of,
)

from deltawire.codec.reference import encoder
from deltawire.codec.reference.decoder import BitReader
from deltawire.dtypes import DTYPES


def test_every_chunk_mode_appears():
    tile = 2**14
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 3 * tile + 7, np.uint8)
    new = base.copy()
    new[:tile] ^= rng.integers(1, 256, tile, np.uint8)
    new[tile : 2 * tile] += np.uint8(1)
    chunks = split(check_round_trip(base, new, U8))
    assert [c[:2] for c in chunks] == [(tile, RAW), (tile, CODED), (tile + 7, SAME)]
    assert chunks[0][2] == new[:tile].tobytes()


def test_chunks_end_where_changes_reach_a_tile():
    tile = 2**14
    base = np.zeros(6 * tile + 1, np.uint32)
    new = base.copy()
    new[: tile - 1] = 1  # one element less than a tile
    new[tile : 2 * tile] = 1  # now the first chunk has 2^15 − 1 changes
    new[2 * tile : 4 * tile : 2] = 1
    new[-1] = 1
    chunks = split(check_round_trip(base, new, U32))
    assert [c[0] for c in chunks] == [2 * tile, 2 * tile, 2 * tile + 1]
    assert BitReader(chunks[0][2][1:]).take(32) >> 4 & 31 == 15  # the bit length of 2^15 − 1


def test_blocks_end_chunks():
    base = np.zeros(2**24 + 5, np.uint8)
    new = base.copy()
    new[-1] = 9
    assert [c[:2] for c in split(check_round_trip(base, new, U8))] == [(2**24, SAME), (5, RAW)]


def test_top_is_sampled():
    def base(exponent):
        return (np.asarray(exponent) << 7).astype(np.uint16) | np.uint16(0x8001)

    assert encoder.choose_top(base([3]), BF16) == 3
    assert encoder.choose_top(base(np.arange(63)), BF16) == 62
    assert encoder.choose_top(base(np.arange(64)[::-1]), BF16) == 62
    many = np.arange(1025) // 5  # the sample has every second element, 513 in all; sample 513 − 1 − 8 = 504 is element 1008
    assert encoder.choose_top(base(many), BF16) == 1008 // 5
    assert encoder.choose_top(np.full(5, 77, np.uint16), U16) == 0


def test_a_body_as_long_as_the_elements_is_replaced():
    base = np.zeros(4, np.uint8)
    new = np.array([0, 0, 1, 0], np.uint8)  # 11 + 1 + 5 + 1 + 5 + 2 bits and 4 more take 4 bytes
    assert joined(encode(base, new, U8)) == payload(U8, chunk(4, RAW, new.tobytes()))
    assert split(joined(encode(np.append(base, base), np.append(new, base), U8)))[0][1] == CODED


def test_nothing_changes():
    base = np.arange(10, dtype=np.uint16)
    encoded = encode(base, base.copy(), U16)
    assert (list(encoded.payload), encoded.changed, encoded.before) == ([], 0, encoded.after)
    result = resolve(base, None, U16)
    assert (result.indices.size, result.values.size, result.before, result.after) == (0, 0, encoded.before, encoded.before)
    assert list(encode(np.zeros(0, np.uint16), np.zeros(0, np.uint16), U16).payload) == []


def test_added_tensors():
    assert joined(encode(None, np.zeros((0, 3), np.uint16), U16)) == payload(U16)
    zeros = encode(None, np.zeros((2, 10), np.uint16), U16)
    assert (joined(zeros), zeros.changed, zeros.before) == (payload(U16, chunk(20, SAME)), 0, (0, 0, 0, 0))
    for dtype in DTYPES:
        check_round_trip(None, np.arange(1, 3001).astype(dtype.bits), dtype)
        check_round_trip(None, np.zeros(0, dtype.bits), dtype)


def test_any_shape_and_strides():
    base = np.arange(60, dtype=np.uint32).reshape(3, 4, 5)
    new = base + np.uint32(1)
    dense = joined(encode(base.transpose(2, 0, 1).copy(), new.transpose(2, 0, 1).copy(), U32))
    assert joined(encode(base.transpose(2, 0, 1), new.transpose(2, 0, 1), U32)) == dense
    result = resolve(base.transpose(2, 0, 1), np.frombuffer(dense, np.uint8), U32)
    np.testing.assert_array_equal(result.values, new.transpose(2, 0, 1).reshape(-1))
    assert resolve(base.transpose(2, 0, 1), memoryview(dense), U32).after == result.after
    scalar = joined(encode(np.array(3, np.uint32), np.array(4, np.uint32), U32))
    assert scalar == payload(U32, chunk(1, RAW, struct.pack("<I", 4)))
    base.flags.writeable = False
    resolve(base, dense, U32)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 0.6, 0.97, 1.0])
def test_round_trip(dtype, density):
    rng = np.random.default_rng([dtype.code, int(density * 1000)])
    size = 2**14 + 321 if density < 0.1 else 3000  # the reference takes long for each changed element
    if dtype.exponent_bits:
        base = rng.standard_normal(size).astype(dtype.numpy).view(dtype.bits)
    else:
        base = rng.integers(0, 2**dtype.width, size, dtype.bits.type)
    chosen = rng.random(size) < density
    small = rng.integers(1, 4, size).astype(dtype.bits) * np.where(rng.random(size) < 0.5, dtype.bits.type(1), ~dtype.bits.type(0))
    check_round_trip(base, np.where(chosen, base + small, base), dtype)
    noise = rng.integers(0, 2**dtype.width, size, dtype.bits.type)
    check_round_trip(base, np.where(chosen, noise, base), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_round_trip_of_extremes(dtype):
    top, ones = 1 << (dtype.width - 1), 2**dtype.width - 1
    inf = ((1 << dtype.exponent_bits) - 1) << dtype.exponent_shift
    quiet = 1 << max(dtype.exponent_shift - 1, 0)
    special = [0, top, 1, top | 1, top - 1, ones, ones - 1, inf, top | inf, inf | 1, inf | quiet, top | inf | 1]
    special = [*dict.fromkeys(special)]  # some are the same for integers
    pairs = np.array([(a, b) for a in special for b in special], dtype.bits)
    check_round_trip(pairs[:, 0], pairs[:, 1], dtype)
    # The other elements do not change, so the chunk is coded. Each pair is tested alone, so it gets its own parameters.
    for a, b in pairs.tolist():
        base = np.full(300, a, dtype.bits)
        new = base.copy()
        new[7] = b
        data = check_round_trip(base, new, dtype)
        assert a == b or split(data)[0][1] == CODED


def test_step_from_minus_zero_to_zero_is_one():
    base = np.full(300, 0x8000, np.uint16)
    new = base.copy()
    new[0] = 0
    body = split(check_round_trip(base, new, BF16))[0][2]
    assert body == pack(bits(0, 11), "0", count(1), "0", bits(0, 5), bits(UNIT, 2), count(0) * 15, lr(0, 0), "0")


def test_means_are_taken_of_values_cut_at_2_to_the_47():
    base = np.zeros(300, np.uint64)
    new = base.copy()
    new[0] = 2**63
    kv = naive_k([2**63 - 1], 63)
    assert (kv, len(lr(kv, 2**63 - 1))) == (48, 84)
    # Direct costs 6 + 1 + 84 bits, symbols cost 1 + 56 bits and the table 19 bits.
    header = count(1) + "0" + bits(0, 5) + bits(SYMBOLS, 2)
    body = pack(bits(0, 11), table_of(0x80), header, lr(0, 0), lr(0, 0) + bits(0, 56))
    assert split(check_round_trip(base, new, I64))[0][2] == body

"""Test the reference codec's digest and terms against docs/format.md §2 and §4."""

from __future__ import annotations

import numpy as np
import pytest
from naive_codec import (
    BF16,
    CODEC,
    F64,
    I64,
    SEED,
    U16,
    lr,
    naive_k,
    pack,
)

from deltawire.codec.reference import digest, encoder, terms
from deltawire.codec.reference.decoder import BitReader
from deltawire.codec.reference.encoder import BitWriter
from deltawire.dtypes import DTYPES


def naive_digest(data: bytes, seed: int) -> tuple[int, ...]:
    low64, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & low64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & low64
        return x ^ x >> 31

    data += b"\0" * (len(data) % 2)
    lanes = []
    for j in range(4):
        total = 0
        for w in range(len(data) // 2):
            z = mix(seed + golden * (2 * (w // 256) + 1 + j // 2) & low64)
            m = (z >> 32 if j % 2 else z & 0xFFFFFFFF) | 1
            t = mix(golden * (256 * j + w % 256 + 1) & low64) >> 48 | 1
            t -= 2**16 if t >= 2**15 else 0
            total += m * t * int.from_bytes(data[2 * w : 2 * w + 2], "little", signed=True)
        lanes.append(total % 2**32)
    return lanes


def test_mix_is_splitmix64():
    golden = 0x9E3779B97F4A7C15
    outputs = digest.mix(np.array([golden, 2 * golden % 2**64], np.uint64)).tolist()
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # the first two outputs of the generator from state 0


@pytest.mark.parametrize("size", [0, 1, 2, 3, 511, 512, 513, 1025, 4001])
@pytest.mark.parametrize("seed", [0, SEED, 2**64 - 1])
def test_digest_of_bytes(size, seed, monkeypatch):
    monkeypatch.setattr(digest, "DIGEST_PIECE", 1024)
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert CODEC.digest([data], np.array([seed], np.uint64), 1).tolist() == [naive_digest(data.tobytes(), seed)]


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_digest_of_extremes_and_strides(width):
    data = np.full((7, 41), 2**width - 1, f"uint{width}")
    data[::2] = 1 << (width - 1)
    assert CODEC.digest([data.T], np.array([SEED], np.uint64), 1).tolist() == [naive_digest(data.T.tobytes(), SEED)]
    assert CODEC.digest([data[0, 0]], np.array([SEED], np.uint64), 1).tolist() == [naive_digest(data[0, 0].tobytes(), SEED)]


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [
        (0, 0, "1"),
        (0, 1, "01"),
        (2, 5, "01" + "10"),
        (3, 7, "1" + "111"),
        (0, 15, "0" * 15 + "1"),
        (0, 16, "0" * 16 + "000000"),  # x = 1, b = 0
        (0, 17, "0" * 16 + "100000" + "0"),  # x = 2, b = 1
        (1, 37, "0" * 16 + "100000" + "1" + "1"),  # q = 18, x = 3
        (4, 15 * 16 + 9, "0" * 15 + "1" + "1001"),
        (4, 16 * 16 + 8, "0" * 16 + "000000" + "0001"),
        (0, 2**63 - 1, "0" * 16 + "011111" + "0000" + "1" * 58),  # x = 2^63 − 16, b = 62
        (63, 2**63 - 1, "1" + "1" * 63),
    ],
)
def test_limited_rice_code(k, v, expected):
    assert lr(k, v) == expected
    writer = BitWriter()
    writer.put_lr(k, np.array([v, 0], np.uint64))
    assert writer.size == len(expected) + k + 1
    assert writer.to_bytes() == pack(expected, "1" + "0" * k)
    assert terms.lr_cost(k, np.array([v], np.uint64)) == len(expected)
    reader = BitReader(writer.to_bytes())
    assert (reader.lr(k), reader.lr(k)) == (v, 0)


@pytest.mark.parametrize(("n", "expected"), [(0, "00000"), (1, "10000"), (2, "010000"), (3, "010001"), (2**15, "00001" + "0" * 15)])
def test_count(n, expected):
    writer = BitWriter()
    writer.put_count(n)
    assert (writer.size, writer.to_bytes()) == (len(expected), pack(expected))
    assert BitReader(pack(expected)).count(0, 2**15, "it") == n


def test_floor_log2_is_exact():
    for b in range(64):
        values = [x for x in {2**b - 1, 2**b, 2**b + 1, 2 ** (b + 1) - 1} if 0 < x < 2**64]
        assert terms.floor_log2(np.array(values, np.uint64)).tolist() == [x.bit_length() - 1 for x in values]


def test_choose_k_agrees_with_the_rule_in_plain_integers():
    rng = np.random.default_rng(3)
    for scale in (0, 1, 3, 8, 20, 40, 47, 55, 63):
        for size in (1, 2, 17, 200):
            values = [int(v) for v in rng.integers(0, 2**scale, size, np.uint64, endpoint=True) // rng.integers(1, 9, size, np.uint64)]
            for largest in (7, 15, 24, 63):
                assert encoder.choose_k(np.array(values, np.uint64), largest) == naive_k(values, largest)
    assert encoder.choose_k(np.zeros(0, np.uint64), 24) == 0


def test_ordered_integers_are_monotone_and_one_to_one():
    numbers = np.array([-np.inf, -2.0, -1e-310, -0.0, 0.0, 1e-310, 2.0, np.inf]).view(np.uint64)
    order = terms.ordered(numbers, F64)
    assert (order[1:] > order[:-1]).all()
    assert int(order[4]) == 2**63
    assert int(order[4] - order[3]) == 1
    for dtype in DTYPES:
        if dtype.width <= 16:
            everything = np.arange(2**dtype.width).astype(dtype.bits)
            assert np.unique(terms.ordered(everything, dtype)).size == everything.size
            np.testing.assert_array_equal(terms.unordered(terms.ordered(everything, dtype), dtype), everything)
    np.testing.assert_array_equal(terms.ordered(numbers, I64), numbers)


def test_contexts():
    base = np.array([0x3F80, 0xBF80, 0x4000, 0x3F00, 0x3800, 0x0000, 0x7FC0], np.uint16)  # exponents 127 127 128 126 112 0 255
    assert terms.contexts(base, BF16, 127).tolist() == [0, 0, 0, 1, 15, 15, 0]
    assert terms.contexts(base, U16, 0).tolist() == [0] * 7
    assert terms.exponents(np.array([2**64 - 1, 1], np.uint64), F64).tolist() == [2047, 0]

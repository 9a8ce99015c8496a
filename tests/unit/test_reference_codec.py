"""The reference codec follows docs/format.md: tests check examples worked out by hand, and every rule that a reader enforces."""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from deltawire.codec.base import EncodeJob, Lanes, ResolveJob
from deltawire.codec.bits import HostBits
from deltawire.codec.reference import ReferenceCodec, decoder, digest, encoder, terms
from deltawire.codec.reference.decoder import BitReader
from deltawire.codec.reference.encoder import BitWriter
from deltawire.dtypes import DTYPES, dtype_named
from deltawire.errors import CorruptDelta, DtypeMismatch, ShapeMismatch

CODEC = ReferenceCodec()
SEED = 0x0123456789ABCDEF
U8, U16, U32, I64, U64, BF16, F32, F64 = map(dtype_named, ["U8", "U16", "U32", "I64", "U64", "BF16", "F32", "F64"])
SAME, CODED, RAW = range(3)
UNIT, RUNS, DIRECT, SYMBOLS = range(4)


# A second, naive writer, whose bits are the characters "0" and "1" in stream order.


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
    (encoded,) = CODEC.encode([EncodeJob(base, new, dtype, SEED)], 1)
    return encoded


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
    assert [[*encoded.before], [*encoded.after]] == CODEC.digest([(old, SEED), (new, SEED)], 1).tolist()
    data = joined(encoded)
    result = resolve(base, data if encoded.payload else None, dtype, new.size)
    assert result.indices.dtype == np.int64
    assert result.values.dtype == dtype.bits
    np.testing.assert_array_equal(result.indices, expected)
    np.testing.assert_array_equal(result.values, new.reshape(-1)[expected])
    assert (result.before, result.after) == (encoded.before, encoded.after)
    return data


# §2


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
    assert CODEC.digest([(data, seed)], 1).tolist() == [naive_digest(data.tobytes(), seed)]


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_digest_of_extremes_and_strides(width):
    data = np.full((7, 41), 2**width - 1, f"uint{width}")
    data[::2] = 1 << (width - 1)
    assert CODEC.digest([(data.T, SEED)], 1).tolist() == [naive_digest(data.T.tobytes(), SEED)]
    assert CODEC.digest([(data[0, 0], SEED)], 1).tolist() == [naive_digest(data[0, 0].tobytes(), SEED)]


# §4 terms


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


# §5: whole bodies, written by hand


def test_two_steps_in_a_byte_tensor():
    base = np.zeros(100, np.uint8)
    new = base.copy()
    new[10], new[11] = 1, 255
    body = pack(
        "00000000000" + "0" + "01000" + "0",  # top, no table, count(2)
        "0" + "01000" + "00",  # not inverted, k = 2, unit
        "001" + "01" + "1" + "00",  # gaps 10 and 0
        "0" + "1",
    )
    assert len(body) == 5
    encoded = encode(base, new, U8)
    assert joined(encoded) == payload(U8, chunk(100, CODED, body))
    assert encoded.changed == 2
    check_round_trip(base, new, U8)


def test_contexts_have_their_own_lines():
    base = np.full(32, 0x3F80, np.uint16)
    base[5] = 0x3F00
    new = base.copy()
    new[3], new[5], new[20] = 0x3F81, 0x3EFF, 0x3F82
    head = bits(127, 11) + "0"
    first = count(2) + "0" + bits(3, 5) + bits(DIRECT, 2) + bits(0, 6)
    second = count(1) + "0" + bits(0, 5) + bits(UNIT, 2)
    streams = lr(3, 3, 15) + "00" + lr(0, 0, 1) + lr(0, 0) + "1"  # element 5 has another context, so element 20's gap leaves it out
    assert naive_k([3, 15], 24) == 3
    assert joined(encode(base, new, BF16)) == payload(BF16, chunk(32, CODED, pack(head, first, second, count(0) * 14, streams)))
    check_round_trip(base, new, BF16)


def test_inverted_positions():
    base = np.zeros(100, np.uint8)
    new = np.ones(100, np.uint8)
    new[50] = 0
    body = pack(bits(0, 11), "0", count(99), "1", count(1), bits(6, 5), bits(UNIT, 2), lr(6, 50), "0" * 99)
    assert joined(encode(base, new, U8)) == payload(U8, chunk(100, CODED, body))
    check_round_trip(base, new, U8)


def test_half_is_not_inverted():
    base = np.zeros(64, np.uint32)
    new = base.copy()
    new[:32] = 1
    assert BitReader(split(joined(encode(base, new, U32)))[0][2]).take(12 + 5 + 5 + 1) >> 22 == 0


def test_runs_of_ones():
    base = np.zeros(400, np.uint16)
    new = base.copy()
    new[::2] = 1
    new[[100, 120]] = [1000, 65536 - 1100]
    above = [998, 1098]
    kv = naive_k(above, 15)
    kr = naive_k([50, 9], 24)
    k = naive_k([0] + [1] * 199, 24)
    signs = "".join("1" if i == 60 else "0" for i in range(200))
    header = count(200) + "0" + bits(k, 5) + bits(RUNS, 2) + count(2) + bits(kr, 5) + bits(kv, 6)
    body = pack(bits(0, 11), "0", header, lr(k, 0, *[1] * 199), signs, lr(kr, 50, 9), lr(kv, *above))
    assert joined(encode(base, new, U16)) == payload(U16, chunk(400, CODED, body))
    check_round_trip(base, new, U16)


def test_direct_magnitudes():
    base = np.zeros(1000, np.uint64)
    new = base.copy()
    magnitudes = [2**63, 2**63 - 1, 5, 2**40]
    new[[0, 1, 2, 3]] = [2**63, 2**64 - (2**63 - 1), 5, 2**64 - 2**40]
    values = [m - 1 for m in magnitudes]
    kv = naive_k(values, 63)
    runs = len(count(4)) + 5 + len(lr(0, 0, 0, 0, 0)) + len(lr(naive_k([v - 1 for v in values], 63), *[v - 1 for v in values]))
    assert runs > len(lr(kv, *values))
    header = count(4) + "0" + bits(0, 5) + bits(DIRECT, 2) + bits(kv, 6)
    body = pack(bits(0, 11), "0", header, lr(0, 0, 0, 0, 0), "1101", lr(kv, *values))
    assert joined(encode(base, new, I64)) == payload(I64, chunk(1000, CODED, body))
    check_round_trip(base, new, I64)


def test_symbols():
    base = np.zeros(16, np.uint32)
    new = (0x7F000000 + np.arange(16) * 0x0F1357).astype(np.uint32)
    new[3] ^= 0x03 << 24
    new[4] ^= 0x03 << 24
    new[5] ^= 0x07 << 24
    new[6] ^= 0x01 << 24
    table = [0x7F, 0x7C, 0x78, 0x7E]  # 12, 2, 1 and 1 times
    ranks = [table.index(int(x) >> 24) for x in new]
    ks = naive_k(ranks, 7)
    stream = "".join(lr(ks, r) + bits(int(x) & 0xFFFFFF, 24) for r, x in zip(ranks, new, strict=True))
    body = pack(
        bits(0, 11) + "1" + bits(3, 8) + bits(ks, 3) + "".join(bits(s, 8) for s in table),
        count(16) + "1" + count(0) + bits(0, 5) + bits(SYMBOLS, 2),
        stream,
    )
    assert joined(encode(base, new, U32)) == payload(U32, chunk(16, CODED, body))
    check_round_trip(base, new, U32)


def test_symbols_must_pay_for_their_table():
    base = np.zeros(64, np.uint32)
    new = base.copy()
    new[:2] = 0x7F000000  # direct costs 6 + 33n bits, symbols 25n and the table 19
    assert value_modes(split(joined(encode(base, new, U32)))[0][2], U32) == {SYMBOLS}
    new[1] = 0
    assert value_modes(split(joined(encode(base, new, U32)))[0][2], U32) == {DIRECT}


def test_all_value_modes_appear_in_one_chunk():
    rng = np.random.default_rng(5)
    exponent = np.repeat(np.arange(127, 123, -1), 2000)
    base = (exponent << 23 | rng.integers(0, 2**22, 8000)).astype(np.uint32)
    new = base.copy()
    at = np.arange(0, 2000, 4)
    new[at] += np.uint32(1)
    new[2000 + at] += np.where(at % 160, 1, 50).astype(np.uint32)
    new[4000 + at] += rng.integers(20, 50, at.size).astype(np.uint32)
    new[6000 + at] ^= rng.integers(1, 2**24, at.size).astype(np.uint32) | np.uint32(2**31)
    data = check_round_trip(base, new, F32)
    assert value_modes(split(data)[0][2], F32) == {UNIT, RUNS, DIRECT, SYMBOLS}


# §5: the same rules again, on plain integers and text


def naive_gaps(marks: list[bool]) -> list[int]:
    places = [-1, *(i for i, m in enumerate(marks) if m)]
    return [b - a - 1 for a, b in itertools.pairwise(places)]


def naive_body(base: list[int], new: list[int], dtype) -> str:
    """Return the body of the only chunk of a tensor, as text."""
    w, has_exponent = dtype.width, bool(dtype.exponent_bits)

    def ordered(x: int) -> int:
        return x if not has_exponent else x ^ (2**w - 1) if x >> (w - 1) else x ^ 2 ** (w - 1)

    exponent = [x >> dtype.exponent_shift & (2**dtype.exponent_bits - 1) for x in base]
    sample = sorted(exponent[:: -(-len(base) // 1024)])
    top = sample[len(sample) - 1 - len(sample) // 64] if has_exponent else 0

    contexts = []
    for c in range(16 if has_exponent else 1):
        line = [i for i, e in enumerate(exponent) if min(max(top - e, 0), 15) == c]
        marks = [base[i] != new[i] for i in line]
        changing = [i for i in line if base[i] != new[i]]
        n, u = len(changing), len(line) - len(changing)
        context = {"n": n}
        contexts.append(context)
        if not n:
            continue

        k = naive_k(naive_gaps(marks), 24)
        context["positions"] = ("0" + bits(k, 5), lr(k, *naive_gaps(marks)))
        if 2 * n > n + u:
            unmarked = naive_gaps([not m for m in marks])
            k = naive_k(unmarked, 24)
            inverted = ("1" + count(u) + bits(k, 5), lr(k, *unmarked))
            if len("".join(inverted)) < len("".join(context["positions"])):
                context["positions"] = inverted

        step = [(ordered(new[i]) - ordered(base[i])) % 2**w for i in changing]
        step = [d - 2**w if d >= 2 ** (w - 1) else d for d in step]
        signs = "".join("1" if d < 0 else "0" for d in step)
        magnitude = [abs(d) for d in step]
        context["y"] = [new[i] ^ base[i] for i in changing]
        if max(magnitude) == 1:
            context["values"] = (UNIT, "", signs)
        else:
            kv = naive_k([m - 1 for m in magnitude], w - 1)
            context["values"] = (DIRECT, bits(kv, 6), signs + lr(kv, *[m - 1 for m in magnitude]))
            between, above = naive_gaps([m > 1 for m in magnitude]), [m - 2 for m in magnitude if m > 1]
            kr, kv = naive_k(between, 24), naive_k(above, w - 1)
            runs = (RUNS, count(len(above)) + bits(kr, 5) + bits(kv, 6), signs + lr(kr, *between) + lr(kv, *above))
            if len(runs[1] + runs[2]) < len(context["values"][1] + context["values"][2]):
                context["values"] = runs

    table = "0"
    considered = [x for x in contexts if x["n"] and len(x["values"][1] + x["values"][2]) > x["n"] * (w - 7)]
    tops = [y >> (w - 8) for x in considered for y in x["y"]]
    symbols = sorted(set(tops), key=lambda s: (-tops.count(s), s))
    ks = naive_k([symbols.index(s) for s in tops], 7)
    saved, switching = 0, []
    for x in considered:
        stream = "".join(lr(ks, symbols.index(y >> (w - 8))) + bits(y % 2 ** (w - 8), w - 8) for y in x["y"])
        gain = len(x["values"][1] + x["values"][2]) - len(stream)
        if gain > 0:
            saved += gain
            switching.append((x, stream))
    if saved > 11 + 8 * len(symbols):
        table = table_of(*symbols, ks=ks)
        for x, stream in switching:
            x["values"] = (SYMBOLS, "", stream)

    header = "".join(count(x["n"]) + (x["positions"][0] + bits(x["values"][0], 2) + x["values"][1] if x["n"] else "") for x in contexts)
    return bits(top, 11) + table + header + "".join(x["positions"][1] + x["values"][2] for x in contexts if x["n"])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_bodies_agree_with_the_rules_in_plain_integers(dtype):
    rng = np.random.default_rng([7, dtype.code])
    coded = 0
    for trial in range(40):
        size = int(rng.choice([3, 40, 300, 1500]))
        noise = rng.integers(0, 2**dtype.width, size, dtype.bits.type)
        if dtype.exponent_bits and trial % 4:
            base = (rng.standard_normal(size) * rng.choice([1e-3, 1, 30])).astype(dtype.numpy).view(dtype.bits)
        else:
            base = rng.integers(0, 2**dtype.width, size, dtype.bits.type)
        chosen = rng.random(size) < rng.choice([0.01, 0.1, 0.5, 0.7, 0.98])
        kept = dtype.bits.type(rng.integers(0, dtype.width))  # this many top bits of the noise are cleared
        step = (noise >> kept) + dtype.bits.type(1)
        new = np.where(chosen, base ^ step if trial % 2 else base + step, base)
        if (new == base).all():
            continue
        expected = pack(naive_body(base.tolist(), new.tolist(), dtype))
        mode = RAW if len(expected) >= new.nbytes else CODED
        coded += mode == CODED
        assert joined(encode(base, new, dtype)) == payload(dtype, chunk(size, mode, new.tobytes() if mode == RAW else expected))
    assert coded > 5


# §5: chunks


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


# Round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 0.6, 0.97, 1.0])
def test_round_trip(dtype, density):
    rng = np.random.default_rng([dtype.code, int(density * 1000)])
    size = 2**14 + 4321
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


# Bodies that a reader refuses. `plain` builds the body of a chunk of one context, and tests replace parts of it.


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


def table_of(*symbols: int, ks: int = 0) -> str:
    return "1" + bits(len(symbols) - 1, 8) + bits(ks, 3) + "".join(bits(s, 8) for s in symbols)


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

"""Test bodies of chunks against docs/format.md §5: some are written by hand, others by the same rules on plain integers and text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from naive_codec import (
    BF16,
    CODED,
    DIRECT,
    F32,
    I64,
    RAW,
    RUNS,
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
    split,
    table_of,
    value_modes,
)

from deltawire.codec.reference.decoder import BitReader
from deltawire.dtypes import DTYPES


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
    for trial in range(20):
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
    assert coded > 3

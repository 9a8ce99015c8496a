"""Groups of tensors in the reference codec: examples worked out by hand, and every rule that a reader enforces."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.codec.base import EncodeGroup, ResolveGroup
from deltawire.codec.reference import ReferenceCodec, groups
from deltawire.dtypes import F4_E2M1, PAYLOAD_TYPES, U4, dtype_named, payload_type
from deltawire.errors import CorruptDelta

CODEC = ReferenceCodec()
U8, U16, BF16 = (PAYLOAD_TYPES[dtype_named(name).code] for name in ("U8", "U16", "BF16"))
SAME, CODED, RAW = range(3)


def seeds_of(tensors) -> np.ndarray:
    return np.arange(len(tensors), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def encode(kind, bases, news):
    return CODEC.encode_groups([EncodeGroup(kind, bases, news, seeds_of(news))], 1)[0]


def resolve(kind, bases, payload, counts=None, writes=False):
    resolution = CODEC.resolution(1, 0)
    counts = np.array([base.size for base in bases] if counts is None else counts, np.int64)
    span = None if payload is None else (3, 3 + len(payload))
    (outcome,) = resolution.add_groups([ResolveGroup(kind, bases, counts, seeds_of(counts), span, writes)], b"---" + (payload or b""))
    return resolution, outcome


def check_round_trip(kind, bases, news) -> bytes:
    found = encode(kind, bases, news)
    payload = b"".join(found.pieces)
    resolution, outcome = resolve(kind, bases, payload, [new.size for new in news])
    rows = CODEC.digest(news, seeds_of(news), 1)
    assert found.after == outcome.after == tuple(rows.sum(axis=0, dtype=np.uint32).tolist())
    assert found.before == outcome.before
    assert found.changed.tolist() == outcome.changed.tolist()
    for number, (base, new) in enumerate(zip(bases, news, strict=True)):
        old = np.zeros_like(new) if base is None else base
        indices, values = resolution.changes([number])[0]
        expected = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, new.reshape(-1)[expected])
        assert values.dtype == kind.dtype.bits
        np.testing.assert_array_equal(resolution.dense([number])[0], new.reshape(-1))
    return payload


def random_group(kind, sizes, density, seed=1):
    rng = np.random.default_rng(seed)
    bases = [rng.integers(0, 256, size * kind.dtype.itemsize, np.uint8) for size in sizes]
    news = [base ^ (rng.integers(1, 256, base.size, np.uint8) * (rng.random(base.size) < density)).astype(np.uint8) for base in bases]
    return [base.view(kind.dtype.bits) for base in bases], [new.view(kind.dtype.bits) for new in news]


@pytest.mark.parametrize("kind", PAYLOAD_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("density", [0, 0.003, 0.2, 1])
def test_groups_round_trip(kind, density):
    bases, news = random_group(kind, [1, 0, 700, 64, 3], density)
    bases[3] = None
    payload = check_round_trip(kind, bases, news)
    assert payload
    assert check_round_trip(kind, news, news) == b""


def test_packed_elements_are_nibbles_from_the_low_one_upwards():
    assert groups.elements_of(np.array([0x21, 0x43], np.uint8), F4_E2M1).tolist() == [1, 2, 3, 4]
    assert groups.elements_of(np.array([0x87654321], np.uint32), U4).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for kind in (F4_E2M1, U4):
        bits = np.arange(256, dtype=np.uint8).view(kind.dtype.bits)
        np.testing.assert_array_equal(groups.tensor_of(groups.elements_of(bits, kind), kind), bits)


def test_the_payload_type_follows_from_name_and_type():
    u8, i32, bf16 = map(dtype_named, ["U8", "I32", "BF16"])
    assert payload_type("a.weight_packed", u8) is F4_E2M1
    assert payload_type("experts.gate_up_proj_blocks", u8) is F4_E2M1
    assert payload_type("experts.gate_up_proj_scales", u8).dtype is u8
    assert payload_type("a.weight_packed", i32) is U4
    assert payload_type("gate_up_proj_blocks", i32).name == "I32"
    assert payload_type("a.weight_packed", bf16).name == "BF16"
    assert [kind.code for kind in PAYLOAD_TYPES] == list(range(18))
    assert [kind.per_element for kind in (F4_E2M1, U4, U16)] == [2, 8, 1]


def test_two_codes_of_two_tensors_share_a_chunk():
    bases, news = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)], [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
    news[0][3] = 0x10  # element 7 becomes 1, a step of +1
    news[1][1] = 0x08  # element 2 becomes −0, a step of −1: position 18 of the chunk
    text = (
        "00000000000" + "0" + "01000" + "0"  # top, no table, context 0: count(2)
        "0" + "11000" + "00"  # not inverted, k = 3, unit
        + "00000" * 15  # the other contexts
        + "1" + "111" + "01" + "010"  # gaps 7 and 10
        + "0" + "1"
    )  # fmt: skip
    body = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
    assert check_round_trip(F4_E2M1, bases, news) == bytes([2 << 2 | CODED, len(body)]) + body


def test_tiles_never_cross_tensors_and_chunks_end_after_full_tiles():
    tile = groups.TILE
    bases = [np.zeros(tile + 10, np.uint16), np.zeros(5, np.uint16), np.zeros(3 * tile, np.uint16)]
    news = [base.copy() for base in bases]
    news[0][:] = 1  # 2^14 changes in its first tile
    news[2][0] = 1
    payload = check_round_trip(U16, bases, news)
    blocks = list(groups.blocks_of([base.size for base in bases], U16))
    chunks = [(len(tiles), mode) for tiles, mode, _ in groups.read_chunks(payload, blocks)]
    assert chunks == [(1, CODED), (5, CODED)]
    news[2][0] = 0
    chunks = [(len(tiles), mode) for tiles, mode, _ in groups.read_chunks(check_round_trip(U16, bases, news), blocks)]
    assert chunks == [(1, CODED), (5, CODED)]


def test_same_chunks_at_the_end_are_left_out(monkeypatch):
    monkeypatch.setattr(groups, "tiles_per_block", lambda kind: 2)
    bases = [np.zeros(7, np.uint16) for _ in range(8)]
    news = [base.copy() for base in bases]
    news[3][2] = 1
    payload = check_round_trip(U16, bases, news)
    assert payload[:2] == bytes([2 << 2 | SAME, 0])
    blocks = list(groups.blocks_of([7] * 8, U16))
    assert [(len(tiles), mode) for tiles, mode, _ in groups.read_chunks(payload, blocks)] == [(2, SAME), (2, CODED)]
    trailing = payload + bytes([2 << 2 | SAME, 0])
    assert resolve(U16, bases, trailing)[1].changed.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_blocks_hold_more_tiles_of_narrow_elements():
    assert [groups.tiles_per_block(kind) for kind in (BF16, U8, U4)] == [1 << 10, 1 << 11, 1 << 12]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (bytes([3 << 2 | SAME, 0]), "3 tiles, its block has 2 left"),
        (bytes([0 << 2 | SAME, 0]), "0 tiles"),
        (bytes([2 << 2 | SAME, 0, 1 << 2 | SAME, 0, 1 << 2, 0]), "after the last tile"),
        (bytes([1 << 2 | 3, 0]), "unknown mode 3"),
        (bytes([1 << 2 | RAW, 14]), "cut off"),
        (bytes([1 << 2 | RAW, 2, 0, 0]), "7 elements has 2 bytes"),
        (bytes([1 << 2 | SAME, 1, 0]), "has a body"),
        (bytes([1 << 2 | SAME]), "cut off"),
        (bytes([0x84]), "cut off"),
        (bytes([0x84, 0x00, 0]), "longer than it needs"),
        (bytes([0x84, 0x80, 0x80, 0x80, 0x80, 0x40, 0]), "too large"),
        (bytes([1 << 2 | CODED, 1, 0]), "ends too early"),
    ],
)
def test_malformed_groups_are_refused(payload, reason, monkeypatch):
    monkeypatch.setattr(groups, "tiles_per_block", lambda kind: 2)
    with pytest.raises(CorruptDelta, match=reason):
        resolve(U16, [np.zeros(7, np.uint16) for _ in range(3)], payload)


def test_four_bit_chunks_have_no_symbol_table():
    body = bytes([0x00, 0x08 | 0xF0, 0xFF, 0xFF])
    with pytest.raises(CorruptDelta, match="symbol table"):
        resolve(U4, [np.zeros(64, np.uint32)], bytes([1 << 2 | CODED, len(body)]) + body)


def test_writes_wait_for_the_end_and_can_be_reverted():
    bases, news = random_group(F4_E2M1, [20, 30], 0.5)
    payload = b"".join(encode(F4_E2M1, bases, news).pieces)
    for writes, expected in ((True, news), ([False, True], [bases[0], news[1]])):
        arrays = [base.copy() for base in bases]
        resolution, _ = resolve(F4_E2M1, arrays, payload, writes=writes)
        resolution.settle()
        assert [array.tolist() for array in arrays] == [array.tolist() for array in expected]
        resolution.revert()
    resolution, outcome = resolve(F4_E2M1, bases, None)
    assert outcome.changed.tolist() == [0, 0]
    assert outcome.before == outcome.after

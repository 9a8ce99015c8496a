"""Groups of tensors: every instruction set gives the bytes of the reference codec, and the exact result, with any budget and threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import contents, tensor_pairs
from support import NATIVE, bits_of
from thorough import examples

from deltawire.codec.base import EncodeGroup, ResolveGroup
from deltawire.codec.native import NativeCodec, inspect_group
from deltawire.codec.reference import ReferenceCodec
from deltawire.dtypes import F4_E2M1, PAYLOAD_TYPES, U4, PayloadType
from deltawire.errors import CorruptDelta

KINDS = pytest.mark.parametrize("kind", PAYLOAD_TYPES, ids=lambda kind: kind.name)
CODES = [NativeCodec(isa) for isa in NATIVE]
UNLIMITED = 1 << 40


def seeds_of(tensors) -> Any:
    return np.arange(1, len(tensors) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def laid_out(array: Any, how: str) -> Any:
    """Return the same elements in another layout."""
    if how == "unaligned":
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
        raw[:] = array.view(np.uint8)
        return raw.view(array.dtype)
    if how == "reversed":
        return np.repeat(array[::-1], 2)[::-2]
    return array.copy()


def encoded(kind: PayloadType, bases, news, threads=(1, 3)) -> tuple[bytes, Any]:
    """Return the payload that all codecs write."""
    group = EncodeGroup(kind, bases, news, seeds_of(news))
    (wanted,) = ReferenceCodec().encode_groups([group], 1)
    payload = b"".join(wanted.pieces)
    for codec in CODES:
        for count in threads:
            (found,) = codec.encode_groups([group], count)
            assert b"".join(found.pieces) == payload
            assert found.changed.tolist() == wanted.changed.tolist()
            assert (found.before, found.after) == (wanted.before, wanted.after)
    return payload, wanted


def group_of(kind: PayloadType, bases, news, payload: bytes, writes: Any = False) -> ResolveGroup:
    counts = np.array([new.size for new in news], np.int64)
    return ResolveGroup(kind, bases, counts, seeds_of(news), (1, 1 + len(payload)), writes)


def check_resolves(kind: PayloadType, bases, news, payload: bytes, wanted) -> None:
    data = b"-" + payload
    zeros = [np.zeros_like(new) if base is None else base for base, new in zip(bases, news, strict=True)]
    added = [number for number, base in enumerate(bases) if base is None]
    writes = [number % 3 != 1 for number in range(len(news))]
    for codec in CODES:
        for threads, budget in ((1, 0), (3, 0), (2, UNLIMITED)):
            resolution = codec.resolution(threads, budget)
            (outcome,) = resolution.add_groups([group_of(kind, bases, news, payload)], data)
            assert outcome.changed.tolist() == wanted.changed.tolist()
            assert (outcome.before, outcome.after) == (wanted.before, wanted.after)
            for old, new, (indices, values) in zip(zeros, news, resolution.changes(range(len(news))), strict=True):
                expected = np.flatnonzero(old != new)
                np.testing.assert_array_equal(indices, expected)
                np.testing.assert_array_equal(values, new[expected])
                assert values.dtype == kind.dtype.bits

            state = [None if base is None else base.copy() for base in bases]
            resolution = codec.resolution(threads, budget)
            resolution.add_groups([group_of(kind, state, news, payload, writes)], data)
            for number, dense in zip(added, resolution.dense(added), strict=True):
                np.testing.assert_array_equal(dense, news[number])
            resolution.settle()
            for write, array, base, new in zip(writes, state, bases, news, strict=True):
                assert array is None or bits_of({"": array}) == bits_of({"": new if write else base})

            state = [None if base is None else base.copy() for base in bases]
            resolution = codec.resolution(threads, budget)
            resolution.add_groups([group_of(kind, state, news, payload, True)], data)
            resolution.revert()
            check_state(state, bases, bases)
        resolution = codec.deferred_resolution(2)
        resolution.add_groups([group_of(kind, state, news, payload, True)], data)
        check_state(state, bases, bases)
        resolution.compact()
        for expected in (news, bases, news):
            resolution.exchange()
            check_state(state, bases, expected)


def check_state(state, bases, expected) -> None:
    for array, base, other in zip(state, bases, expected, strict=True):
        if base is not None:
            np.testing.assert_array_equal(array, other)


@KINDS
@examples(15)
@given(data=st.data())
def test_groups_agree(kind, data):
    pairs = [data.draw(tensor_pairs(kind.dtype)) for _ in range(data.draw(st.integers(0, 3), label="tensors"))]
    layouts = st.sampled_from(["plain", "plain", "unaligned", "reversed", "added"])
    bases, news = [], []
    for old, now in pairs:
        how = data.draw(layouts)
        bases.append(None if how == "added" else laid_out(old.view(kind.dtype.bits), how))
        news.append(laid_out(now.view(kind.dtype.bits), data.draw(layouts)))
    payload, wanted = encoded(kind, bases, news)
    check_resolves(kind, bases, news, payload, wanted)


@pytest.mark.parametrize("kind", [PAYLOAD_TYPES[9], F4_E2M1], ids=lambda kind: kind.name)
def test_blocks_of_many_small_tensors_agree(kind):
    """A block has 1024 tiles or more, and each of these tensors is a tile."""
    rng = np.random.default_rng(kind.code)
    tiles = {4: 4096, 16: 1024}[kind.width]
    line = rng.integers(0, 256, 3 * kind.dtype.itemsize * (2 * tiles + 5), np.uint8).view(kind.dtype.bits)
    for changing, chunks in (([0, 7, tiles - 1, tiles, tiles + 1], [(1, 3), (1, 2)]), ([tiles + 9], [(0, 0), (1, 1)])):
        new = line.copy()
        new[[3 * number for number in changing]] ^= 1
        bases, news = (array.reshape(-1, 3) for array in (line, new))
        payload, wanted = encoded(kind, list(bases), list(news), threads=(2,))
        assert [(mode, changed) for mode, _, changed, _ in inspect_group(payload, kind)[0].tolist()] == chunks
        assert [size for _, size, _, _ in inspect_group(payload, kind)[0]] == [tiles, tiles]
        for codec, budget in itertools.product(CODES, (0, UNLIMITED)):
            state = bases.copy()
            resolution = codec.resolution(2, budget)
            (outcome,) = resolution.add_groups([group_of(kind, list(state), list(news), payload, True)], b"-" + payload)
            assert outcome.changed.tolist() == wanted.changed.tolist()
            assert (outcome.before, outcome.after) == (wanted.before, wanted.after)
            resolution.settle()
            np.testing.assert_array_equal(state, news)
            resolution = codec.resolution(2, budget)
            resolution.add_groups([group_of(kind, list(bases), list(news), payload)], b"-" + payload)
            assert [indices.tolist() for indices, _ in resolution.changes([changing[-1], 3, changing[0]])] == [[0], [], [0]]


@pytest.mark.parametrize("kind", [F4_E2M1, U4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("density", [0.0001, 0.01, 0.4])
def test_packed_groups_of_whole_tiles_agree(kind, density):
    """Changes fall at both ends of words, of blocks of 512 bytes and of tiles, and several fall into one element."""
    rng = np.random.default_rng(1)
    codes = np.minimum(rng.geometric(0.4, 3 * 16384 + 16 * 41), 8) - 1 + 8 * rng.integers(0, 2, 3 * 16384 + 16 * 41)
    new_codes = codes.copy()
    chosen = rng.random(codes.size) < density
    chosen[[0, 15, 16, 1023, 1024, 16383, 16384, -1]] = True
    new_codes[chosen] ^= rng.integers(1, 16, int(chosen.sum()))
    base, new = ((c[0::2] | c[1::2] << 4).astype(np.uint8).view(kind.dtype.bits) for c in (codes, new_codes))
    payload, wanted = encoded(kind, [base], [new])
    assert wanted.changed.tolist() == [int(chosen.sum())]
    check_resolves(kind, [base], [new], payload, wanted)


@pytest.mark.parametrize("kind", [PAYLOAD_TYPES[4], PAYLOAD_TYPES[9], F4_E2M1], ids=lambda kind: kind.name)
def test_threads_that_share_a_block_agree(kind):
    """Threads scan 16 tiles at a time. Chunks end within these, and tiles with many changes stand beside tiles with few or none."""
    rng = np.random.default_rng(kind.code)
    tile = 16384 * kind.width // 8
    sizes = [19 * tile + 64, 40, 21 * tile]
    bases = [contents(rng, "weights", kind.dtype, size // kind.dtype.itemsize) for size in sizes]
    news = [base.copy() for base in bases]
    for new in news:
        bits, density = new.view(np.uint8), np.full(new.nbytes, 0.001)
        for first, last, share in ((2, 5, 0), (5, 8, 0.9), (17, 18, 0.06)):
            density[first * tile : last * tile] = share
        changes = rng.random(new.nbytes) < density
        bits[changes] ^= rng.integers(1, 8, int(changes.sum()), np.uint8)
    payload, wanted = encoded(kind, bases, news, threads=(1, 2, 5))
    assert len(inspect_group(payload, kind)[0]) >= 3
    assert min(wanted.changed[[0, 2]]) > 1 << 14


def test_several_groups_and_old_payloads_share_a_resolution():
    kinds = [PAYLOAD_TYPES[9], F4_E2M1]
    bases = [[np.zeros(9, np.uint16), np.zeros(4, np.uint16)], [np.zeros(3, np.uint8)]]
    news = [[base + np.array(number + 1, base.dtype) for number, base in enumerate(group)] for group in bases]
    codec = NativeCodec()
    payloads = [encoded(*group)[0] for group in zip(kinds, bases, news, strict=True)]
    resolution = codec.resolution(1, UNLIMITED)
    for kind, base, new, payload in zip(kinds, bases, news, payloads, strict=True):
        resolution.add_groups([group_of(kind, base, new, payload)], b"-" + payload)
    found = resolution.changes([2, 0, 1])
    assert [values.tolist() for _, values in found] == [news[1][0].tolist(), news[0][0].tolist(), news[0][1].tolist()]


def test_a_payload_with_more_tiles_than_the_tensors_is_corrupt():
    for codec in CODES:
        with pytest.raises(CorruptDelta, match="more tiles"):
            codec.resolution(1, 0).add_groups(
                [group_of(F4_E2M1, [np.zeros(3, np.uint8)], [np.zeros(3, np.uint8)], b"\x08\x00")], b"-\x08\x00"
            )


def test_arrays_on_a_gpu_or_of_another_width_are_refused():
    bits = np.zeros(3, np.uint8)
    with pytest.raises(TypeError):
        NativeCodec().encode_groups([EncodeGroup(F4_E2M1, [object()], [bits], seeds_of([0]))], 1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="width"):
        NativeCodec().encode_groups([EncodeGroup(F4_E2M1, [bits], [bits.astype(np.uint16)], seeds_of([0]))], 1)
    with pytest.raises(ValueError, match="size"):
        NativeCodec().encode_groups([EncodeGroup(F4_E2M1, [bits[:1]], [bits], seeds_of([0]))], 1)
    with pytest.raises(ValueError, match="length"):
        NativeCodec().encode_groups([EncodeGroup(F4_E2M1, [bits], [bits], seeds_of([0, 0]))], 1)

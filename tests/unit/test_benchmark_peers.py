"""The re-implemented peers are exact, because a comparison with a method that loses bits would be meaningless."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("zstandard")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peers

DTYPES = [np.uint16, np.uint8]
ELEMENTS = 1_500_001  # this makes several slabs in both widths, and a tail that is not a whole word


@pytest.fixture(params=peers.PEERS, ids=lambda peer: peer.name)
def peer(request: pytest.FixtureRequest) -> peers.Peer:
    return request.param


def weights(dtype: npt.DTypeLike, size: int = ELEMENTS) -> peers.Bits:
    return np.random.default_rng(7).integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)


def changed_at(base: peers.Bits, where: npt.ArrayLike) -> peers.Bits:
    """Return a copy of `base` with different values at the positions `where`."""
    new = base.copy()
    where = np.asarray(where, np.int64)
    new[where] ^= np.random.default_rng(8).integers(1, np.iinfo(base.dtype).max, where.size, dtype=base.dtype, endpoint=True)
    return new


def assert_exact(peer: peers.Peer, base: peers.Bits, new: peers.Bits) -> bytes:
    before = base.copy(), new.copy()
    delta = peer.encode(base, new)
    np.testing.assert_array_equal(base, before[0])
    np.testing.assert_array_equal(new, before[1])
    state = base.copy()
    peer.apply(state, delta)
    np.testing.assert_array_equal(state, new)
    return delta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 1e-5, 0.001, 0.01, 0.05, 0.3, 0.9, 1.0])
def test_round_trip(peer: peers.Peer, dtype: npt.DTypeLike, density: float) -> None:
    base = weights(dtype)
    where = np.flatnonzero(np.random.default_rng(9).random(base.size) < density)
    assert_exact(peer, base, changed_at(base, where))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "where",
    [
        [0],
        [ELEMENTS - 1],
        [0, ELEMENTS - 1],
        [0, 1, 2, ELEMENTS - 2, ELEMENTS - 1],
        # A gap of 65,535 just fits into 16 bits. The next gaps need one bridge, exactly two, and more than two.
        np.cumsum([0, 65_536, 65_537, 1, 131_072, 131_073, 1, 196_609, 400_000]),
        # These gaps are around the limits of the LEB128 lengths.
        np.cumsum([0, 127, 128, 129, 130, 16_383, 16_384, 16_385, 16_386, 1]),
    ],
    ids=["first", "last", "first and last", "ends", "16-bit gaps", "7-bit gaps"],
)
def test_places_that_are_easy_to_miss(peer: peers.Peer, dtype: npt.DTypeLike, where: npt.ArrayLike) -> None:
    base = weights(dtype)
    assert_exact(peer, base, changed_at(base, where))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 3, 15, 16, 17, 33])
def test_small_tensors(peer: peers.Peer, dtype: npt.DTypeLike, size: int) -> None:
    base = weights(dtype, size)
    assert_exact(peer, base, base.copy())
    assert_exact(peer, base, changed_at(base, np.arange(size)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(peer: peers.Peer, dtype: npt.DTypeLike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SLAB_BYTES", 4096)
    monkeypatch.setattr(peers, "_BLOCK_CHANGES", 100)
    base = weights(dtype, 200_000)
    # The counts are odd, so sections need padding. One gap covers many empty slabs.
    where = np.flatnonzero(np.random.default_rng(9).random(base.size) < 0.037)
    assert_exact(peer, base, changed_at(base, where[(where < 40_000) | (where > 180_000)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_start_anywhere(peer: peers.Peer, dtype: npt.DTypeLike) -> None:
    base = weights(dtype, 10_007)[3:]
    new = changed_at(base, [0, 17, 5_000, base.size - 1])
    padded = np.empty(new.size + 1, dtype)
    padded[1:] = new
    assert_exact(peer, base, padded[1:])


def test_signed_zeros_and_nans_are_values_like_any_other(peer: peers.Peer) -> None:
    base = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16)
    assert_exact(peer, base, np.array([0x8000, 0x0000, 0x7FC1, 0xFFC0, 0x3F80], np.uint16))


def test_unequal_tensors_are_no_delta() -> None:
    sparse = [peer for peer in peers.PEERS if not isinstance(peer, peers.DenseXor)]
    for peer in sparse:
        with pytest.raises(ValueError, match="base is"):
            peer.encode(np.zeros(4, np.uint16), np.zeros(5, np.uint16))


def test_bits_per_change_of_the_uncompressed_methods() -> None:
    base = weights(np.uint16, 1 << 20)
    new = changed_at(base, np.arange(0, base.size, 64))  # gaps of 63 take one byte of LEB128 each
    changes = base.size // 64
    assert len(peers.Int32Value().encode(base, new)) == pytest.approx(6 * changes, abs=64)
    assert len(peers.Leb128Value().encode(base, new)) == pytest.approx(3 * changes, abs=64)


def test_leb128_is_the_standard_encoding() -> None:
    numbers = [0, 1, 127, 128, 300, 16_383, 16_384, 2**21 - 1, 2**21, 2**28, 2**35 - 1, 2**35, 2**56 - 1]

    def reference(number: int) -> bytes:
        out = bytearray()
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*out, number])

    for last in range(1, len(numbers) + 1):  # each is the largest once, because the largest decides the width of the words
        some = np.array(numbers[:last], np.int64)
        stream = peers.leb128_encode(some)
        assert stream.tobytes() == b"".join(map(reference, numbers[:last]))
        np.testing.assert_array_equal(peers.leb128_decode(stream), some)

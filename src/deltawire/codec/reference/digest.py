"""§2 The state digest."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ..base import Lanes
from ..bits import HostBits
from .terms import ONE, U64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
DIGEST_PIECE = 1 << 21  # bytes per step, so that the widened words of a large tensor need little memory


def mix(x: U64) -> U64:
    """Return the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def word_factors(lane: int) -> NDArray[np.int64]:
    """Return T(i, lane) for i = 0 … 255. The array is read-only."""
    top = mix(GOLDEN * np.arange(256 * lane + 1, 256 * lane + 257, dtype=np.uint64)) >> np.uint64(48)
    factors = (top | ONE).astype(np.uint16).view(np.int16).astype(np.int64)
    factors.flags.writeable = False
    return factors


def block_factors(first: int, count: int, lane: int, seed: int) -> U64:
    """Return M(b, lane) for b = first … first + count − 1."""
    b = np.arange(first, first + count, dtype=np.uint64)
    z = mix(np.uint64(seed) + GOLDEN * (b + b + np.uint64(1 + lane // 2)))
    return (z & LOW32 if lane % 2 == 0 else z >> np.uint64(32)) | ONE


def word_sums(bits: HostBits, seed: int) -> Lanes:
    """Return the digest of a tensor without its tag."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    lanes = [0, 0, 0, 0]
    for start in range(0, data.size, DIGEST_PIECE):
        piece = data[start : start + DIGEST_PIECE]
        padded = np.zeros(piece.size + -piece.size % 512, np.uint8)  # a zero word adds nothing to a sum
        padded[: piece.size] = piece
        words = padded.view("<i2").astype(np.int64).reshape(-1, 256)
        for j in range(4):
            inner = (words @ word_factors(j)).astype(np.uint64) & LOW32
            lanes[j] += int((inner * block_factors(start // 512, len(words), j, seed)).sum())
    return (lanes[0] % 2**32, lanes[1] % 2**32, lanes[2] % 2**32, lanes[3] % 2**32)

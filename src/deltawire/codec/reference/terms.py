"""§4 A coded chunk: the terms that encoder and decoder share."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DType
from ..bits import HostBits

U64: TypeAlias = NDArray[np.uint64]
Mask: TypeAlias = NDArray[np.bool_]

MOST_CHANGES = 1 << 15
UNIT, RUNS, DIRECT, SYMBOLS = range(4)
LARGEST_K = 24
ONE = np.uint64(1)


def ordered(x: HostBits, dtype: DType) -> HostBits:
    """Return the ordered integer of each element."""
    top = x.dtype.type(1 << (dtype.width - 1))
    return np.where(x & top, ~x, x ^ top) if dtype.exponent_bits else x


def unordered(x: HostBits, dtype: DType) -> HostBits:
    """Return the inverse of `ordered`."""
    top = x.dtype.type(1 << (dtype.width - 1))
    return np.where(x & top, x ^ top, ~x) if dtype.exponent_bits else x


def exponents(x: HostBits, dtype: DType) -> NDArray[np.int64]:
    return ((x >> dtype.exponent_shift) & ((1 << dtype.exponent_bits) - 1)).astype(np.int64)


def context_count(dtype: DType) -> int:
    return 16 if dtype.exponent_bits else 1


def contexts(base: HostBits, dtype: DType, top: int) -> NDArray[np.int64]:
    return np.clip(top - exponents(base, dtype), 0, context_count(dtype) - 1)


def floor_log2(x: U64) -> U64:
    """Return ⌊log₂ x⌋ of positive integers. It is exact, whereas a float could round up to the next power of two."""
    result = np.zeros_like(x)
    for shift in (32, 16, 8, 4, 2, 1):
        reaches = (x >> np.uint64(shift)) > 0
        x = np.where(reaches, x >> np.uint64(shift), x)
        result += np.where(reaches, np.uint64(shift), np.uint64(0))
    return result


def lr_code(k: int, v: U64) -> tuple[U64, U64]:
    """Return LR(k, v) of each v as three bit fields: prefix, low bits of x, low bits of v. The arrays are fields and lengths."""
    q = v >> np.uint64(k)
    escaped = q >= 16
    x = np.where(escaped, q - np.uint64(15), ONE)
    b = floor_log2(x)
    prefix = np.where(escaped, b << np.uint64(16), ONE << np.minimum(q, np.uint64(15)))
    prefix_length = np.where(escaped, np.uint64(16 + 6), q + ONE)
    low = v & np.uint64((1 << k) - 1)
    return np.stack([prefix, x ^ (ONE << b), low], axis=1), np.stack([prefix_length, b, np.full_like(v, k)], axis=1)


def lr_cost(k: int, v: U64) -> int:
    return int(lr_code(k, v)[1].sum())

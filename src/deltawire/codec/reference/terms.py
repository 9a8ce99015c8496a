"""§4 A coded chunk: the terms that encoder and decoder share."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..bits import HostBits

U64: TypeAlias = NDArray[np.uint64]
Mask: TypeAlias = NDArray[np.bool_]

MOST_CHANGES = 1 << 15
UNIT, RUNS, DIRECT, SYMBOLS = range(4)
LARGEST_K = 24
ONE = np.uint64(1)


class Layout(Protocol):
    """The type of elements: a `DType` or a `PayloadType`."""

    @property
    def width(self) -> int: ...
    @property
    def exponent_shift(self) -> int: ...
    @property
    def exponent_bits(self) -> int: ...


def modulo(x: HostBits, layout: Layout) -> HostBits:
    """Return integers modulo 2^w. Only 4-bit elements are stored in wider integers."""
    return x & x.dtype.type((1 << layout.width) - 1)


def ordered(x: HostBits, layout: Layout) -> HostBits:
    """Return the ordered integer of each element."""
    top = x.dtype.type(1 << (layout.width - 1))
    return np.where(x & top, modulo(~x, layout), x ^ top) if layout.exponent_bits else x


def unordered(x: HostBits, layout: Layout) -> HostBits:
    """Return the inverse of `ordered`."""
    top = x.dtype.type(1 << (layout.width - 1))
    return np.where(x & top, x ^ top, modulo(~x, layout)) if layout.exponent_bits else x


def exponents(x: HostBits, layout: Layout) -> NDArray[np.int64]:
    return ((x >> layout.exponent_shift) & ((1 << layout.exponent_bits) - 1)).astype(np.int64)


def context_count(layout: Layout) -> int:
    return 16 if layout.exponent_bits else 1


def contexts(base: HostBits, layout: Layout, top: int) -> NDArray[np.int64]:
    return np.clip(top - exponents(base, layout), 0, context_count(layout) - 1)


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

"""Provide Hypothesis strategies for a tensor and its successor, with changes that training makes and changes that it never makes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from support import array_of

from deltawire.dtypes import DType

TILE = 1 << 14
PIECE_BYTES = 8192  # the bytes that the native kernels process at a time


def sizes(dtype: DType) -> st.SearchStrategy[int]:
    span = PIECE_BYTES // dtype.itemsize
    edges = [0, 2, 3 * TILE + 17] + [at + by for at in (1, 64, 128, span, 8192, TILE, 2 * TILE) for by in (-1, 0, 1)]
    return st.one_of(st.sampled_from(edges), st.integers(0, 600), st.integers(0, 2 * TILE + 300))


def specials(dtype: DType) -> Any:
    """Return zeros of both signs, the smallest and largest subnormals, ones, the largest numbers, infinities, quiet and signalling NaNs."""
    top = 1 << (dtype.width - 1)
    infinity = ((1 << dtype.exponent_bits) - 1) << dtype.exponent_shift
    unit = 1 << dtype.exponent_shift
    positive = [0, 1, 2, unit - 1, unit, unit + 1, max(infinity - 1, 0), infinity, infinity + 1, infinity | unit >> 1, top - 1]
    return np.array([sign | x for x in positive for sign in (0, top)], np.uint64).astype(dtype.bits)


def noise(rng: np.random.Generator, dtype: DType, size: int) -> Any:
    return rng.integers(0, 2**dtype.width, size, dtype.bits.type)


def contents(rng: np.random.Generator, kind: str, dtype: DType, size: int) -> Any:
    """Draw the bits of a base."""
    if kind == "zeros":
        return np.zeros(size, dtype.bits)
    if kind == "one value":
        return np.full(size, noise(rng, dtype, 1)[0])
    if kind == "specials":
        return rng.choice(specials(dtype), size)
    if kind == "weights" and dtype.exponent_bits:
        return (rng.standard_normal(size) * 0.02).astype(dtype.numpy).view(dtype.bits)
    if kind == "weights":
        return np.clip(rng.standard_normal(size) * 20 + 60, 0, 127).astype(dtype.bits)
    if kind == "many scales" and dtype.exponent_bits:
        exponent = rng.integers(0, 1 << dtype.exponent_bits, size).astype(dtype.bits) << dtype.bits.type(dtype.exponent_shift)
        return exponent | noise(rng, dtype, size) & dtype.bits.type((1 << dtype.exponent_shift) - 1)
    return noise(rng, dtype, size)


def chosen(rng: np.random.Generator, kind: str, size: int) -> Any:
    """Draw which elements change."""
    mask = np.zeros(size, np.bool_)
    if kind == "all":
        mask[:] = True
    elif kind == "ends" and size:
        mask[[0, -1]] = True
    elif kind == "all but few":
        mask[:] = True
        mask[rng.integers(0, size, min(size, 3))] = False
    elif kind == "one" and size:
        mask[rng.integers(0, size)] = True
    elif kind == "clusters":
        for start in rng.integers(0, max(size, 1), 4):
            mask[start : start + int(rng.integers(1, 400))] = True
    elif kind == "one tile":
        mask[TILE : 2 * TILE] = True
    elif kind.startswith("density "):
        mask = rng.random(size) < float(kind.split()[1])
    return mask


def stepped(rng: np.random.Generator, kind: str, base: Any, dtype: DType) -> Any:
    """Draw new bits for every element."""
    one = dtype.bits.type(1)
    sign = np.where(rng.random(base.size) < 0.5, one, ~dtype.bits.type(0))
    if kind == "unit":
        return base + sign
    if kind == "mostly unit":
        return base + sign * np.where(rng.random(base.size) < 0.97, 1, rng.integers(2, 90, base.size)).astype(dtype.bits)
    if kind == "small":
        return base + sign * rng.geometric(0.2, base.size).clip(1, 100).astype(dtype.bits)
    if kind == "wide":
        shift = rng.integers(0, dtype.width, base.size).astype(dtype.bits)
        return base + sign * (noise(rng, dtype, base.size) >> shift)
    if kind == "sign":
        return base ^ dtype.bits.type(1 << (dtype.width - 1))
    if kind == "few top bytes":
        low = noise(rng, dtype, base.size) >> dtype.bits.type(7) if dtype.width > 8 else sign
        return base ^ low
    if kind == "specials":
        return rng.choice(specials(dtype), base.size)
    return noise(rng, dtype, base.size)


@st.composite
def tensor_pairs(draw: st.DrawFn, dtype: DType) -> tuple[Any, Any]:
    """Draw two flat arrays of one type and size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    size = draw(sizes(dtype), label="size")
    content = draw(st.sampled_from(["weights", "many scales", "specials", "noise", "zeros", "one value"]), label="content")
    densities = [f"density {d}" for d in ("0.001", "0.01", "0.05", "0.3", "0.6", "0.97")]
    selection = draw(st.sampled_from([*densities, "none", "all", "all but few", "one", "ends", "clusters", "one tile"]), label="selection")
    step = draw(st.sampled_from(["unit", "mostly unit", "small", "wide", "sign", "few top bytes", "specials", "noise"]), label="step")
    with np.errstate(all="ignore"):
        base = contents(rng, content, dtype, size)
        new = np.where(chosen(rng, selection, size), stepped(rng, step, base, dtype), base) if size else base.copy()
    return array_of(dtype, base), array_of(dtype, new)

"""Recorded and synthetic weight updates for benchmarks, and the number of bits that an order-0 coder needs for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from os import PathLike
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
State: TypeAlias = dict[str, Array]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

_SLAB = 1 << 18  # elements generated at a time: all scratch stays in cache, whatever the size of the tensor
_DENSEST_UPDATE = 0.5
_FP8_MAX = 448

# Standard deviation of the weights, exponent of the smallest normal number, bits of the mantissa. The bf16 scale is that of
# common initialisations; fp8 weights come with scales that move them up to where the format has its range.
_WEIGHTS = {BF16: (0.02, -126, 7), FP8_E4M3: (16.0, -6, 3)}

_TRACE_COLUMNS = {"norm.weight": 0, "o_proj": 2048, "down_proj": 3072}  # 0 for a vector; matrices of any other name have 1024


def trace_steps(path: str | PathLike[str]) -> Iterator[tuple[State, State]]:
    """Yield the bf16 states before and after every optimizer step of a trace.

    The trace is an npz of flat arrays: ``base/<tensor>`` (bits before the first step), then for step k the elements that changed,
    ``step<k>/<tensor>/idx`` and ``/val`` (new bits). The caller may change all yielded arrays.
    """
    with np.load(path) as trace:
        state = {key.removeprefix("base/"): trace[key] for key in trace.files if key.startswith("base/")}
        steps = {int(found[1]) for key in trace.files if (found := re.match(r"step(\d+)/", key))}
        for step in sorted(steps):
            base = {name: _as_weights(name, bits) for name, bits in state.items()}
            for name, bits in state.items():
                index = f"step{step}/{name}/idx"
                if index in trace:
                    bits[trace[index]] = trace[f"step{step}/{name}/val"]
            yield base, {name: _as_weights(name, bits) for name, bits in state.items()}


def _as_weights(name: str, bits: npt.NDArray[np.uint16]) -> Array:
    weights: Array = bits.copy().view(BF16)
    columns = next((columns for part, columns in _TRACE_COLUMNS.items() if part in name), 1024)
    # For a trace of another architecture only the names are known, not the shapes.
    return weights.reshape(-1, columns) if columns and weights.size % columns == 0 else weights


def synthetic_update(elements: int, density: float, dtype: npt.DTypeLike = BF16, seed: int = 0) -> tuple[Array, Array]:
    """Return flat weights before and after an optimizer step that changes the share `density` of them; `dtype` is bf16 or fp8 e4m3fn.

    Weights are rounded from fp32 master weights, which are normal, so within the cell of one rounded weight they are uniform. The
    update is normal too, of the same size for every weight, as AdamW's is. A weight flips when it leaves its cell: the chance
    is |update| / ULP, which doubles with every exponent downwards. The size of the update is solved for `density`.

    Normal updates are closest to the recorded trace (lr 1e-6), of those tried: normal, Laplace, Student-t, uniform, constant.
    Trace against 128 Mi synthetic elements of density 1.08%: 90.0 and 90.1% of the changes are by one ULP, 4.1 and 4.1% by two;
    5.37 and 5.39 bits per change for positions given the exponent, 1.39 and 1.42 for steps given it.

    Every element is drawn afresh: nothing repeats. Between density 0 (nothing changes) and 1e-4 fewer weights change than asked
    for, as updates below the resolution of an fp32 master get lost. Density 1 is an update that changes half of the
    weights, with a step of one ULP up or down for all others.
    """
    dtype = np.dtype(dtype)
    if dtype not in _WEIGHTS:
        raise ValueError(f"no synthetic weights of type {dtype}")
    if not 0 <= density <= 1:
        raise ValueError(f"density {density} is not a share")
    scale = np.float32(_WEIGHTS[dtype][0])
    size = np.float32(update_size(density if density < 1 else _DENSEST_UPDATE, dtype))
    random = np.random.Generator(np.random.SFC64(seed))
    base, new = np.empty(elements, dtype), np.empty(elements, dtype)
    masters, updates = np.empty(_SLAB, np.float32), np.empty(_SLAB, np.float32)
    for start in range(0, elements, _SLAB):
        end = min(start + _SLAB, elements)
        master, update = masters[: end - start], updates[: end - start]
        random.standard_normal(out=master, dtype=np.float32)
        master *= scale
        base[start:end] = master
        if density == 0:
            new[start:end] = base[start:end]
            continue
        random.standard_normal(out=update, dtype=np.float32)
        update *= size
        master += update
        if dtype == FP8_E4M3:  # quantizers saturate, while the cast turns values that are too large into NaN
            np.clip(master, -_FP8_MAX, _FP8_MAX, out=master)
        new[start:end] = master
        if density == 1:
            _step_where_equal(base[start:end], new[start:end], random)
    return base, new


def synthetic_masters(elements: int, size: float, steps: int, seed: int = 0) -> Iterator[npt.NDArray[np.float32]]:
    """Yield float32 weights of the scale of bf16 models, and then the same after each normal update of standard deviation `size`.

    The array is changed in place.
    """
    random = np.random.Generator(np.random.SFC64(seed))
    masters = random.standard_normal(elements, np.float32)
    masters *= np.float32(_WEIGHTS[BF16][0])
    yield masters
    for _ in range(steps):
        update = random.standard_normal(elements, np.float32)
        update *= np.float32(size)
        masters += update
        yield masters


def update_size(density: float, dtype: np.dtype[Any]) -> float:
    """Return the standard deviation of an update that changes the share `density` of the weights, by bisection."""
    if density == 0:
        return 0.0
    scale = _WEIGHTS[dtype][0]
    low, high = math.log(scale) - 60, math.log(scale) + 60
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _flip_chance(math.exp(middle), dtype) < density else (low, middle)
    return math.exp((low + high) / 2)


def _flip_chance(size: float, dtype: np.dtype[Any]) -> float:
    """The chance that a normal update of standard deviation `size` changes a weight: E[min(1, |update| / ULP)], over all exponents."""
    scale, smallest, mantissa = _WEIGHTS[dtype]
    chance = 0.0
    for exponent in range(smallest, 128):
        ulps = 2.0 ** (exponent - mantissa) / size
        below = 0.0 if exponent == smallest else 2.0**exponent / scale  # subnormals have the ULP of the smallest exponent
        share = math.erf(2.0 ** (exponent + 1) / scale / math.sqrt(2)) - math.erf(below / math.sqrt(2))
        # −expm1(−x²/2) / x is the mean of |z| / x below x; it is 1 − exp(…) without the cancellation for tiny x.
        chance += share * (math.sqrt(2 / math.pi) * -math.expm1(-ulps * ulps / 2) / ulps + math.erfc(ulps / math.sqrt(2)))
    return chance


def _step_where_equal(base: Array, new: Array, random: np.random.Generator) -> None:
    """Move every element of `new` that equals its `base` by one ULP, in place: away from zero or, if not there already, towards it."""
    unsigned = np.dtype(f"u{base.itemsize}")
    old, now = base.view(unsigned), new.view(unsigned)
    same = np.flatnonzero(old == now)
    bits = old[same]
    away = random.integers(0, 2, same.size, dtype=bool)
    away |= (bits << 1) == 0
    now[same] = np.where(away, bits + 1, bits - 1)


def order0_bound_bits(base: Array, new: Array) -> float:
    """Return the bits that an ideal order-0 coder needs for one bf16 tensor, without its tables.

    This is the entropy of the positions of changes, given the exponents of `base`, plus the entropy of the steps in ULPs, given the same.
    Steps are differences of ordered integers, in which −0 comes just below +0.
    """
    old, now = base.reshape(-1).view(np.uint16), new.reshape(-1).view(np.uint16)
    if old.size != now.size:
        raise ValueError(f"{old.size} elements became {now.size}")
    elements = np.zeros(256, np.int64)
    joint: list[npt.NDArray[np.int64]] = []
    for start in range(0, old.size, _SLAB):
        a, b = old[start : start + _SLAB], now[start : start + _SLAB]
        elements += np.bincount((a >> 7) & 0xFF, minlength=256)
        where = np.flatnonzero(a != b)
        a, b = a[where], b[where]
        joint.append(((a >> 7) & 0xFF).astype(np.int64) << 17 | (_ordered(b) - _ordered(a) + 0x10000))
    pairs, pair_counts = np.unique(np.concatenate(joint), return_counts=True) if joint else (np.empty(0, np.int64),) * 2
    changed = np.bincount(pairs >> 17, weights=pair_counts, minlength=256)
    positions = _n_log_n(elements) - _n_log_n(changed) - _n_log_n(elements - changed)
    steps = _n_log_n(changed) - _n_log_n(pair_counts)
    return positions + steps


def codes_of(packed: Array) -> Array:
    """Return the 4-bit codes of packed bytes, the low half of each byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)


def code_bound_bits(base: Array, new: Array, element: str) -> float:
    """Return the bits that an ideal order-0 coder needs for the codes of one quantised tensor, without its tables.

    `element` is "e4m3" (fp8, one code in each byte: the exponents of `base` are known), "e2m1" or "int4" (one 4-bit code in each byte: the
    codes of `base` are known).
    """
    codes = np.arange(256 if element == "e4m3" else 16)
    contexts = codes >> 3 & 15 if element == "e4m3" else codes
    sign = len(codes) // 2
    order = codes if element == "int4" else np.where(codes & sign, len(codes) - 1 - codes, codes + sign)
    pairs = np.zeros(len(codes) ** 2, np.int64)
    for start in range(0, base.size, _SLAB):
        a, b = base[start : start + _SLAB].astype(np.int64), new[start : start + _SLAB]
        pairs += np.bincount(a * len(codes) + b, minlength=pairs.size)
    old, now = np.divmod(np.flatnonzero(pairs), len(codes))
    counts = pairs[pairs > 0]
    elements = np.bincount(contexts[old], weights=counts, minlength=16)
    is_change = old != now
    changed = np.bincount(contexts[old[is_change]], weights=counts[is_change], minlength=16)
    steps, which = np.unique(contexts[old[is_change]] * 1024 + order[now[is_change]] - order[old[is_change]], return_inverse=True)
    step_counts = np.bincount(which, weights=counts[is_change], minlength=len(steps))
    positions = _n_log_n(elements) - _n_log_n(changed) - _n_log_n(elements - changed)
    return positions + _n_log_n(changed) - _n_log_n(step_counts)


def _ordered(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    signed = bits.view(np.int16)
    return np.where(signed < 0, signed ^ 0x7FFF, signed).astype(np.int64)


def _n_log_n(counts: npt.NDArray[Any]) -> float:
    nonzero = counts[counts > 0].astype(np.float64)
    return float((nonzero * np.log2(nonzero)).sum())

"""Weights for the tests of quantising."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
KINDS = ("plain", "one huge", "zeros", "minus zeros", "some zeros", "small", "subnormal", "tiniest", "wide range", "rows far apart")
MOVES = ("noise", "grow one", "grow all", "shrink all", "shrink rows", "clear rows", "clear all", "nothing")


def make_weight(kind: str, shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    """Return a finite weight of one of the `KINDS`."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    weight = rng.standard_normal(shape).astype(np.float32) * np.float32(0.02)
    tiny = {"bfloat16": 1e-38, "float16": 1e-4, "float32": 1e-38}[dtype]
    if kind == "one huge":
        weight[1, 3] = 3e4
    elif kind in ("zeros", "minus zeros"):
        weight[:] = 0.0 if kind == "zeros" else -0.0
    elif kind == "some zeros":
        weight[2:5] = 0
        weight[6, :64] = -0.0
    elif kind == "small":
        weight *= np.float32(1e-4)
    elif kind == "subnormal":
        weight *= np.float32(tiny)
    elif kind == "tiniest":
        weight = (np.sign(weight) * np.float32(tiny)).astype(np.float32) * (rng.random(shape) < 0.1)
    elif kind == "wide range":
        weight *= np.exp2(rng.integers(-40, 10, shape)).astype(np.float32)
    elif kind == "rows far apart":
        weight *= np.exp2(rng.integers(-20 if dtype == "float16" else -120, 15, (shape[0], 1))).astype(np.float32)
    made = weight.astype(DTYPES[dtype])
    assert np.isfinite(made.astype(np.float32)).all()
    return made


def walk(shape, dtype, moves, seed):
    """Yield a weight before and after each move: a name of `MOVES` and a factor."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal(shape) * 0.02 * np.exp2(rng.integers(-3, 4, (shape[0], 1)))).astype(np.float32)
    yield weight.astype(DTYPES[dtype])
    for move, factor in moves:
        rows = rng.random(shape[0]) < 0.3
        if move == "noise":
            weight = weight * (1 + 1e-3 * rng.standard_normal(shape))
        elif move == "grow one":
            weight = weight.copy()
            weight[rng.integers(shape[0]), rng.integers(shape[1])] *= 20 * factor
        elif move in ("grow all", "shrink all"):
            weight = weight * (factor if move == "grow all" else 1 / factor)
        elif move == "shrink rows":
            weight = np.where(rows[:, None], weight / factor, weight)
        elif move in ("clear rows", "clear all"):
            weight = np.where(rows[:, None] | (move == "clear all"), 0, weight)
        weight = np.clip(weight, -6e4, 6e4).astype(np.float32)
        yield weight.astype(DTYPES[dtype])

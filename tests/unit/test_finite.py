"""NaN and infinity are found in every type that has them, wherever they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import array_of

from deltawire.dtypes import DTYPES
from deltawire.tensors import finite
from deltawire.tensors.finite import count_nonfinite

FLOATS = [dtype for dtype in DTYPES if dtype.name.startswith(("F", "BF"))]


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.width <= 16], ids=lambda dtype: dtype.name)
def test_every_bit_pattern_is_judged_as_numpy_does(dtype):
    patterns = array_of(dtype, np.arange(1 << dtype.width))
    expected = ~np.isfinite(patterns.astype(np.float32))
    assert count_nonfinite({"all": patterns}) == {"all": int(expected.sum())}
    alone = {str(index): patterns[index : index + 1] for index in range(0, patterns.size, 1 if dtype.width == 8 else 61)}
    assert count_nonfinite(alone) == {name: 1 for name in alone if expected[int(name)]}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extremes_of_wide_types_are_judged_right(dtype):
    tiny, largest = np.finfo(dtype).tiny, np.finfo(dtype).max
    numbers = np.array([0.0, -0.0, tiny, -tiny, largest, -largest, tiny / 4, -tiny / 4], dtype)
    bad = np.array([np.inf, -np.inf, np.nan, -np.nan], dtype)
    assert count_nonfinite({"numbers": numbers, "bad": bad, "both": np.concatenate([numbers, bad])}) == {"bad": 4, "both": 4}


def test_tensors_that_are_not_floats_are_never_listed():
    state = {str(dtype.name): array_of(dtype, np.full(9, (1 << dtype.width) - 1, np.uint64)) for dtype in DTYPES if dtype not in FLOATS}
    assert count_nonfinite(state | {"empty": np.empty((0, 3), np.float32)}) == {}


@pytest.mark.parametrize("threads", [1, 2])
def test_one_element_is_found_wherever_it_is(threads, monkeypatch):
    monkeypatch.setattr(finite, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(finite, "_PIECE", 64)
    whole = np.zeros((30, 40), ml_dtypes.bfloat16)
    for index in [0, 31, 32, 600, 1199]:
        whole.reshape(-1)[index] = -np.inf
        found = count_nonfinite({"a": whole, "turned": whole.T, "other": np.zeros(3, np.float32)}, threads=threads)
        assert found == {"a": 1, "turned": 1}
        whole.reshape(-1)[index] = 0
    assert count_nonfinite({"a": whole}, threads=threads) == {}

"""The blocks of fp8-block are those of DeepSeek. The reference here is written out, one element after the other."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from sample_weights import DTYPES, KINDS, make_weight

from deltawire.quantise.quantise import quantise_state


def e4m3_values() -> list[float]:
    """Return the numbers with the codes 0 to 126: 4 bits of exponent with bias 7, 3 bits of fraction. Code 127 is NaN."""
    found = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        found.append(fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return found


VALUES = np.array(e4m3_values())


def nearest_code(value: float) -> int:
    """Return the code of the nearest number; of two equally near ones, the even code."""
    magnitude = min(abs(value), 448.0)
    upper = int(np.searchsorted(VALUES, magnitude))
    if upper == 0 or VALUES[upper] == magnitude:
        code = upper
    else:
        below, above = magnitude - VALUES[upper - 1], VALUES[upper] - magnitude
        code = upper if above < below or (above == below and upper % 2 == 0) else upper - 1
    return code | (0x80 if value < 0 else 0)


def blockwise(weight: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise as DeepSeek does: the scale of a block of 128 × 128 is its largest magnitude / 448, and codes are weight / scale."""
    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((math.ceil(rows / 128), math.ceil(columns / 128)), np.float32)
    wide = weight.astype(np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            block = wide[part]
            largest = np.float32(np.abs(block).max())
            scale = np.float32(largest / np.float32(448))
            if scale_format == "ue8m0" and largest:
                exponent = -126
                while 2.0**exponent < float(scale):
                    exponent += 1
                scale = np.float32(2.0**exponent)
            if largest == 0 or scale == 0:
                scale = np.float32(1)
            scales[i, j] = scale
            codes[part] = [[nearest_code(float(np.float32(value) / scale)) for value in row] for row in block]
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", ["fp8-block", "fp8-block-ue8m0"])
def test_fresh_scales_give_the_bytes_of_the_reference(spelling, dtype):
    for kind in KINDS:
        weight = make_weight(kind, (9, 133), dtype)
        check(weight, spelling)
    check(make_weight("rows far apart", (131, 20), dtype), spelling)


def check(weight: np.ndarray, spelling: str) -> None:
    made = quantise_state({"a.weight": weight}, spelling)
    codes, scales = blockwise(weight, "ue8m0" if "ue8m0" in spelling else "fp32")
    assert made.keys() == {"a.weight", "a.weight_scale_inv"}
    np.testing.assert_array_equal(made["a.weight"].view(np.uint8), codes)
    np.testing.assert_array_equal(made["a.weight_scale_inv"].view(np.uint32), scales.view(np.uint32))


def test_the_table_of_the_reference_is_e4m3():
    np.testing.assert_array_equal(VALUES, np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def test_a_scale_of_ue8m0_is_the_power_of_two_above():
    for largest, scale in ((448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (224.0, 0.5), (300.0, 1.0)):
        made = quantise_state({"a.weight": np.full((2, 2), largest, np.float32)}, "fp8-block-ue8m0")
        assert made["a.weight_scale_inv"].tolist() == [[scale]]

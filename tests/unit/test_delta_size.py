"""A delta spends few bytes on tensors that change, and none on others, but for three on each whole block of a group before a change."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltawire
from deltawire.codec import using_codec

BLOCK = 1 << 10
"""The tiles of a block. Each of the small tensors here is one tile."""


def delta_of(tensors: int, changed: int) -> bytes:
    """Return the delta of a state of small tensors in which one element of one of them changes."""
    base = {f"model.layers.{number:05}.weight": np.ones(64, ml_dtypes.bfloat16) for number in range(tensors)}
    new = {name: array.copy() for name, array in base.items()}
    name = f"model.layers.{changed:05}.weight"
    new[name][7] = 1.5
    delta = deltawire.encode_delta(base, new)
    deltawire.apply_delta(base, delta)
    assert base[name].tobytes() == new[name].tobytes()
    return delta


@pytest.mark.parametrize(
    ("codec", "tensors", "changed"),
    [("auto", 10_000, changed) for changed in (0, 1, 1023, 1024, 5000, 9999)]
    # The reference takes seconds to digest ten thousand tensors, and three blocks show the same.
    + [("reference", 2_100, changed) for changed in (0, 1, 1023, 1024, 2099)],
)
def test_a_change_of_one_tensor_of_many_takes_as_many_bytes_as_one_of_two(codec: str, tensors: int, changed: int) -> None:
    with using_codec(codec):
        small, large = delta_of(2, min(changed, 1)), delta_of(tensors, changed)
    number_of_tensors = 1  # its varint has two bytes
    tiles_of_the_chunk = 1  # its varint has two bytes
    whole_blocks = 3 * (changed // BLOCK)  # a chunk that is the same: two bytes of tiles, one of its length
    gap = 2  # the parameter k is in the header anyway, and its low bits grow with the gap: below 2¹⁶ elements
    assert len(large) - len(small) <= number_of_tensors + tiles_of_the_chunk + whole_blocks + gap
    assert not any(f"{number:05}".encode() in large for number in range(0, tensors, 997))


def codes_of(form: str) -> tuple[str, np.ndarray[Any, Any], int]:
    """Return the name, the elements and the number of codes of a tensor of 0.2 MB. All codes have the same exponent, or are the same."""
    random = np.random.default_rng(0)
    if form == "nvfp4":
        return "weight_packed", np.full((512, 384), 0x11, np.uint8), 512 * 768
    dtype = np.dtype(ml_dtypes.bfloat16 if form == "bf16" else ml_dtypes.float8_e4m3fn)
    one = np.ones(1, dtype).view(f"u{dtype.itemsize}")
    codes = one + random.integers(0, 4, 200_000 // dtype.itemsize).astype(one.dtype)
    return "weight", codes.view(dtype), codes.size


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("form", "changes"), [("bf16", 5), ("fp8", 10), ("nvfp4", 20)])
def test_a_tensor_that_changes_takes_at_most_24_bytes_beyond_its_changes(form: str, changes: int, every: int) -> None:
    random = np.random.default_rng(1)
    kind, tensor, codes = codes_of(form)
    base = {f"model.layers.0.mlp.experts.{number}.down_proj.{kind}": tensor.copy() for number in range(200)}
    new = dict(base)
    for name in list(base)[::every]:
        new[name] = base[name].copy()
        bits = new[name].reshape(-1).view(f"u{tensor.itemsize}")
        for place in random.choice(codes, changes, replace=False).tolist():
            if form == "nvfp4":
                bits[place // 2] += 1 << 4 * (place % 2)
            else:
                bits[place] += 1
    delta = deltawire.encode_delta(base, new)
    size = len(delta) / len(range(0, len(base), every))
    positions = math.log2(math.comb(codes, changes)) / 8  # no file can have fewer bytes, and all changes are the same step
    assert positions < size <= 24 + positions
    if form != "nvfp4" and every == 1:
        assert size <= 24
    deltawire.apply_delta(base, delta)
    assert all(base[name].tobytes() == new[name].tobytes() for name in base)

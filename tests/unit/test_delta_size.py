"""A delta spends no bytes on tensors that do not change, but for three bytes on each whole block of a group before a change."""

from __future__ import annotations

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

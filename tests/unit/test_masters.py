"""Master weights in arrays: rounded each by itself, but for those that are the same memory."""

from __future__ import annotations

import numpy as np

import deltawire
from deltawire.dtypes import dtype_named
from deltawire.masters import Rounding
from deltawire.tensors import tensor_bits

BF16 = dtype_named("BF16").numpy


def published(base, masters):
    state = {name: array.copy() for name, array in base.items()}
    deltawire.apply_delta(state, deltawire.encode_delta(base, masters, masters=True))
    return state


def test_numbers_that_are_no_arrays_are_rounded_each_by_itself():
    """They are seen by way of a temporary array: the next one may come to lie at the same address."""
    names = "abcdef"
    state = published({name: np.zeros((), BF16) for name in names}, {name: np.float32(i + 1) for i, name in enumerate(names)})
    assert [float(state[name]) for name in names] == [1, 2, 3, 4, 5, 6]


def test_tensors_without_elements_keep_their_shapes():
    shapes = {"a": (0, 5), "b": (0, 3)}
    base, masters = ({name: np.zeros(shape, dtype) for name, shape in shapes.items()} for dtype in (BF16, np.float32))
    assert {name: array.shape for name, array in published(base, masters).items()} == shapes


def test_the_same_memory_is_rounded_once():
    old, wide, rounding = tensor_bits("w", np.zeros(3, BF16)), np.ones(3, np.float32), Rounding()
    assert rounding.follow(old, tensor_bits("v", wide)).bits is rounding.follow(old, tensor_bits("w", wide)).bits

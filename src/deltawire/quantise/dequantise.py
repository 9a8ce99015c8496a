"""Dequantising: the weights that engines compute with, from the tensors that were published."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..codec.bits import copied_to_host
from ..dtypes import DType, dtype_named
from ..errors import ShapeMismatch, TensorMissing
from ..tensors.bits import State, Tensor, tensor_bits, typed
from ..tensors.casting import DTypeLike, wire_dtype
from .exact_arithmetic import exactly
from .layout import QuantisedLayout, QuantisedWeight
from .recipe import Recipe
from .reference import divisors, per_element
from .scales import Scales

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FLOATS = {dtype_named(name) for name in ("F16", "BF16", "F32", "F64")}


def dequantise_state(state: State, layout: QuantisedLayout, dtype: DTypeLike = "float32") -> dict[str, Tensor]:
    """Return the weights whose values published tensors encode, under the names and with the shapes of the source tensors.

    A weight is the product of its code and its scale, rounded once to `dtype`. If the recipe gives scales the type of the weights, they
    are rounded to `dtype` first. As bfloat16 this is what transformers computes with.

    Raise `TensorMissing` or `ShapeMismatch` if the tensors are not those that the layout describes.

    Parameters
    ----------
    state
        The published tensors.
    layout
        The layout of the model. The types of its source tensors do not matter.
    dtype
        The type of all floating-point tensors of the result.
    """
    return {name: dequantised_source(state, layout, name, dtype) for name in layout.specs}


def dequantised_source(state: State, layout: QuantisedLayout, name: str, dtype: DTypeLike = "float32") -> NDArray[Any]:
    """Return the values that published tensors encode, for one source tensor. The rest is as for `dequantise_state`."""
    to = wire_dtype(dtype).numpy
    weights = layout.weights_of_source.get(name)
    if weights is None:
        kept = _array(state, name)
        return kept.astype(to) if tensor_bits(name, kept).dtype in _FLOATS else kept
    is_transposed = weights[0].is_transposed
    shape = layout.specs[name].shape
    shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    whole = np.empty(shape, to)
    rows = whole.reshape(-1, shape[-1])
    for weight in weights:
        rows[weight.first_row : weight.first_row + weight.rows] = _dequantised_rows(state, layout, weight, wire_dtype(dtype))
    return whole.swapaxes(-1, -2) if is_transposed else whole


def dequantised_rows(state: State, layout: QuantisedLayout, weight: QuantisedWeight) -> NDArray[np.float32]:
    """Return one weight as float32, from the published tensors."""
    return _dequantised_rows(state, layout, weight, dtype_named("F32"))


def _dequantised_rows(state: State, layout: QuantisedLayout, weight: QuantisedWeight, dtype: DType) -> NDArray[np.float32]:
    arrays = {role: _array(state, weight.outputs[role]) for role in ("codes", "scale", "global_scale") if role in weight.outputs}
    for role, array in arrays.items():
        wanted = layout.outputs[weight.outputs[role]].shape
        if array.shape != wanted:
            raise ShapeMismatch(f"tensor {weight.outputs[role]!r} has shape {array.shape}, but recipe {layout.recipe} makes {wanted}.")
    codes, scale = arrays["codes"], arrays["scale"]
    if layout.recipe.scale_dtype(dtype) == dtype:
        scale = scale.astype(dtype.numpy)
    if layout.is_gpt_oss:
        codes, scale = codes.reshape(weight.rows, -1), scale.reshape(weight.rows, -1)
    return decode_codes(layout.recipe, codes, Scales(scale, arrays.get("global_scale")))


@exactly
def decode_codes(recipe: Recipe, codes: NDArray[Any], scales: Scales, first_row: int = 0) -> NDArray[np.float32]:
    """Return the weights of packed codes, as float32. The parameters are those of `encode_codes`."""
    if recipe.element == "e4m3":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif recipe.element == "e2m1":
        pairs = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        values = _E2M1[pairs].reshape(codes.shape[0], -1)
    else:
        unsigned = codes.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
        values = (unsigned.astype(np.int32) - 8).reshape(codes.shape[0], -1).astype(np.float32)
    return np.asarray(values * per_element(recipe, divisors(recipe, scales), values.shape, first_row), np.float32)


def _array(state: State, name: str) -> NDArray[Any]:
    if name not in state:
        raise TensorMissing(f"tensor {name!r} is missing in the published tensors.")
    tensor = tensor_bits(name, state[name])
    found: NDArray[Any] = typed(np.ascontiguousarray(copied_to_host(tensor.bits)), tensor.dtype)
    return found

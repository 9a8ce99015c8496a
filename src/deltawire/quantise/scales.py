"""Scales: fresh ones from the largest values of the blocks, and the rule by which the previous ones stay.

All functions round exactly as compressed-tensors does: in the type of the weight (`source`), once per operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..codec.bits import copied_to_host
from ..dtypes import DType
from ..tensors.bits import State, tensor_bits
from .exact_arithmetic import exactly
from .recipe import Recipe

if TYPE_CHECKING:
    from .layout import QuantisedLayout, QuantisedWeight

Grid = NDArray[np.float32]
"""One number per block."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E4M3_LARGEST = 448.0
_E4M3_FITS_UP_TO = 464.0
_E2M1_FITS_UP_TO = 7.0
_NVFP4_RANGE = 448.0 * 6.0
_ZERO_E4M3 = np.float32(0.125)
"""The scale of nvfp4 for a block whose own scale rounds to 0."""
_LEAST_GLOBAL = np.float32(2.0**-117)
"""Every fresh global scale of nvfp4 is larger. With a smaller one, the quotient of a block's scale and this one could be infinite."""


class _Limits(NamedTuple):
    """The distance from 1 to the next number of a type, and the exponent of its smallest normal number."""

    epsilon: float
    exponent: int


_LIMITS = {"BF16": _Limits(2.0**-7, -126), "F16": _Limits(2.0**-10, -14), "F32": _Limits(2.0**-23, -126)}


class Scales(NamedTuple):
    """The scales of a weight, in the types and shapes in which they are published."""

    scale: NDArray[Any]
    """One per block."""
    global_scale: NDArray[np.float32] | None = None
    """For nvfp4: what the scales of the blocks were multiplied with, as an array of one element."""


@exactly
def choose_scales(recipe: Recipe, source: DType, maxima: Grid, previous: Scales | None = None, shared: float | None = None) -> Scales:
    """Return the scales for blocks with these largest magnitudes: previous ones where the sticky rule keeps them, else fresh ones.

    The rows of a grid are independent of each other, except that nvfp4 and fp8-tensor need `shared`. So a rank that holds some rows of
    blocks gets the same scales as one that holds them all.

    Parameters
    ----------
    recipe
        The recipe. If it is not sticky, `previous` is not used.
    source
        The type of the weight.
    maxima
        The largest magnitude of each block, from `block_maxima`.
    previous
        The scales of the same blocks in the version before.
    shared
        For nvfp4 and fp8-tensor: the largest magnitude among all weights that share the scale. By default, that of `maxima`.
    """
    if not recipe.sticky:
        previous = None
    largest = np.asarray(maxima.max() if shared is None else shared, np.float32)
    if recipe.name == "nvfp4":
        return _nvfp4(source, maxima, previous, largest)
    if recipe.name == "fp8-tensor":
        maxima = np.broadcast_to(largest, (1,))
    fresh = _fresh(recipe, source, maxima)
    if previous is None:
        return Scales(fresh)
    return Scales(np.where(_stays(recipe, source, maxima, fresh, previous.scale), previous.scale, fresh))


def numbers_of(recipe: Recipe, scale: NDArray[Any]) -> NDArray[np.float64]:
    """Return published scales as numbers. Those of mxfp4 are exponents."""
    if recipe.name == "mxfp4":
        return np.ldexp(1.0, scale.astype(np.int32) - 127)
    return scale.astype(np.float64)


def _fresh(recipe: Recipe, source: DType, maxima: Grid) -> NDArray[Any]:
    if recipe.name == "mxfp4":
        return _mxfp4_exponents(source, maxima)
    if recipe.name == "fp8-block":
        scale = maxima / np.float32(recipe.largest)
        if recipe.scale == "ue8m0":
            scale = _power_of_two_above(scale)
        return np.where((maxima == 0) | (scale == 0), np.float32(1), scale)
    scale = _in(source, maxima / np.float32(recipe.largest))
    return np.where(scale == 0, np.asarray(_LIMITS[source.name].epsilon, source.numpy), scale)


def _stays(recipe: Recipe, source: DType, maxima: Grid, fresh: NDArray[Any], previous: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which scales of blocks stay."""
    old, new = numbers_of(recipe, previous), numbers_of(recipe, fresh)
    fits = quotients(recipe, source, maxima, old.astype(np.float32)) <= recipe.fits_up_to
    found = _rule(old, new, maxima == 0, fits, 2 * new >= old)
    if recipe.scale == "ue8m0":
        found &= np.frexp(old)[0] == 0.5
    if recipe.name == "mxfp4":
        found &= previous != 255
    return found


def _rule(
    old: NDArray[Any], new: NDArray[Any], is_zero: NDArray[np.bool_], fits: NDArray[np.bool_], is_near: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """The sticky rule: tell which of the old scales stay. A scale that is not a positive number never stays."""
    return np.asarray(np.isfinite(old) & (old > 0) & (is_zero | (old == new) | (fits & is_near)))


def quotients(recipe: Recipe, source: DType, values: NDArray[Any], scale: NDArray[np.float32]) -> Grid:
    """Return values divided by their scale, rounded as for the codes. Both are given as float32."""
    found: Grid = np.asarray(values, np.float32) / scale
    if recipe.name in ("fp8-block", "nvfp4"):
        return found
    return np.asarray(_in(source, found), np.float32)


def _in(source: DType, values: NDArray[Any]) -> NDArray[Any]:
    """Round float32 to the type of the weight. A quotient of two numbers of that type is rounded as if it had been exact."""
    return np.asarray(values).astype(source.numpy)


def _power_of_two_above(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the smallest normal power of two that is not below each scale."""
    fraction, exponent = np.frexp(scale)
    return np.asarray(np.ldexp(np.float32(1), np.maximum(np.where(fraction == 0.5, exponent - 1, exponent), -126)), np.float32)


def _mxfp4_exponents(source: DType, maxima: Grid) -> NDArray[np.uint8]:
    """Return the biased exponents: a largest value of 1.75 to 3.5 times 2**k has the scale 2**(k - 1), so that it becomes 3.5 to 7.

    Values below the normal numbers of the weight's type count as zero.
    """
    fraction, exponent = np.frexp(maxima.astype(np.float64))  # 0.5 <= fraction < 1
    power = np.where(fraction >= 0.875, exponent, exponent - 1)
    is_zero = (maxima == 0) | (power < _LIMITS[source.name].exponent)
    lowest = 127 if source.name == "F16" else 0
    return np.where(is_zero, lowest, np.clip(power - 2 + 127, 0, 254)).astype(np.uint8)


def _nvfp4(source: DType, maxima: Grid, previous: Scales | None, largest: NDArray[np.float32]) -> Scales:
    global_scale = _nvfp4_global(source, largest)
    if previous is None or previous.global_scale is None:
        return Scales(_nvfp4_blocks(source, maxima, global_scale), global_scale)
    old = previous.global_scale
    fits = (old * _in(source, largest / np.float32(6)).astype(np.float32)) <= _E4M3_FITS_UP_TO
    stays = _rule(old, global_scale, largest == 0, fits, global_scale.astype(np.float64) <= 2 * old.astype(np.float64))
    if not (stays & (old >= _LEAST_GLOBAL)).all():
        return Scales(_nvfp4_blocks(source, maxima, global_scale), global_scale)
    fresh = _nvfp4_blocks(source, maxima, old)
    before, now = previous.scale.astype(np.float32), fresh.astype(np.float32)
    stays = _rule(before, now, maxima == 0, maxima / (before / old) <= _E2M1_FITS_UP_TO, 2 * now >= before)
    return Scales(np.where(stays, previous.scale, fresh), old)


def _nvfp4_global(source: DType, largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the factor that brings the largest scale to 448. If it overflows the weight's type, it is 1."""
    at_least = np.maximum(largest, np.float32(2.0 ** _LIMITS[source.name].exponent))
    inverse = _in(source, np.float32(1) / at_least).astype(np.float32)
    found = _in(source, inverse * np.float32(_NVFP4_RANGE)).astype(np.float32)
    return np.where(np.isfinite(found), found, np.float32(1)).reshape(1)


def _nvfp4_blocks(source: DType, maxima: Grid, global_scale: NDArray[np.float32]) -> NDArray[Any]:
    local = global_scale * _in(source, maxima / np.float32(6)).astype(np.float32)
    rounded = np.clip(local, -_E4M3_LARGEST, _E4M3_LARGEST).astype(_E4M3).astype(np.float32)
    return np.where(rounded == 0, _ZERO_E4M3, rounded).astype(_E4M3)


def previous_scales(layout: QuantisedLayout, weight: QuantisedWeight, previous: State | None) -> Scales | None:
    """Return the scales that may stay: None if the recipe is not sticky, or as `published_scales` does."""
    return None if previous is None or not layout.recipe.sticky else published_scales(layout, weight, previous)


def published_scales(layout: QuantisedLayout, weight: QuantisedWeight, published: State) -> Scales | None:
    """Return the scales that a weight has in published tensors; None if they are missing, or have another type or shape."""
    found: dict[str, NDArray[Any]] = {}
    for role in ("scale", "global_scale"):
        if role not in weight.outputs:
            continue
        output = layout.outputs[weight.outputs[role]]
        if output.name not in published:
            return None
        tensor = tensor_bits(output.name, published[output.name])
        if tensor.dtype != output.dtype or tensor.shape != output.shape:
            return None
        found[role] = np.ascontiguousarray(copied_to_host(tensor.bits)).view(output.dtype.numpy)
    scale = found["scale"].reshape(-1, found["scale"].shape[-1]) if layout.is_gpt_oss else found["scale"]
    return Scales(scale, found.get("global_scale"))

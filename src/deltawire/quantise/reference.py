"""The definition of the recipes, in NumPy: the largest value of each block, and the codes of weights for given scales.

With `choose_scales` these are the three steps of quantising. Native code and GPU code give the same bytes.

A weight is given as rows: all of them, or a range that begins at `first_row` of the weight, so that ranks can work on shards.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..dtypes import dtype_of_numpy
from ..errors import NonFiniteWeights
from .exact_arithmetic import exactly
from .recipe import Recipe
from .scales import Grid, Scales, numbers_of, quotients

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""The values halfway between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""

NONFINITE_HINT = (
    "Find the training step that made them, and go back to a checkpoint from before it. Only a publisher that does not quantise "
    "publishes such weights."
)


@exactly
def block_maxima(recipe: Recipe, weight: NDArray[Any], first_row: int = 0, name: str = "") -> Grid:
    """Return the largest magnitude of each block that has rows in `weight`.

    Raise `NonFiniteWeights` if an element is NaN or infinite. Where two ranks hold rows of one block, the maximum of both is that of the
    block.

    Parameters
    ----------
    recipe
        The recipe.
    weight
        Rows of the weight: float32, bfloat16 or float16.
    first_row
        The number of the first of these rows in the weight.
    name
        The name of the weight, for the error.
    """
    rows, columns = weight.shape
    height, width = recipe.block
    magnitudes = np.abs(weight.astype(np.float32))
    found = magnitudes if width == 1 else np.maximum.reduceat(magnitudes, np.arange(0, columns, width or columns), axis=1)
    if height is None or height > 1:
        starts = [0] if height is None else [0, *range(height - first_row % height, rows, height)]
        found = np.maximum.reduceat(found, starts, axis=0)
    if not np.isfinite(found).all():
        raise nonfinite_weight(name, int(np.count_nonzero(~np.isfinite(magnitudes))))
    return found


def nonfinite_weight(name: str, count: int) -> NonFiniteWeights:
    """Return the error for a weight with `count` elements that are NaN or infinite."""
    what = "1 element is" if count == 1 else f"{count} elements are"
    return NonFiniteWeights(f"weight {name!r} cannot be quantised: {what} NaN or infinite.", hint=NONFINITE_HINT)


@exactly
def encode_codes(recipe: Recipe, weight: NDArray[Any], scales: Scales, first_row: int = 0) -> NDArray[Any]:
    """Return the codes of rows of a weight, packed as they are published: e4m3, two e2m1 in a byte, or eight integers in an int32.

    Parameters
    ----------
    recipe
        The recipe.
    weight
        Rows of the weight.
    scales
        The scales of the blocks that have rows in `weight`.
    first_row
        The number of the first of these rows in the weight.
    """
    scale = per_element(recipe, divisors(recipe, scales), weight.shape, first_row)
    values = quotients(recipe, dtype_of_numpy(weight.dtype), weight.astype(np.float32), scale) + np.float32(0)  # -0.0 becomes 0.0
    if recipe.element == "e4m3":
        codes: NDArray[Any] = np.clip(values, -448, 448).astype(_E4M3)
        return codes
    if recipe.element == "int4":
        return _pack_int4(np.rint(np.clip(values, -8, 7)).astype(np.int32))
    return _pack_e2m1(values)


@exactly
def divisors(recipe: Recipe, scales: Scales) -> Grid:
    """Return what the weights of each block are divided by, as float32."""
    found = numbers_of(recipe, scales.scale).astype(np.float32)
    return found if scales.global_scale is None else found / scales.global_scale


def per_element(recipe: Recipe, grid: Grid, shape: tuple[int, ...], first_row: int = 0) -> Grid:
    """Return the number of the block of each element, in a form that broadcasts to rows of this shape."""
    height, width = recipe.block
    rows, columns = shape
    if recipe.name == "fp8-tensor":
        return grid.reshape(1, 1)
    if height is not None and height > 1:
        grid = np.repeat(grid, height, axis=0)[first_row % height :][:rows]
    return grid if width is None else np.repeat(grid, width, axis=1)[:, :columns]


def _pack_int4(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    rows, columns = codes.shape
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    unsigned = (codes + 8).astype(np.uint32).reshape(rows, columns // 8, 8)
    return np.asarray(np.bitwise_or.reduce(unsigned << shifts, axis=2).view(np.int32))


def _pack_e2m1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to the nearest magnitude; halfway values go to the one with an even code, as in IEEE 754."""
    magnitudes = np.abs(values)
    codes = np.searchsorted(_E2M1_BOUNDS, magnitudes, side="left").astype(np.uint8)
    at_odd_bound = (codes < 7) & (codes % 2 == 1) & (magnitudes == _E2M1_BOUNDS[np.minimum(codes, 6)])
    codes += at_odd_bound.astype(np.uint8)
    codes |= np.where(np.signbit(values), np.uint8(8), np.uint8(0))
    return np.asarray(codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)))

"""A table of weights, as native code and kernels read it."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DType
from .recipe import Recipe

_KINDS: Final = {"fp8-block": 0, "fp8-block-ue8m0": 1, "fp8-channel": 2, "fp8-tensor": 3, "nvfp4": 4, "mxfp4": 5, "int4": 6, "int4-128": 6}
_SOURCES: Final = {"F32": 0, "BF16": 1, "F16": 2}


def kind_number(recipe: Recipe) -> int:
    """Return the number of a recipe in native/quantise.hpp and in quantise.cuh."""
    return _KINDS[recipe.spelling]


def source_number(dtype: DType) -> int:
    """Return the number of a weight's type there."""
    return _SOURCES[dtype.name]


class WeightTable(NamedTuple):
    """Weights as columns of numbers, one entry for each weight. Addresses of outputs that a recipe does not have are 0."""

    data: NDArray[np.uint64]
    """The address of the first row. The elements of a row follow each other."""
    strides: NDArray[np.int64]
    """The bytes from one row to the next."""
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    sources: NDArray[np.uint8]
    """The type of the weight: `source_number`."""
    codes: NDArray[np.uint64]
    """The address of the codes, which are written."""
    scales: NDArray[np.uint64]
    """The address of the scales, which are written."""
    globals: NDArray[np.uint64]
    """The address of nvfp4's global scale, which is written."""
    previous: NDArray[np.uint64]
    """The address of the scales of the version before; 0 for fresh ones. It may be equal to `scales`."""
    previous_globals: NDArray[np.uint64]
    """The address of the global scale of the version before."""
    groups: NDArray[np.int64]
    """Weights with equal numbers share a scale, for nvfp4 and fp8-tensor. The numbers are below the number of weights."""

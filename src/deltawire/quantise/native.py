"""Quantising in C++ (`native/quantise.cpp`), for one instruction set. It gives the same bytes as the reference, without the GIL."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import _native
from .recipe import Recipe
from .reference import divisors, nonfinite_weight
from .scales import Grid, Scales

_KINDS: Final = {"fp8-block": 0, "fp8-block-ue8m0": 1, "fp8-channel": 2, "fp8-tensor": 3, "nvfp4": 4, "mxfp4": 5, "int4": 6, "int4-128": 6}
"""The numbers of the recipes in native/quantise.hpp, by their spelling."""

_SOURCES: Final = {"F32": 0, "BF16": 1, "F16": 2}
"""The numbers of the types of weights there."""

_NUMPY_SOURCES: Final = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float16): 2}
_CODES: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e2m1": np.dtype(np.uint8), "int4": np.dtype(np.int32)}


def source_number(name: str) -> int:
    """Return the number of a weight's type in native code and in kernels."""
    return _SOURCES[name]


def kind_number(recipe: Recipe) -> int:
    """Return the number of a recipe in native code and in kernels."""
    return _KINDS[recipe.spelling]


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


class NativeQuantiser:
    """A `Quantiser` in C++.

    Parameters
    ----------
    threads
        The number of threads.
    isa
        The instruction set to use; by default the best one of this machine.
    """

    def __init__(self, threads: int = 1, isa: str | None = None) -> None:
        self._threads = threads
        self._isa = isa or _native.instruction_sets()[0]

    def block_maxima(self, recipe: Recipe, weight: NDArray[Any], first_row: int = 0, name: str = "") -> Grid:
        rows = _rows(weight)
        found = np.empty(_grid(recipe, rows, first_row), np.float32)
        _native.block_maxima(*self._arguments(recipe, rows, first_row), found, self._threads, self._isa)
        if not np.isfinite(found).all():
            raise nonfinite_weight(name, nonfinite_elements(weight))
        return found

    def encode_codes(self, recipe: Recipe, weight: NDArray[Any], scales: Scales, first_row: int = 0) -> NDArray[Any]:
        rows = _rows(weight)
        by = np.ascontiguousarray(divisors(recipe, scales).reshape(_grid(recipe, rows, first_row)))
        dtype = _CODES[recipe.element]
        per_byte = 1 if recipe.element == "e4m3" else 2
        codes = np.empty((rows.shape[0], rows.shape[1] // per_byte), np.uint8)
        _native.encode_codes(*self._arguments(recipe, rows, first_row), by, codes.reshape(-1), self._threads, self._isa)
        return codes.view(dtype)

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None:
        """Quantise many weights: choose their scales, and write scales and codes.

        Return the number of a weight that has an element that is NaN or infinite, or None. Then the outputs are undefined.

        Parameters
        ----------
        recipe
            The recipe. The caller does not pass previous scales if it is not sticky.
        weights
            The weights. The caller keeps the memory alive, and has checked all sizes.
        """
        return _native.quantise(_KINDS[recipe.spelling], recipe.group_size or 0, *weights, self._threads, self._isa)

    def _arguments(self, recipe: Recipe, rows: NDArray[Any], first_row: int) -> tuple[int, int, int, int, int, int, int, int]:
        return (
            _KINDS[recipe.spelling],
            recipe.group_size or 0,
            rows.ctypes.data,
            rows.strides[0],
            rows.shape[0],
            rows.shape[1],
            _NUMPY_SOURCES[rows.dtype],
            first_row % 128,
        )


def nonfinite_elements(weight: NDArray[Any]) -> int:
    """Return how many elements are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(weight.astype(np.float32))))


def _rows(weight: NDArray[Any]) -> NDArray[Any]:
    """Return a weight whose elements of a row follow each other, at addresses that are multiples of their size."""
    if weight.strides[1] == weight.itemsize and weight.flags.aligned:
        return weight
    return np.ascontiguousarray(weight)


def _grid(recipe: Recipe, rows: NDArray[Any], first_row: int) -> tuple[int, int]:
    height = recipe.block.rows
    return recipe.block.grid(rows.shape[0] + (first_row % height if height else 0), rows.shape[1])

"""Quantising in C++ (`native/quantise.cpp`), for one instruction set. It gives the same bytes as the reference, without the GIL."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import _native
from .recipe import Recipe
from .reference import divisors, nonfinite_weight
from .scales import Grid, Scales
from .weight_table import WeightTable, kind_number

_NUMPY_SOURCES: Final = {np.dtype(np.float32): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float16): 2}
_CODES: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e2m1": np.dtype(np.uint8), "int4": np.dtype(np.int32)}


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
        self.threads = threads
        self._isa = isa or _native.instruction_sets()[0]

    def block_maxima(self, recipe: Recipe, weight: NDArray[Any], first_row: int = 0, name: str = "") -> Grid:
        rows = _rows(weight)
        found = np.empty(_grid(recipe, rows, first_row), np.float32)
        _native.block_maxima(*self._arguments(recipe, rows, first_row), found, self.threads, self._isa)
        if not np.isfinite(found).all():
            raise nonfinite_weight(name, nonfinite_elements(weight))
        return found

    def encode_codes(self, recipe: Recipe, weight: NDArray[Any], scales: Scales, first_row: int = 0) -> NDArray[Any]:
        rows = _rows(weight)
        by = np.ascontiguousarray(divisors(recipe, scales).reshape(_grid(recipe, rows, first_row)))
        dtype = _CODES[recipe.element]
        per_byte = 1 if recipe.element == "e4m3" else 2
        codes = np.empty((rows.shape[0], rows.shape[1] // per_byte), np.uint8)
        _native.encode_codes(*self._arguments(recipe, rows, first_row), by, codes.reshape(-1), self.threads, self._isa)
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
        return _native.quantise(kind_number(recipe), recipe.group_size or 0, *weights, self.threads, self._isa)

    def start(self, recipe: Recipe, weights: WeightTable, *, keeps_codes: bool) -> _native.Quantisation | None:
        """Return what quantises many weights: right before their codes are encoded, or when `finish` is called.

        Encoding writes all scales. Returns None if the extension was built before it had this class, as in a source tree after an update.

        Parameters
        ----------
        recipe
            As for `quantise_weights`.
        weights
            As for `quantise_weights`.
        keeps_codes
            Whether encoding writes the codes, too. Otherwise only `finish` does.
        """
        if not hasattr(_native, "Quantisation"):
            return None
        return _native.Quantisation(kind_number(recipe), recipe.group_size or 0, *weights, keeps_codes, self._isa)

    def _arguments(self, recipe: Recipe, rows: NDArray[Any], first_row: int) -> tuple[int, int, int, int, int, int, int, int]:
        return (
            kind_number(recipe),
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

"""Measures how much quantising changes the weights, and how much of that is due to scales that stayed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..codec.bits import copied_to_host
from ..dtypes import DType
from ..errors import TensorMissing
from ..tensors.bits import State, tensor_bits, typed
from .dequantise import dequantised_rows
from .layout import QuantisedLayout, QuantisedWeight
from .quantise import rows_of
from .reference import divisors
from .scales import published_scales


@dataclass(frozen=True)
class QuantisationError:
    """The error of a quantised state against its weights."""

    relative_error: float
    """The root of the mean squared error of all quantised weights, divided by the root of their mean square."""
    fresh_relative_error: float
    """The same with fresh scales."""
    scales: int
    """The number of scales."""
    wider_scales: int
    """The number of them that are wider than fresh ones would be."""
    widest: float
    """The width of the widest scale, as a multiple of a fresh one."""


def quantisation_error(layout: QuantisedLayout, state: State, published: State) -> QuantisationError:
    """Measure the error of published tensors against the weights that they were made from, and the error that fresh scales would make.

    It quantises all weights once more, so it takes longer than publishing them.

    Parameters
    ----------
    layout
        The layout of the state.
    state
        The weights.
    published
        The tensors that were published for them.
    """
    anew = QuantisedLayout.of(dataclasses.replace(layout.recipe, sticky=False), layout.specs)
    squares, errors, fresh_errors, scales, wider, widest = 0.0, 0.0, 0.0, 0, 0, 1.0
    for unit in anew.units:
        weights = {output.weight.module: output.weight for name in unit if (output := anew.outputs[name]).weight is not None}
        if not weights:
            continue
        fresh = anew.quantise(unit, state)
        for weight in weights.values():
            exact = _exact(weight, state, weight.dtype)
            squares += float(np.square(exact).sum())
            errors += float(np.square(dequantised_rows(published, layout, weight) - exact).sum())
            fresh_errors += float(np.square(dequantised_rows(fresh, anew, weight) - exact).sum())
            ratio = _widths(layout, weight, published) / _widths(anew, weight, fresh)
            scales += ratio.size
            wider += int(np.count_nonzero(ratio > 1))
            widest = max(widest, float(ratio.max()))
    norm = squares or 1.0
    return QuantisationError((errors / norm) ** 0.5, (fresh_errors / norm) ** 0.5, scales, wider, widest)


def _exact(weight: QuantisedWeight, state: State, dtype: DType) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    bits = tensor_bits(weight.source, state[weight.source]).bits
    return rows_of(weight, typed(copied_to_host(bits), dtype)).astype(np.float64)


def _widths(layout: QuantisedLayout, weight: QuantisedWeight, state: State) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    found = published_scales(layout, weight, state)
    if found is None:
        raise TensorMissing(f"the published tensors do not hold the scales of {weight.module!r}.")
    return divisors(layout.recipe, found).astype(np.float64)

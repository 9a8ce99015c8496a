"""The reference of single weights, and what sources they need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deltawire.quantise.scales as scales_module
from deltawire.dtypes import DType, dtype_of_numpy
from deltawire.quantise import QuantisedLayout, Recipe
from deltawire.quantise.exact_arithmetic import exactly
from deltawire.quantise.reference import block_maxima, encode_codes
from deltawire.quantise.scales import Grid, Scales, choose_scales, numbers_of


def quantise_weight(recipe: Recipe, weight: NDArray[Any], previous: Scales | None = None, name: str = "") -> tuple[NDArray[Any], Scales]:
    """Return the codes and the scales of a whole weight that shares no scale with others. `previous` are those of the version before."""
    maxima = block_maxima(recipe, weight, name=name)
    scales = choose_scales(recipe, dtype_of_numpy(weight.dtype), maxima, previous)
    return encode_codes(recipe, weight, scales), scales


@exactly
def width_ratio(recipe: Recipe, source: DType, maxima: Grid, scales: Scales) -> NDArray[np.float64]:
    """Return how many times as wide as fresh ones the scales of the blocks are. Fresh scales of nvfp4 have the same global scale.

    A block of zeros has ratio 1.
    """
    if recipe.name == "nvfp4":
        assert scales.global_scale is not None
        fresh: NDArray[Any] = scales_module._nvfp4_blocks(source, maxima, scales.global_scale)
    else:
        fresh = scales_module._fresh(recipe, source, maxima)
    ratio = numbers_of(recipe, scales.scale) / numbers_of(recipe, fresh)
    return np.where(maxima > 0, ratio, 1.0)


def source_names(layout: QuantisedLayout, names: Iterable[str]) -> set[str]:
    """Return the names of the source tensors that are needed to make outputs, including weights that share a scale with them."""
    found: set[str] = set()
    for name in names:
        weight = layout.output(name).weight
        if weight is None:
            found.add(name)
        elif layout.recipe.shares_scales:
            found.update(other.source for other in layout.groups[weight.group])
        else:
            found.add(weight.source)
    return found

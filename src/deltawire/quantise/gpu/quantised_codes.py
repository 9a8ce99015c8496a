"""Codes that are not written anywhere: the codec's kernels quantise weights as they read them, with scales that are chosen before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...codec.bits import QuantisedBits
from ...tensors.bits import State, tensor_bits
from ..layout import QuantisedLayout, QuantisedWeight
from ..recipe import Recipe
from ..weight_table import WeightTable
from ..whole_weights import WholeWeights, with_groups
from .quantiser import GpuQuantiser

_ALIGNMENT = 16
_VECTOR = 8
"""The number of columns is a multiple of this."""


class _ScaleQuantiser(GpuQuantiser):
    """Chooses scales only."""

    def quantise_weights(self, recipe: Recipe, weights: WeightTable) -> int | None:
        return self.start(recipe, weights, makes_codes=False).first_nonfinite()


def can_be_quantised_as_read(weight: QuantisedWeight, state: State) -> bool:
    """Tell whether the codec's kernels can quantise a weight where it is."""
    source = tensor_bits(weight.source, state[weight.source])
    first = source.address + weight.first_row * weight.columns * weight.dtype.itemsize
    return not weight.is_transposed and weight.columns % _VECTOR == 0 and source.is_contiguous and first % _ALIGNMENT == 0


def quantised_codes(
    layout: QuantisedLayout, weights: Iterable[QuantisedWeight], state: State, previous: State | None, device: torch.device
) -> dict[str, Any]:
    """Choose the scales of weights on a GPU. Return them as tensors, and `QuantisedBits` that stand for the codes, by name.

    The weights, and all that share a scale with them, must be such that `can_be_quantised_as_read`. They must not change before the codes
    are encoded. Raise as `QuantisedLayout.quantise` does.

    Parameters
    ----------
    layout
        The layout.
    weights
        The weights.
    state
        Their sources.
    previous
        The tensors that were published last, for their scales.
    device
        The GPU that the weights are on.
    """
    whole = WholeWeights(layout, with_groups(layout, weights))
    found = whole.quantise(_ScaleQuantiser(device), lambda name: tensor_bits(name, state[name]), previous, {}, device, makes_codes=False)
    assert any(isinstance(bits, QuantisedBits) for bits in found.values()) or not found
    return found

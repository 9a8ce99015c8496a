"""The weights that an engine computes with when it serves a quantised policy, computed by torch operations on any device.

They are those of `dequantise_state(quantise_state(…))` as bfloat16, bit for bit, with scales that stay and with fresh ones
(tests/rl/test_quantised_policy.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from deltawire.quantise import QuantisedLayout, QuantisedWeight, Recipe

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EPSILON = 2.0**-23


class Numbers(NamedTuple):
    """The scales of a weight as float32 numbers: one for each block, and for nvfp4 the global one."""

    scale: torch.Tensor
    whole: torch.Tensor | None = None


Kept = dict[str, Numbers]
"""The scales of the version before, by weight."""


def copy_served(
    layout: QuantisedLayout, weights: dict[str, torch.Tensor], served: dict[str, torch.Tensor], kept: Kept | None = None
) -> None:
    """Write the values of the quantised weights into `served`, which has the same names. `weights` are float32.

    If the recipe is sticky, scales in `kept` stay where they can, and the new ones are written to it.
    """
    for name, weight in weights.items():
        if name not in layout.weights_of_source:
            served[name].copy_(weight)
    for weight in layout.weights:
        shared = None
        if layout.recipe.shares_scales:
            shared = torch.stack([weights[other.source].abs().max() for other in layout.groups[weight.group]]).max()
        values = weights[weight.source]
        tall, wide, largest = _blocks(layout.recipe, weight, values, shared)
        previous = kept.get(weight.source) if kept is not None and layout.recipe.sticky else None
        scales = _choose(layout.recipe, largest, shared, previous)
        if kept is not None:
            kept[weight.source] = scales
        served[weight.source].copy_(_served(layout.recipe, values, scales, tall, wide))


def _blocks(recipe: Recipe, weight: QuantisedWeight, values: torch.Tensor, shared: torch.Tensor | None) -> tuple[int, int, torch.Tensor]:
    """Return the rows and columns of a block, and the largest magnitude of each."""
    if (weight.first_row, weight.rows, weight.is_transposed) != (0, values.shape[0], False):
        raise NotImplementedError(f"{weight.source!r} holds several weights")
    rows, columns = values.shape
    if recipe.name == "fp8-tensor":
        assert shared is not None
        return rows, columns, shared.reshape(1, 1)
    tall, wide = recipe.block.rows or rows, recipe.block.columns or columns
    grid_rows, grid_columns = recipe.block.grid(rows, columns)
    padded = pad(values.abs(), (0, grid_columns * wide - columns, 0, grid_rows * tall - rows))
    return tall, wide, padded.reshape(grid_rows, tall, grid_columns, wide).amax((1, 3))


def _served(recipe: Recipe, values: torch.Tensor, scales: Numbers, tall: int, wide: int) -> torch.Tensor:
    rows, columns = values.shape
    divisor = scales.scale if scales.whole is None else scales.scale / scales.whole
    factor = divisor
    if recipe.name in ("fp8-channel", "fp8-tensor", "int4"):
        factor = divisor.bfloat16().float()  # the scales have the type of the weights, and engines round them to their own
    divisor, factor = (
        each.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns] if each.numel() > 1 else each
        for each in (divisor, factor)
    )
    quotient = values / divisor + 0.0
    return (_nearest(recipe.element, quotient) * factor).bfloat16()


def _choose(recipe: Recipe, largest: torch.Tensor, shared: torch.Tensor | None, previous: Numbers | None) -> Numbers:
    """Return the scales, as `deltawire.quantise.scales.choose_scales` does for weights in float32."""
    if recipe.name == "nvfp4":
        assert shared is not None
        return _nvfp4(largest, shared, previous)
    fresh = _fresh(recipe, largest)
    if previous is None:
        return Numbers(fresh)
    return Numbers(_stay(previous.scale, fresh, largest == 0, largest / previous.scale <= recipe.fits_up_to))


def _stay(old: torch.Tensor, fresh: torch.Tensor, is_zero: torch.Tensor, fits: torch.Tensor) -> torch.Tensor:
    """Return the old scales where they stay, and fresh ones elsewhere. Old ones are positive."""
    return torch.where(is_zero | (fits & (2 * fresh >= old)), old, fresh)


def _fresh(recipe: Recipe, largest: torch.Tensor) -> torch.Tensor:
    if recipe.name == "mxfp4":
        fraction, exponent = torch.frexp(largest.double())
        power = torch.where(fraction >= 0.875, exponent, exponent - 1)
        biased = torch.where((largest == 0) | (power < -126), 0, (power + 125).clamp(0, 254))
        return torch.pow(2.0, (biased - 127).double()).float()
    scale = _over(largest, recipe.largest)
    if recipe.name == "fp8-block":
        if recipe.scale == "ue8m0":
            fraction, exponent = torch.frexp(scale.double())
            power = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(min=-126)
            scale = torch.pow(2.0, power.double()).float()
        return torch.where(largest == 0, 1.0, scale)
    return torch.where(scale == 0, _EPSILON, scale)


def _nvfp4(largest: torch.Tensor, shared: torch.Tensor, previous: Numbers | None) -> Numbers:
    whole = (1.0 / shared.clamp(min=2.0**-126)) * 2688.0
    if previous is None or previous.whole is None:
        return Numbers(_e4m3_scales(largest, whole), whole)
    old = previous.whole
    stays = (shared == 0) | (old == whole) | ((old * _over(shared, 6.0) <= 464.0) & (whole <= 2 * old))
    fresh = _e4m3_scales(largest, torch.where(stays, old, whole))
    kept = _stay(previous.scale, fresh, largest == 0, largest / (previous.scale / old) <= 7.0)
    return Numbers(torch.where(stays, kept, fresh), torch.where(stays, old, whole))


def _e4m3_scales(largest: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    block = (whole * _over(largest, 6.0)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.where(block == 0, 0.125, block)


def _over(values: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a number. Without a tensor of it, CUDA multiplies by its reciprocal, which rounds differently."""
    return values / values.new_tensor(number)


def _nearest(element: str, quotient: torch.Tensor) -> torch.Tensor:
    """Return the value of the nearest code. Ties go to the even code."""
    if element == "e4m3":
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    if element == "int4":
        return quotient.round().clamp(-8, 7) + 0.0
    magnitude = quotient.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, quotient)


def named(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}

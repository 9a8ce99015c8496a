"""The weights that an engine computes with when it serves a quantised policy, computed by torch operations on any device.

They are those of `dequantise_state(quantise_state(…))` with fresh scales, as bfloat16, bit for bit (tests/rl/test_quantised_policy.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from deltawire.quantise import QuantisedLayout, QuantisedWeight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EPSILON = 2.0**-23


def copy_served(layout: QuantisedLayout, weights: dict[str, torch.Tensor], served: dict[str, torch.Tensor]) -> None:
    """Write the values of the quantised weights into `served`, which has the same names. `weights` are float32."""
    for name, weight in weights.items():
        if name not in layout.weights_of_source:
            served[name].copy_(weight)
    for weight in layout.weights:
        shared = None
        if layout.recipe.shares_scales:
            shared = torch.stack([weights[other.source].abs().max() for other in layout.groups[weight.group]]).max()
        served[weight.source].copy_(_served(layout, weight, weights[weight.source], shared))


def _served(layout: QuantisedLayout, weight: QuantisedWeight, values: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    recipe = layout.recipe
    if (weight.first_row, weight.rows, weight.is_transposed) != (0, values.shape[0], False):
        raise NotImplementedError(f"{weight.source!r} holds several weights")
    rows, columns = values.shape
    if recipe.name == "fp8-tensor":
        assert shared is not None
        largest = shared.reshape(1, 1)
        tall, wide = rows, columns
    else:
        tall, wide = recipe.block.rows or rows, recipe.block.columns or columns
        grid_rows, grid_columns = recipe.block.grid(rows, columns)
        padded = pad(values.abs(), (0, grid_columns * wide - columns, 0, grid_rows * tall - rows))
        largest = padded.reshape(grid_rows, tall, grid_columns, wide).amax((1, 3))
    divisor, factor = _scales(recipe.spelling, largest, shared)
    divisor, factor = (
        each.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns] if each.numel() > 1 else each
        for each in (divisor, factor)
    )
    quotient = values / divisor + 0.0
    return (_nearest(recipe.element, quotient) * factor).bfloat16()


def _scales(spelling: str, largest: torch.Tensor, shared: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what weights are divided by, and what codes are multiplied with."""
    if spelling == "fp8-block":
        scale = largest / 448.0
        scale = torch.where(scale == 0, 1.0, scale)
        return scale, scale
    if spelling == "mxfp4":
        fraction, exponent = torch.frexp(largest.double())
        power = torch.where(fraction >= 0.875, exponent, exponent - 1)
        biased = torch.where((largest == 0) | (power < -126), 0, (power + 125).clamp(0, 254))
        scale = torch.pow(2.0, (biased - 127).double()).float()
        return scale, scale
    if spelling == "nvfp4":
        assert shared is not None
        whole = (1.0 / shared.clamp(min=2.0**-126)) * 2688.0
        block = (whole * (largest / 6.0)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        scale = torch.where(block == 0, 0.125, block) / whole
        return scale, scale
    scale = largest / (7.5 if spelling.startswith("int4") else 448.0)
    scale = torch.where(scale == 0, _EPSILON, scale)
    return scale, scale.bfloat16().float()  # the scales have the type of the weights, and engines round them to their own


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

"""Why a recipe does not quantise a tensor, for messages."""

from __future__ import annotations

import heapq
import math

from ..format.bundle_names import MAIN, split_name
from . import experts
from .layout import QuantisedLayout, TensorSpec
from .modules import ModulePatterns


def largest_kept(layout: QuantisedLayout, count: int) -> list[tuple[str, str]]:
    """Return the names of the largest tensors that are not quantised, each with the reason.

    Parameters
    ----------
    layout
        The layout of the model.
    count
        How many tensors to return at most.
    """
    kept = [(name, spec) for name, spec in layout.specs.items() if name not in layout.weights_of_source]
    patterns = ModulePatterns(layout.recipe.ignore)
    largest = heapq.nlargest(count, kept, key=lambda each: math.prod(each[1].shape))
    return [(name, _reason(layout, name, spec, patterns)) for name, spec in largest]


def _reason(layout: QuantisedLayout, name: str, spec: TensorSpec, patterns: ModulePatterns) -> str:
    if split_name(name)[0] != MAIN:
        return "it is not in the main bundle"
    if not spec.dtype.name.startswith(("F", "BF")):
        return f"its type is {spec.dtype.name}"
    if experts.is_fused(name):
        dimensions, module = 3, name.rpartition(".")[0]
    elif name.endswith(".weight"):
        dimensions, module = 2, name.removesuffix(".weight")
    else:
        return "its name does not end in .weight"
    if len(spec.shape) != dimensions:
        return f"it has {len(spec.shape)} dimension{'' if len(spec.shape) == 1 else 's'}, not {dimensions}"
    pattern = patterns.first(module) or patterns.first(name)
    if pattern is not None:
        return f"the pattern {pattern!r} matches its layer"
    return "recipe mxfp4 quantises only the experts of gpt-oss" if layout.is_gpt_oss else "patterns in `ignore` match all of its experts"

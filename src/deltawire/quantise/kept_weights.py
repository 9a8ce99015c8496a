"""Why a recipe does not quantise a tensor, for messages."""

from __future__ import annotations

import contextlib
import heapq
import math

from ..errors import UnquantisableWeight
from ..format.bundle_names import MAIN, split_name
from . import experts
from .layout import QuantisedLayout, TensorSpec
from .modules import ModulePatterns
from .recipe import DEFAULT_IGNORE


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


def unmatched_patterns(layout: QuantisedLayout) -> list[str]:
    """Return the patterns of the recipe that match no layer of the model. The default patterns are left out.

    Parameters
    ----------
    layout
        The layout of the model.
    """
    given = [pattern for pattern in layout.recipe.ignore if pattern not in DEFAULT_IGNORE]
    if not given:
        return []
    modules = {weight.module for weight in layout.weights} | {*layout.kept_modules}
    for name in layout.specs:
        modules.add(name.rpartition(".")[0])
        if experts.is_fused(name) and len(layout.specs[name].shape) == 3:
            modules.add(name)
            with contextlib.suppress(UnquantisableWeight):  # the shapes of experts that are not quantised may be any
                modules |= {part for part, _, _ in experts.FusedExperts.of(name, layout.specs).parts()}
    return [pattern for pattern in given if not any(map(ModulePatterns([pattern]).match, modules))]


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

"""The recipe that made published tensors, as a reader may use it: without the patterns of the chain's record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..dtypes import dtype_named
from ..tensors.bits import State, tensor_bits
from .recipe import Recipe

if TYPE_CHECKING:
    from ..format.records.record_parts import RecipeRecord

NUMBERS = {dtype_named(name) for name in ("F16", "BF16", "F32")}
"""The types of published tensors that are weights themselves, not codes."""


def published_recipe(record: RecipeRecord, sources: Iterable[str], published: State) -> Recipe:
    """Return the recipe that made published tensors. It ignores modules by their names.

    A layer is ignored if the chain has its weight as floating-point numbers. The patterns in the chain's record are not used, because a
    regular expression from a bucket could take for ever.

    Raises `ValueError` if this release of deltawire does not know the recipe.

    Parameters
    ----------
    record
        How the chain says that the version was quantised.
    sources
        The names of the weights that are quantised, or of those that codes encode.
    published
        The published tensors.
    """
    kept = [name for name in sources if name in published and tensor_bits(name, published[name]).dtype in NUMBERS]
    options = {name: value for name, value in record.options.items() if name in ("scale", "group_size")}
    ignore = tuple(name.removesuffix(".weight") for name in kept)
    return Recipe(record.name, ignore=ignore, sticky=record.options.get("sticky") is not False, release=record.release, **options)

"""Finds out whether the tensors of a chain fit the model that a server has loaded, before anything is loaded from the chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...format.bundle_names import MAIN, split_name
from ...format.records.record_parts import RecipeRecord
from ...subscribe.tensor_table import TensorSpec, TensorTable

_MOST_NAMED = 3
"""A message names at most this many tensors."""
_LONGEST_REASON = 120
_LEAST_WIDTH = 16
"""Elements with fewer bits than this are codes of a quantised weight."""


def find_misfit(table: TensorTable, loaded: TensorTable | None, rejected: Mapping[str, str]) -> str | None:
    """Return which tensors of a chain a model cannot load, and why. None if it can load all of them, as far as is known.

    Parameters
    ----------
    table
        The tensors of the chain.
    loaded
        The tensors of the checkpoint that the server has loaded. None if they are not known.
    rejected
        The tensors for which the model's loader raised an error when it got them without their values, and the error.
    """
    wrong: dict[str, str] = {}
    for name, spec in table.items():
        has = None if loaded is None else loaded.get(name)
        if has is not None and _is_quantised(has) != _is_quantised(spec):
            wrong[name] = f"it is {spec.dtype.name}, and {has.dtype.name} in the checkpoint of the server"
        elif name in rejected and has != spec and is_about_names_or_shapes(rejected[name]):
            wrong[name] = rejected[name][:_LONGEST_REASON]
    if not wrong:
        return None
    names = sorted(wrong, key=lambda name: (name not in rejected, name))
    return f"{len(wrong)} of its {len(table)} tensors do not fit: {_listed(names)} ({wrong[names[0]]})"


def describe_lacking(names: Sequence[str]) -> str | None:
    """Return which tensors a chain lacks that the model takes from a checkpoint. None if it lacks none.

    Parameters
    ----------
    names
        The tensors that it lacks.
    """
    if not names:
        return None
    return f"it lacks {len(names)} of the tensors that the server was loaded with, which every version must have: {_listed(names)}"


def describe_types(table: TensorTable, recipe: RecipeRecord | None) -> str:
    """Return what a chain holds, in a few words: its recipe, or the type of most of its weights.

    Parameters
    ----------
    table
        The tensors of the chain.
    recipe
        The recipe by which they were quantised. None if they were not.
    """
    if is_adapter(table):
        return "a LoRA adapter"
    if recipe is not None:
        size, scale = recipe.options.get("group_size"), recipe.options.get("scale")
        suffix = f"-{size}" if size not in (None, 32) else "-ue8m0" if scale == "ue8m0" else ""
        return f"{recipe.name}{suffix} weights"
    counts = Counter(spec.dtype.name for spec in table.values())
    return f"{counts.most_common(1)[0][0]} weights" if counts else "no weights"


def is_adapter(table: TensorTable) -> bool:
    """Return whether a chain holds a LoRA adapter, and no whole model.

    Parameters
    ----------
    table
        The tensors of the chain.
    """
    names = [name for bundle, name in map(split_name, table) if bundle == MAIN]
    return bool(names) and all(".lora_" in name or ".modules_to_save." in name for name in names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST_NAMED])) + (" and others" if len(names) > _MOST_NAMED else "")


def _is_quantised(spec: TensorSpec) -> bool:
    return spec.dtype.width < _LEAST_WIDTH


def is_about_names_or_shapes(error: str) -> bool:
    """Return whether a loader would raise this error for real values too. Some loaders only fail because values are missing.

    Parameters
    ----------
    error
        The error, as `find_misfit` takes it.
    """
    return "meta tensor" not in error and not error.startswith("NotImplementedError")

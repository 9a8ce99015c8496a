"""Check what `deltawire publish` is given before it takes a run over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..format.checkpoints.checkpoint import Checkpoint
    from ..quantise.recipe import Recipe
    from ..tensors.bits import State


def check_step(step: int | None) -> int | None:
    """Return the step. Raise an error about wrong usage if it is too large for a commit."""
    if step is not None and step >= 2**63:
        raise typer.BadParameter("a step must be less than 2**63.")
    return step


def parse_recipe(spelling: str | None, ignore: Sequence[str], *, allows_nonfinite: bool) -> Recipe | None:
    """Return the recipe that the options ask for; None if weights are not quantised. Anything else is wrong usage."""
    if spelling is None or spelling == "none":
        if ignore:
            raise typer.BadParameter("it names layers that are not quantised, so it needs --quantise.", param_hint="--ignore")
        return None
    from ..errors import LimitExceeded
    from ..publish.quantising import record_of
    from ..quantise.recipe import DEFAULT_IGNORE, SPELLINGS, Recipe

    if spelling not in SPELLINGS:
        raise typer.BadParameter(
            f"there is no recipe {spelling!r}. Choose one of {', '.join(SPELLINGS)}, or none.", param_hint="--quantise"
        )
    if allows_nonfinite:
        raise typer.BadParameter("weights that are NaN or infinite cannot be quantised.", param_hint="--allow-nonfinite")
    try:
        recipe = Recipe.parse(spelling, ignore=(*DEFAULT_IGNORE, *ignore))
        record_of(recipe)
    except (ValueError, LimitExceeded) as error:
        raise typer.BadParameter(f"{error}" if str(error).endswith(".") else f"{error}.", param_hint="--ignore") from None
    return recipe


def check_run(run: str | None) -> None:
    """Raise an error about wrong usage if a run cannot have this name."""
    from ..format.records.record_parts import MAX_RUN_NAME

    if run is not None and not 1 <= len(run) <= MAX_RUN_NAME:
        raise typer.BadParameter(f"a run's name has 1 to {MAX_RUN_NAME} characters.", param_hint="--run")


def parse_meta(pairs: Sequence[str]) -> dict[str, str]:
    """Return names and values from NAME=VALUE. Any other form, and more than a commit may hold, is wrong usage."""
    strings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not of the form NAME=VALUE.", param_hint="--meta")
        if name in strings:
            raise typer.BadParameter(f"{name!r} is given twice.", param_hint="--meta")
        strings[name] = value
    if strings:
        from ..errors import LimitExceeded
        from ..publish.commits import check_meta

        try:
            check_meta(strings)
        except LimitExceeded as error:
            raise typer.BadParameter(str(error).removesuffix(error.hint).rstrip(), param_hint="--meta") from None
    return strings


def refuse_chain(checkpoint: Path) -> None:
    """Raise `CheckpointError` if the checkpoint is a URL, or the directory of a chain or a mirror: users swap CKPT and URL."""
    from ..errors import CheckpointError
    from ..store.occupancy import misplaced

    if why := misplaced(checkpoint):
        raise CheckpointError(f"{checkpoint} {why}. The checkpoint comes first, and is on this machine: `deltawire publish CKPT URL`.")


def refuse_nonfinite(state: State, threads: int | None, *, is_quantised: bool) -> None:
    """Raise `NonFiniteWeights` if any weights are NaN or infinite."""
    from ..errors import NonFiniteWeights
    from ..publish.publish_warnings import describe_nonfinite
    from ..quantise.reference import NONFINITE_HINT
    from ..tensors.finite import count_nonfinite

    bad = count_nonfinite(state, threads=threads)
    if bad:
        raise NonFiniteWeights(f"{describe_nonfinite(bad)}. Nothing is published.", hint=NONFINITE_HINT if is_quantised else None)


def find_attachments(state: Checkpoint) -> tuple[dict[str, bytes | Path] | None, list[str]]:
    """Return the files of a checkpoint directory that are published with the weights, and the names of those that are not.

    For a single file the first result is None.
    """
    from ..format.checkpoints.checkpoint import INDEX_FILE, MIRROR_RECORD_FILE, contained
    from ..format.checkpoints.checkpoint_copy import WEIGHT_SUFFIXES
    from ..format.checkpoints.shard_layout import LAYOUT_FILE, describe_layout

    if not state.is_directory:
        return None, []
    own = {shard.name for shard in state.shards} | {INDEX_FILE, LAYOUT_FILE, MIRROR_RECORD_FILE}
    layout = describe_layout(state)
    attached: dict[str, bytes | Path] = {} if layout is None else {LAYOUT_FILE: layout}
    left_out = []
    for path in sorted(state.path.iterdir()):
        if path.name in own or path.name.startswith("."):
            continue
        if path.is_file() and not path.name.lower().endswith(WEIGHT_SUFFIXES):
            attached[path.name] = contained(state.path, path.name)
        else:
            left_out.append(path.name)
    return attached, left_out

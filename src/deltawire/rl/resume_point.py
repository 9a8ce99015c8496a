"""Where in its chain a restarted trainer continues, given its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..chain.log import ChainLog
from ..errors import CheckpointError, UnquantisableWeight, VersionUnknown
from ..format.digest import Digest
from ..format.records.version_records import Commit
from ..publish.resume import read_state
from ..quantise.published_recipe import published_recipe
from ..quantise.quantise import quantise_state
from ..quantise.recipe import RELEASES
from ..tensors.state import state_digest
from ..trainers import WeightSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a trainer continues.

    Parameters
    ----------
    seq
        The newest version, if it has the weights of the checkpoint. None if they are to be published.
    rewind_to
        The version to rewind to. None if no rewind is needed.
    """

    seq: int | None = None
    rewind_to: int | None = None


def digest_like(log: ChainLog, commit: Commit, model: torch.nn.Module, dtype: torch.dtype, threads: int | None) -> Digest | None:
    """Return the digest that a version would have if these weights were published in the form of that version.

    A version that is quantised is read, because its scales depend on the versions before it. Weights always become the same codes and
    scales again if the scales before are those that they became first. The digest of a version of an unknown recipe is returned as it is.
    None is returned if no recipe makes the tensors of that version from weights like these.
    """
    if commit.recipe is None:
        return state_digest(WeightSource(model, dtype=dtype).snapshot(), threads=threads)
    if RELEASES.get(commit.recipe.name) != commit.recipe.release:
        return commit.digest
    before = read_state(log, commit, threads=threads, on_event=None).arrays
    weights = WeightSource(model).snapshot()
    try:
        recipe = published_recipe(commit.recipe, weights, before)
    except ValueError:
        return commit.digest
    try:
        return state_digest(quantise_state(weights, recipe, before, dtype=dtype), threads=threads)
    except UnquantisableWeight:
        return None


def resume_point(log: ChainLog, step: int | None, digest_of: Callable[[Commit], Digest | None]) -> ResumePoint:
    """Return the version to continue from. `digest_of` returns the digest of the checkpoint in the form of a version.

    A rewind is needed if versions follow the one of the checkpoint's `step`. A checkpoint that is ahead of the chain is fine, because
    checkpoints are written before the version of their step is published. `step` is None if there is no checkpoint.

    Raises `CheckpointError` if checkpoint and chain belong to different runs. Nothing was written by then.
    """
    head = log.head()
    if head is None or (newest := _version(log, log.in_force(head))) is None:
        return ResumePoint()
    if step is None:
        raise CheckpointError(
            f"{log.store.url} holds a run at step {newest.step}, but there is no checkpoint to continue from.",
            hint="If a trainer began the run, pass the directory of its checkpoints (checkpoints=). If another program began it, such as a "
            "Publisher, this trainer cannot join it: use a new location, and start the trainer first. It publishes the first version, and "
            "engines and gateways then follow it.",
        )
    if newest.step is not None and newest.step < step:
        return ResumePoint()
    found = _of_step(log, newest, step)
    if found is None or found.digest != digest_of(found):
        raise CheckpointError(
            f"the checkpoint of step {step} does not belong to the run in {log.store.url}: no version there has its weights.",
            hint="Pass the checkpoints of that run, or use a new location. If another program than this trainer began the run, such as a "
            "Publisher, a trainer cannot join it.",
        )
    return ResumePoint(seq=found.seq) if found.seq == newest.seq else ResumePoint(rewind_to=found.seq)


def _of_step(log: ChainLog, newest: Commit, step: int) -> Commit | None:
    """Return the version of this step in the history of the newest version."""
    found: Commit | None = newest
    while found is not None and (found.step is None or found.step > step):
        before = log.previous(found)
        found = None if before is None else _version(log, before)
    return found if found is not None and found.step == step else None


def _version(log: ChainLog, commit: Commit) -> Commit | None:
    try:
        return log.state_commit(commit)
    except VersionUnknown:
        return None

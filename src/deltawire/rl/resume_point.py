"""Where in its chain a restarted trainer continues, given its checkpoint."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..errors import CheckpointError, VersionUnknown
from ..format.digest import Digest
from ..format.records.version_records import Commit


def resume_point(log: ChainLog, step: int | None, digest: Digest) -> int | None:
    """Return the version to rewind to, or None if no rewind is needed.

    A rewind is needed if versions follow the one of the checkpoint's `step`. A checkpoint that is ahead of the chain is fine, because
    checkpoints are written before the version of their step is published. `step` is None if there is no checkpoint.

    Raises `CheckpointError` if checkpoint and chain belong to different runs. Nothing was written by then.
    """
    head = log.head()
    if head is None or (newest := _version(log, log.in_force(head))) is None:
        return None
    if step is None:
        raise CheckpointError(
            f"{log.store.url} holds a run at step {newest.step}, but there is no checkpoint to continue from. "
            "Pass the directory of its checkpoints, or another location for a new run."
        )
    if newest.step is not None and newest.step < step:
        return None
    found = _of_step(log, newest, step)
    if found is None or found.digest != digest:
        raise CheckpointError(
            f"the checkpoint of step {step} does not belong to the run in {log.store.url}: no version there has its weights."
        )
    return None if found.seq == newest.seq else found.seq


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

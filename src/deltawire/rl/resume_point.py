"""Where in its chain a trainer goes on from, given the checkpoint that it has."""

from __future__ import annotations

from ..chain.log import ChainLog
from ..errors import CheckpointError, VersionUnknown
from ..format.digest import Digest
from ..format.records.chain_records import Commit


def resume_point(log: ChainLog, step: int | None, digest: Digest) -> int | None:
    """The version to rewind to, since it is of `step`, the checkpoint's, and others came after it; None where no rewind is needed.

    Checkpoints are written before the version of their step is published, so one that is ahead of the chain is fine: it has only to be
    published. `CheckpointError` where checkpoint (`step` is None if there is none) and chain are not of one run: before anybody is fenced.
    """
    head = log.head()
    if head is None or (newest := _version(log, log.in_force(head))) is None:
        return None
    if step is None:
        raise CheckpointError(
            f"{log.store.url} holds a run at step {newest.step}, and there is no checkpoint to go on from. "
            "Name the directory of its checkpoints, or another place for a new run."
        )
    if newest.step is not None and newest.step < step:
        return None
    found = _of_step(log, newest, step)
    if found is None or found.digest != digest:
        raise CheckpointError(f"the checkpoint of step {step} is not of the run in {log.store.url}: no version there has its weights.")
    return None if found.seq == newest.seq else found.seq


def _of_step(log: ChainLog, newest: Commit, step: int) -> Commit | None:
    """The version of this step in the history that leads to the newest."""
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

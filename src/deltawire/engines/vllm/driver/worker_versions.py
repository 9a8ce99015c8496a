"""Which versions the workers of a server have, or can go back to, as their status says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ....format.digest import Digest
from ....format.records.version_records import Commit
from ....subscribe.sync_context import SyncContext
from .routes import WorkerStatus

_MOST_ADOPTED = 64
"""A server may have been started with any of this many versions before the newest one, or with the last full checkpoint."""


def versions_back(workers: Sequence[WorkerStatus], target: Commit, context: SyncContext) -> list[Commit]:
    """Return the versions between the present one and an earlier one, which comes last, or none if a worker did not keep all of them.

    Parameters
    ----------
    workers
        The status of each worker.
    target
        The earlier version.
    context
        The sync.
    """
    kept: list[list[dict[str, Any]]] = [worker.get("undo") or [] for worker in workers]
    wanted = context.log.ref(target).commit
    count = next((number for number, version in enumerate(kept[0], 1) if version["commit"] == wanted), 0)
    if any(versions[:count] != kept[0][:count] for versions in kept):
        return []
    found = []
    for version in kept[0][:count]:
        commit = context.log.read(version["seq"])
        if commit is None or context.log.ref(commit).commit != version["commit"]:
            return []
        found.append(commit)
    return found


def started_with(workers: Sequence[WorkerStatus], target: Commit, anchor: Commit, context: SyncContext) -> Iterator[Commit]:
    """Yield the versions that a server may have been started with: those with its digest, if its workers tell it.

    Parameters
    ----------
    workers
        The status of each worker.
    target
        The newest version.
    anchor
        The version of the last full checkpoint.
    context
        The sync.
    """
    digests = [worker.get("digest") for worker in workers]
    if not all(digests):
        yield from (target,) if anchor == target else (target, anchor)
        return
    total = sum(map(Digest.from_hex, filter(None, digests)), Digest())
    earlier = (context.log.read(seq) for seq in range(target.seq - 1, max(0, target.seq - _MOST_ADOPTED), -1))
    for commit in itertools.chain((target, anchor), earlier):
        if commit is not None and commit.digest == total and commit.kind != "fence" and not context.log.is_void(commit):
            yield commit
            return

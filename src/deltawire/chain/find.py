"""Find a version by its number or by its training step.

A version's number counts the versions of a chain: 1, 2, 3 … (`Commit.updates`). The commit's number (`Commit.seq`) also counts fences and
void commits; see docs/decisions/0014-people-count-versions.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..errors import ChainBroken, NoChain, VersionUnknown
from ..format.records.canonical import MAX_RECORD_BYTES
from ..format.records.run_records import Epoch
from ..format.records.version_records import Commit
from ..store import keys
from .log import ChainLog

_AT_ONCE = 32
_WINDOW = 256


def newest_version(log: ChainLog) -> Commit:
    """Return the newest commit that is not void. It may be a fence. Raises `NoChain` if no version is published."""
    head = log.head()
    if head is None:
        raise NoChain(f"nothing is published at {log.store.url}.")
    head = log.in_force(head)
    if head.state_seq is None:
        raise NoChain(f"no version is published at {log.store.url} yet.")
    return head


def find_version(log: ChainLog, number: int) -> Commit:
    """Return the commit that made version `number`. Raises `VersionUnknown` if there is none.

    Reads few commits, however long the chain is.

    Parameters
    ----------
    log
        The chain, from `ReaderOptions.open_log`.
    number
        The number of the version: 1, 2, 3 and so on. Commits count fences too; versions do not.
    """
    head = newest_version(log)
    if not 1 <= number <= head.updates:
        raise VersionUnknown(f"the chain at {log.store.url} has versions 1 to {head.updates}, but no version {number}.")
    # Void commits are rare, and finding out takes many reads. So the first search ignores them.
    found = _first_that_counts(log, head, number, lambda commit: commit)
    if found.updates == number and found.kind != "fence" and not log.is_void(found):
        return found
    found = _first_that_counts(log, head, number, log.in_force)
    if found.updates != number or found.kind == "fence":
        raise ChainBroken(f"commit {found.seq} in {log.store.url} is counted as version {found.updates}, where version {number} must be.")
    return found


def _first_that_counts(log: ChainLog, head: Commit, number: int, at_or_before: Callable[[Commit], Commit]) -> Commit:
    """Return the number of the first commit that counts `number` versions or more. Counts never fall, and a fence repeats the count before
    it.
    """
    found, lowest = head, number
    while lowest < found.seq:
        middle = (lowest + found.seq) // 2
        commit = at_or_before(log.ancestor(head, middle))
        if commit.updates >= number:
            found = commit
        else:
            lowest = middle + 1
    return found


def find_step(log: ChainLog, step: int) -> Commit:
    """Return the newest version that was published with this step. Raises `VersionUnknown` if there is none.

    Versions that a rewind abandoned are not found, because they are not in the history of the newest version.
    """
    head = newest_version(log)
    commit: Commit | None = head
    read_down_to = head.seq
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltawire-find") as pool:
        while commit is not None:
            if commit.kind != "fence" and commit.step == step:
                return commit
            if commit.seq <= read_down_to and commit.seq > 0:
                read_down_to = max(commit.seq - _WINDOW, 0)
                list(pool.map(log.read, range(read_down_to, commit.seq)))  # the log keeps them
            commit = _before(log, commit)
    raise VersionUnknown(f"the chain at {log.store.url} has no version of step {step}.")


def version_number(log: ChainLog, seq: int) -> int:
    """Return how many versions there are up to a commit number. Raises `VersionUnknown` if the chain is shorter."""
    commit = log.read(seq)
    if commit is None:
        raise VersionUnknown(f"the chain at {log.store.url} has no commit {seq}.")
    return commit.updates


def _before(log: ChainLog, commit: Commit) -> Commit | None:
    """Return the commit before this one in its history. If the publisher went back, that is the version it resumed from."""
    resumed_from: int | None = None
    if commit.kind == "rewind" and commit.base is not None:
        resumed_from = commit.base.seq
    before = log.previous(commit)
    if commit.kind == "anchor" and before is not None and before.kind == "fence" and before.epoch == commit.epoch:
        resumed_from = Epoch.parse(log.store.get(keys.epoch_key(commit.epoch), limit=MAX_RECORD_BYTES)).resumed_from
    if resumed_from is not None and resumed_from < commit.seq:
        return log.ancestor(commit, resumed_from)
    return before

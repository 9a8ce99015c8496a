"""Checks of the chain: commits, signatures, the data of the newest version, full checkpoints, collection."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...chain.log import ChainLog
from ...chain.maintenance.verify_report import NO_ROUTE
from ...chain.routes.remaining_routes import Routes
from ...chain.routes.restore import Hop, fetched_hops
from ...chain.routes.walk_route import HopFailed, walk_route
from ...chain.void_commits import void_among
from ...errors import ChainError, DataMissing, DeltawireError, NoChain, StoreError, VersionGone
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ...store import keys
from ...store.base import Store
from ...store.occupancy import refuse_occupied
from ..output import figures
from .findings import Examination, count_of, names_of

_NEWEST = 64
"""The number of newest commits that are read."""
_MOST_LISTED = 10_000
"""The most objects of one version that are listed."""
_MANY_HOPS = 100
"""Readers that begin from nothing fetch at most this many deltas, unless full checkpoints and skips fail to be made."""
_MANY_ANCHORS = 4
"""Collection keeps two full checkpoints. More than this many mean that it does not run."""


@dataclass(frozen=True, slots=True)
class ChainState:
    """The chain as far as it was read: its newest versions that count, the oldest first, and all of the newest commits."""

    versions: Sequence[Commit]
    commits: Sequence[Commit]
    route: Sequence[Hop]

    @property
    def newest(self) -> Commit:
        return self.versions[-1]

    @property
    def interval(self) -> float | None:
        """The usual time between two versions in seconds, by the publisher's clock; None if there are not enough of them."""
        times = [commit.time / 1000 for commit in self.versions]
        steps = [after - before for before, after in itertools.pairwise(times) if after > before]
        return statistics.median(steps) if len(steps) >= 3 else None

    @property
    def update_bytes(self) -> int | None:
        """The size of a usual delta, or None if there is none."""
        sizes = [commit.stored_bytes for commit in self.versions if commit.kind == "delta"]
        return int(statistics.median(sizes)) if sizes else None


def check_chain(found: Examination, log: ChainLog, url: str, *, now: float) -> ChainState | None:
    """Check what a reader needs. Return None if the chain has no version that can be used.

    Parameters
    ----------
    found
        Gets the findings.
    log
        The chain.
    url
        The chain's location as the user wrote it.
    now
        The time of this machine in seconds since 1970.
    """
    try:
        return _checked(found, log, url, now)
    except NoChain as error:
        found.add("chain", "wrong", error.message, "Check the URL. If it is right, publish: `deltawire publish CKPT URL`.")
        with found.checking("chain"):
            refuse_occupied(log.store)
    except DeltawireError as error:
        remedy = error.hint or f"`deltawire verify {url}` names everything that is damaged."
        found.add("chain", "wrong", error.message, remedy)
    return None


def _checked(found: Examination, log: ChainLog, url: str, now: float) -> ChainState | None:
    is_checked = bool(log.trusted_keys)
    log.trust_first_key()
    head = log.head()
    if head is None:
        raise NoChain(f"nothing is published at {log.store.url}.")
    commits = [log.ancestor(head, seq) for seq in range(max(0, head.seq - _NEWEST + 1), head.seq + 1)]
    void = void_among(commits)
    standing = log.in_force(head)
    _judge_void(found, commits, void)
    _judge_signatures(found, standing, is_checked=is_checked)
    versions = [commit for commit in commits if commit.kind != "fence" and commit.seq not in void]
    if standing.state_seq is not None and not any(commit.seq == standing.state_seq for commit in versions):
        versions = [log.state_commit(standing), *versions]
    if not versions:
        found.add("chain", "wrong", "a publisher has begun the run, but has published no version", "Check the publisher's log.")
        return None
    newest = versions[-1]
    age = figures.duration(max(0.0, now - newest.time / 1000))
    found.add("chain", "ok", f"version {newest.updates:,} is the newest, published {age} ago by the publisher's clock")
    found.measured |= {"version": newest.updates, "seq": newest.seq, "commits": head.seq + 1}
    route = _check_route(found, log, newest, url)
    _check_collection(found, log, head, url)
    return ChainState(versions, commits, route)


def _judge_void(found: Examination, commits: Sequence[Commit], void: set[int]) -> None:
    if not void:
        return
    remedy = "Check that only one trainer publishes to this run."
    if commits[-1].seq in void:
        found.add("chain", "warning", "the newest commit is void: a publisher that was replaced still writes", remedy)
    else:
        number = count_of(len(void), "void commit")
        found.add("chain", "note", f"{number} among the newest {len(commits):,}: a replaced publisher wrote too late", remedy)


def _judge_signatures(found: Examination, standing: Commit, *, is_checked: bool) -> None:
    signature = standing.signature
    if is_checked:
        found.add("signatures", "ok", "a key that you trust signed the newest commits")
    elif signature is None:
        found.add("signatures", "note", "the run is not signed: everyone who can write to the store can change it")
    else:
        key = signature.key
        remedy = f"If it is yours, let readers trust it: `--trust {key}`."
        found.add("signatures", "note", "one key signed the run, from its first commit on. Whose key it is was not checked", remedy)


def _check_route(found: Examination, log: ChainLog, newest: Commit, url: str) -> Sequence[Hop]:
    """Check that everything is there that a new reader fetches for the newest version. Return the route that it takes."""
    sizes = _Sizes(log.store)
    lost: list[str] = []
    routes = Routes(log)

    def look_at(hops: Sequence[Hop]) -> Sequence[Hop]:
        for hop in hops:
            missing = [entry.key for entry in hop.files if not sizes.has(entry)]
            if missing:
                lost.extend(missing)
                raise HopFailed(hop, DataMissing(f"{missing[0]} is missing, or has another size."))
        return hops

    repair = (
        f"`deltawire verify --deep {url}` names what is damaged. Publish the newest good checkpoint in full: `deltawire publish --full`."
    )
    route: Sequence[Hop] = ()
    try:
        route = walk_route(routes, lambda: routes.find(None, newest), look_at)
    except StoreError:
        raise
    except (ChainError, VersionGone) as error:
        files = names_of(list(dict.fromkeys(lost)))
        found.add("data", "wrong", f"{NO_ROUTE}. {f'Missing or damaged: {files}' if files else error.message}", repair)
    else:
        _judge_route(found, newest, route, lost, repair)
    absent = [entry.name or entry.key for entry in newest.attachments or () if not sizes.has(entry)]
    if absent:
        found.add(
            "data", "wrong", f"files of the newest version are missing: {names_of(absent)}", f"Publish a directory that has them. {repair}"
        )
    return route


def _judge_route(found: Examination, newest: Commit, route: Sequence[Hop], lost: list[str], repair: str) -> None:
    files = sum(len(hop.files) for hop in route)
    size, hops = sum(entry.size for hop in route for entry in hop.files), fetched_hops(route)
    what = f"a new reader fetches {figures.size(size)} in {count_of(files, 'file')}, all of which exist"
    found.measured |= {"join_bytes": size, "join_hops": hops, "state_bytes": newest.state_bytes}
    if lost:
        found.add("data", "warning", f"{what}, but shorter routes are damaged: {names_of(list(dict.fromkeys(lost)))}", repair)
    else:
        found.add("data", "ok", what)
    start = next((hop.target for hop in route if hop.files), newest)
    age = count_of(newest.updates - start.updates, "version")
    if hops > _MANY_HOPS or size > 3 * newest.state_bytes:
        remedy = (
            "Check the trainer's log for `shortcut-failed`: it makes full checkpoints and skips. `deltawire publish --full` makes one now."
        )
        found.add("full checkpoints", "warning", f"the newest is {age} old, so that new readers need {count_of(hops, 'download')}", remedy)
    else:
        found.add("full checkpoints", "ok", f"the one that new readers begin with is {age} old")


def _check_collection(found: Examination, log: ChainLog, head: Commit, url: str) -> None:
    with found.checking("collection"):
        mark = log.mark()
        if mark is not None and mark.floor > head.seq:
            key = keys.mark_key(mark.mark)
            found.add(
                "collection",
                "wrong",
                f"{key} marks everything up to commit {mark.floor} for deletion, but the newest commit is {head.seq}",
                f"No collector wrote it. Delete {key}, and find out who can write there.",
            )
            return
        floor = log.floor()
        anchors = [seq for seq in log.anchors(None if floor < 0 else floor, head.seq) if seq > floor]
        if len(anchors) > _MANY_ANCHORS:
            what = f"{count_of(len(anchors), 'full checkpoint')} could be reduced to two"
            found.add("collection", "note", what, f"Run `deltawire gc {url}` regularly, or see which pins forbid it.")
        else:
            found.add("collection", "ok", "nothing was collected yet" if floor < 0 else f"everything up to commit {floor} may be deleted")


class _Sizes:
    """Tells which data objects are there, with one listing for each version."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folders: dict[str, dict[str, int]] = {}

    def has(self, entry: FileEntry) -> bool:
        folder = entry.key.rpartition("/")[0] + "/"
        if folder not in self._folders:
            listed = itertools.islice(self._store.list(folder), _MOST_LISTED)
            self._folders[folder] = {info.key: info.size for info in listed}
        return self._folders[folder].get(entry.key) == entry.size

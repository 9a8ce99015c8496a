"""Continue a chain: find the version to continue from, and rebuild its state from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chain.fetch import Fetcher, read_header
from ..chain.log import ChainLog
from ..chain.maintenance.survey import is_stored
from ..chain.memory_state import MemoryState
from ..chain.routes.rebuild import rebuild
from ..chain.routes.remaining_routes import Routes
from ..chain.routes.restore import Hop, fetched_hops
from ..chain.routes.walk_route import HopFailed, taking, walk_route
from ..errors import DataMissing, DeltawireError, VersionUnknown
from ..events import OnEvent, emit
from ..format.records.version_records import Commit
from .shortcuts.cadence import ChainCost, Replay
from .snapshots import Arrays
from .upload.segments import TensorTable

MOST_READ = 256 << 20
"""Most bytes of weights that the first rank reads, to check them, before the ranks take a run over."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state of `commit`, what it costs a new reader to get there, and the lowest version whose data the route needs."""

    commit: Commit
    arrays: Arrays
    cost: ChainCost
    lowest: int


def version_commit(log: ChainLog, tip: Commit, seq: int) -> Commit:
    """Return the commit of version `seq`, which is an ancestor of `tip`. Raises `VersionUnknown` if there is no such version."""
    if not 0 <= seq <= tip.seq:
        raise VersionUnknown(f"the chain has no commit {seq}; its newest is {tip.seq}.")
    commit = log.ancestor(tip, seq)
    if commit.kind == "fence" or log.is_void(commit):
        raise VersionUnknown(f"commit {seq} is not a version: it is {'a fence' if commit.kind == 'fence' else 'void'}.")
    return commit


def check_seq(seq: object) -> None:
    """Raise `VersionUnknown` unless this can be the seq of a version, or is None."""
    if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool)):
        raise VersionUnknown(f"resume_from_seq is the seq of a version, an integer, not {seq!r}.")


def find_start(log: ChainLog, seq: int | None) -> Commit | None:
    """Return the commit of the version that a writer continues from: version `seq`, or the newest. None if nothing is published yet.

    Raises `VersionUnknown` if there is no version `seq`.
    """
    head = log.head()
    if head is None and seq is not None:
        raise VersionUnknown(f"nothing is published yet at {log.store.url}.")
    if head is None:
        return None
    if seq is not None:
        return version_commit(log, head, seq)
    head = log.in_force(head)
    return None if head.state_seq is None else log.state_commit(head)


def require_route(log: ChainLog, target: Commit) -> None:
    """Raise `DataDamaged` or `DataMissing` if no route to a version has intact data. Call it before the chain is taken over.

    Every object of the route must be in the store with the right size. The smallest objects with weights, up to `MOST_READ` bytes together,
    are also read and compared with their hashes.
    """
    fetcher = Fetcher(log.store, limits=log.limits, patience=0)
    routes = Routes(log, fetcher=fetcher)
    left, intact = MOST_READ, set[str]()

    def check(hops: Sequence[Hop]) -> None:
        nonlocal left
        objects = [(hop, entry) for hop in hops for entry in hop.files]
        for hop, entry in objects:
            if not is_stored(log, entry):
                raise HopFailed(hop, DataMissing(f"{entry.key} is not in {log.store.url}, or has the wrong size."))
        weights = [(hop, entry) for hop, entry in objects if entry.name is None or entry.name.endswith(".safetensors")]
        for hop, entry in sorted(weights, key=lambda each: each[1].size):
            if entry.size > left:
                break
            if entry.key not in intact:
                left -= entry.size
                with taking(hop):
                    fetcher.fetch(entry)
                intact.add(entry.key)

    walk_route(routes, lambda: routes.find(None, target), check)


def read_table(log: ChainLog, commit: Commit) -> TensorTable | None:
    """Return the names, types and shapes of a version's tensors. Reads only headers, of the checkpoint that the version is rebuilt from.

    Only a checkpoint can change them. They serve for warnings, so None is returned if they cannot be read.
    """
    try:
        first = Routes(log).find(None, commit)[0]
        files = [entry for entry in first.files if entry.name is not None and entry.name.endswith(".safetensors")]
        headers = [read_header(log.store, entry, most_tensors=commit.tensors).entries for entry in files]
    except DeltawireError:
        return None
    tensors = sorted((name, entry) for header in headers for name, entry in header.items())
    names = tuple(name for name, _ in tensors)
    return TensorTable(names, tuple(entry.dtype for _, entry in tensors), tuple(entry.shape for _, entry in tensors))


def read_state(log: ChainLog, target: Commit, *, start: Resumed | None = None, threads: int | None, on_event: OnEvent | None) -> Resumed:
    """Return the state of a version, bit for bit as it was published. Raises as `rebuild` does.

    `start` is the state of another version in memory. Its arrays are changed in place.
    """
    if start is not None and start.commit == target:
        return start
    state = MemoryState(threads=threads)
    if start is not None:
        state.adopt(dict(start.arrays), start.commit)
    fetcher = Fetcher(log.store, limits=log.limits, on_event=on_event)
    routes = Routes(log, fetcher=fetcher, on_event=on_event)
    planned = routes.find(None, target)
    size = sum(entry.size for hop in planned for entry in hop.files) + sum(entry.size for entry in target.attachments or ())
    emit(on_event, "planned", seq=target.seq, updates=target.updates, hops=fetched_hops(planned), bytes=size)
    rebuild(state, log, fetcher, target, routes=routes)
    hops = routes.find(None, target)
    return Resumed(target, dict(state.writable), cost_of(hops, target), min(hop.target.seq for hop in hops if hop.files))


def cost_of(hops: Sequence[Hop], target: Commit) -> ChainCost:
    """Return what it costs a new reader to get to `target` by this route, which starts from nothing."""
    start, rest = hops[0], [hop for hop in hops[1:] if hop.files]
    replay = Replay(sum(entry.size for hop in rest for entry in hop.files), len(rest))
    return ChainCost.resumed(max(target.updates - start.target.updates, 0), replay)

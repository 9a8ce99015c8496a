"""Taking up a chain where it stands: the state that its head leaves in force, rebuilt from the store and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.memory_state import MemoryState
from ..chain.rebuild import rebuild
from ..chain.restore import Hop
from ..chain.routes import Routes
from ..errors import VersionUnknown
from ..events import OnEvent, emit
from ..format.records import Commit
from .cadence import ChainCost, Replay
from .snapshots import Arrays


@dataclass(frozen=True, slots=True)
class Resumed:
    """A version's state, what it costs a joiner to get there, and the lowest version whose data the way needs."""

    arrays: Arrays
    cost: ChainCost
    lowest: int


def version_commit(log: ChainLog, tip: Commit, seq: int) -> Commit:
    """The commit that made version `seq`, an ancestor of `tip`. `VersionUnknown` if there is no such version."""
    if not 0 <= seq <= tip.seq:
        raise VersionUnknown(f"the chain has no commit {seq}; its newest is {tip.seq}.")
    commit = log.ancestor(tip, seq)
    if commit.kind == "fence" or log.is_void(commit):
        raise VersionUnknown(f"commit {seq} is no version: it is {'a fence' if commit.kind == 'fence' else 'void'}.")
    return commit


def require_version(log: ChainLog, seq: int) -> None:
    """Before anybody is fenced off: is there such a version? `VersionUnknown` if not."""
    head = log.head()
    if head is None:
        raise VersionUnknown(f"nothing is published yet at {log.store.url}.")
    version_commit(log, head, seq)


def read_state(log: ChainLog, target: Commit, *, threads: int | None, on_event: OnEvent | None) -> Resumed:
    """The state of a version, bit for bit as it was published. Raises what `rebuild` does."""
    state = MemoryState(threads=threads)
    routes = Routes(log, on_event=on_event)
    planned = routes.find(None, target)
    size = sum(entry.size for hop in planned for entry in hop.files)
    emit(on_event, "planned", seq=target.seq, updates=target.updates, hops=len(planned), bytes=size)
    rebuild(state, log, Fetcher(log.store, limits=log.limits, on_event=on_event), target, routes=routes)
    hops = routes.find(None, target)
    return Resumed(dict(state.writable), cost_of(hops, target), min(hop.target.seq for hop in hops if hop.files))


def cost_of(hops: Sequence[Hop], target: Commit) -> ChainCost:
    """What it costs a joiner to get to `target` on this route, which starts from nothing."""
    start, rest = hops[0], [hop for hop in hops[1:] if hop.files]
    way = Replay(sum(entry.size for hop in rest for entry in hop.files), len(rest))
    return ChainCost.resumed(max(target.updates - start.target.updates, 0), way)

"""Taking up a chain where it stands: the state that its head leaves in force, rebuilt from the store and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.maintenance.survey import is_stored
from ..chain.memory_state import MemoryState
from ..chain.rebuild import rebuild
from ..chain.restore import Hop, fetched_hops
from ..chain.routes import Routes
from ..chain.walk_route import HopFailed
from ..errors import DataDamaged, DataMissing, VersionUnknown
from ..events import OnEvent, emit
from ..format.records.chain_records import Commit
from .shortcuts.cadence import ChainCost, Replay
from .snapshots import Arrays

MOST_READ = 256 << 20
"""How many bytes of weights one process reads to check them before ranks take a run over together."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that `commit` made, what it costs a joiner to get there, and the lowest version whose data the way needs."""

    commit: Commit
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


def find_start(log: ChainLog, seq: int | None) -> Commit | None:
    """Return the commit of the version that a writer will go on from: `seq`, or the newest; None if nothing is published yet.

    Raises `VersionUnknown` if there is no version `seq`. Call it before anybody is fenced off.
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


def require_way(log: ChainLog, target: Commit) -> None:
    """Raise what is wrong with the data of a version if no way to it is left. Call it before anybody is fenced off.

    Every object on the way must be in the store with the right size. The smallest ones that hold weights, up to `MOST_READ` bytes together,
    are also read and compared with their hashes.
    """
    routes, fetcher = Routes(log), Fetcher(log.store, limits=log.limits, patience=0)
    left, intact = MOST_READ, set[str]()
    while True:
        way = [(hop, entry) for hop in routes.find(None, target) for entry in hop.files]
        missing = ((hop, DataMissing(f"{e.key} is not in {log.store.url}, or not whole.")) for hop, e in way if not is_stored(log, e))
        lost: tuple[Hop, DataDamaged | DataMissing] | None = next(missing, None)
        weights = [step for step in way if step[1].name is None or step[1].name.endswith(".safetensors")]
        for hop, entry in sorted(weights, key=lambda step: step[1].size):
            if lost is not None or entry.size > left:
                break
            if entry.key in intact:
                continue
            left -= entry.size
            try:
                fetcher.fetch(entry)
                intact.add(entry.key)
            except (DataDamaged, DataMissing) as error:
                lost = hop, error
        if lost is None:
            return
        routes.avoid(HopFailed(*lost))


def read_state(log: ChainLog, target: Commit, *, start: Resumed | None = None, threads: int | None, on_event: OnEvent | None) -> Resumed:
    """The state of a version, bit for bit as it was published. Raises what `rebuild` does.

    `start` is another version of the same chain that is in memory; its arrays are used up.
    """
    if start is not None and start.commit == target:
        return start
    state = MemoryState(threads=threads)
    if start is not None:
        state.adopt(dict(start.arrays), start.commit)
    routes = Routes(log, on_event=on_event)
    planned = routes.find(None, target)
    size = sum(entry.size for hop in planned for entry in hop.files) + sum(entry.size for entry in target.attachments or ())
    emit(on_event, "planned", seq=target.seq, updates=target.updates, hops=fetched_hops(planned), bytes=size)
    rebuild(state, log, Fetcher(log.store, limits=log.limits, on_event=on_event), target, routes=routes)
    hops = routes.find(None, target)
    return Resumed(target, dict(state.writable), cost_of(hops, target), min(hop.target.seq for hop in hops if hop.files))


def cost_of(hops: Sequence[Hop], target: Commit) -> ChainCost:
    """What it costs a joiner to get to `target` on this route, which starts from nothing."""
    start, rest = hops[0], [hop for hop in hops[1:] if hop.files]
    way = Replay(sum(entry.size for hop in rest for entry in hop.files), len(rest))
    return ChainCost.resumed(max(target.updates - start.target.updates, 0), way)

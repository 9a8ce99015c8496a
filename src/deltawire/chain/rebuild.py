"""Bring a state in memory to a version of the chain, by whatever way is left."""

from __future__ import annotations

from ..errors import DataDamaged, DataMissing, DeltaError, StateError, VersionGone
from ..format.records.chain_records import Commit, CommitRef
from ..store.base import Progress
from .fetch import Fetcher
from .log import ChainLog
from .memory_state import MemoryState
from .restore import Hop
from .routes import HopFailed, Routes, was_collected


def rebuild(
    state: MemoryState,
    log: ChainLog,
    fetcher: Fetcher,
    target: Commit,
    *,
    progress: Progress | None = None,
    routes: Routes | None = None,
) -> None:
    """Bring `state`, empty or at some version, to `target`, which must not be void.

    A hop whose data are gone or damaged is left out and another way is looked for; a state that proves not to be what it should be is
    dropped. `routes` knows then which hops are of no use. If no way is left, the error of one that was tried. Each hop is taken whole: on
    failure the state is at some version.
    """
    routes = routes or Routes(log)
    while True:
        have: CommitRef | None = None if state.commit is None else log.ref(state.commit)
        hops = routes.find(have, target)
        hop: Hop | None = None
        try:
            for hop in hops:
                take_hop(state, hop, log, fetcher, progress=progress)
            return
        except (VersionGone, DataDamaged, DataMissing, DeltaError, StateError) as error:
            assert hop is not None
            if isinstance(error, StateError) and hop.source != "skip" and hops[0].base is not None:
                state.clear()
            else:
                routes.avoid(HopFailed(hop, error))


def take_hop(state: MemoryState, hop: Hop, log: ChainLog, fetcher: Fetcher, *, progress: Progress | None = None) -> None:
    """Take one hop, whole or not at all."""
    collected = was_collected(log, hop)
    if hop.source in ("fence", "rewind"):
        state.relabel(hop.target)
    elif hop.base is None:
        state.load_anchor(hop, fetcher, collected=collected, progress=progress)
    else:
        update = state.resolve(hop, fetcher, collected=collected, progress=progress)
        with fetcher.watch.phase("apply"):
            state.apply(update, hop.target)

"""Bring a state in memory to a version of the chain."""

from __future__ import annotations

from collections.abc import Sequence

from ...format.records.version_records import Commit
from ...store.base import Progress
from ..fetch import Fetcher
from ..log import ChainLog
from ..memory_state import MemoryState
from .remaining_routes import Routes, was_collected
from .restore import Hop
from .walk_route import taking, walk_route


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

    A hop whose data are missing or damaged is avoided, and another route is found. A state that is not what its commit says is dropped.
    Raises the error of a hop that failed if no route is left. Each hop is taken completely or not at all, so after a failure the state is
    at some version. `routes` afterwards knows which hops to avoid.
    """
    known = routes or Routes(log, fetcher=fetcher)

    def take(hops: Sequence[Hop]) -> None:
        for hop in hops:
            with taking(hop):
                take_hop(state, hop, log, fetcher, progress=progress)

    walk_route(
        known,
        lambda: known.find(None if state.commit is None else log.ref(state.commit), target),
        take,
        drop_base=lambda _: state.clear(),
    )


def take_hop(state: MemoryState, hop: Hop, log: ChainLog, fetcher: Fetcher, *, progress: Progress | None = None) -> None:
    """Take one hop completely, or change nothing and raise an error."""
    collected = was_collected(log, hop)
    if hop.source in ("fence", "rewind"):
        state.relabel(hop.target)
    elif hop.base is None:
        state.load_anchor(hop, fetcher, collected=collected, progress=progress)
    else:
        update = state.resolve(hop, fetcher, collected=collected, progress=progress)
        with fetcher.watch.phase("apply"):
            state.apply(update, hop.target)

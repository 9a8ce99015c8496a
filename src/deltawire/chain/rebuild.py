"""Bring a state in memory to a version of the chain, by whatever way is left."""

from __future__ import annotations

from ..errors import ChainError, DataDamaged, DataMissing, DeltaError, StateError, VersionGone
from ..events import OnEvent, emit
from ..format.records import Commit, CommitRef
from ..store.base import Progress
from .fetch import Fetcher
from .log import ChainLog
from .memory_state import MemoryState
from .restore import Hop, Way, find_route

_ATTEMPTS = 6


def rebuild(
    state: MemoryState,
    log: ChainLog,
    fetcher: Fetcher,
    target: Commit,
    *,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
) -> None:
    """Bring `state`, empty or at some version, to `target`, which must not be void.

    A hop whose data are gone or damaged is left out and another way is looked for; a state that proves not to be what it should be is
    dropped. If no way is left, the error of the last one that was tried. Each hop is taken whole: on failure the state is at some version.
    """
    without: set[Way] = set()
    failure: ChainError | DeltaError | StateError | None = None
    for _ in range(_ATTEMPTS):
        have: CommitRef | None = None if state.commit is None else log.ref(state.commit)
        try:
            route = find_route(log, have, target, without=without)
        except VersionGone as gone:
            raise failure or gone from None
        hop: Hop | None = None
        try:
            for hop in route:
                take_hop(state, hop, log, fetcher, progress=progress)
            return
        except StateError as error:
            failure = error
            state.clear()
        except (VersionGone, DataDamaged, DataMissing, DeltaError) as error:
            assert hop is not None
            failure = error
            without.add(hop.way)
        emit(on_event, "rerouting", target=target.seq, reason=str(failure))
    assert failure is not None
    raise failure


def take_hop(state: MemoryState, hop: Hop, log: ChainLog, fetcher: Fetcher, *, progress: Progress | None = None) -> None:
    """Take one hop, whole or not at all."""

    def collected() -> bool:
        return hop.target.seq <= log.floor()

    if hop.source in ("fence", "rewind"):
        state.relabel(hop.target)
    elif hop.base is None:
        state.load_anchor(hop, fetcher, collected=collected, progress=progress)
    else:
        update = state.resolve(hop, fetcher, collected=collected, progress=progress)
        with fetcher.watch.phase("apply"):
            state.apply(update, hop.target)

"""The model in this process's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ..chain.memory_state import MemoryState, Update, UpdateStep
from ..chain.routes.remaining_routes import was_collected
from ..chain.routes.restore import Hop, makes_versions
from ..chain.routes.walk_route import HopFailed, taking, walk_route
from ..chain.version import Version
from ..errors import EngineQuarantined, SwapFailed
from ..events import emit
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from .prepared_swap import PreparedSwap, Swap, apply_directly
from .replica_weights import ArrayWeights, ReplicaWeights, StepForward, StepsBack, StepsForward
from .resolved_ahead import Ahead, ResolvedAhead
from .sync_context import RouteFetcher, SyncContext
from .undo import UndoLog


class MemoryReplica:
    """Weights in memory that are changed in place from version to version. Each hop is taken completely or not at all.

    A route that begins with a full checkpoint is followed in separate memory. The old weights are replaced when it has led to the target.
    A resync therefore needs memory for two states, and the old version stays available until the new one is complete.

    Parameters
    ----------
    weights
        The weights to keep up to date, such as those of an engine. None means new arrays.
    swap
        Makes each prepared change, once. An exception that it raises ends the move.
    threads
        Number of threads for decoding and digests. None means one per core.
    undo_bytes
        Most bytes kept for going back to earlier versions without the store. None means a quarter of the state.
    """

    def __init__(
        self,
        weights: ReplicaWeights | None = None,
        swap: Swap = apply_directly,
        *,
        threads: int | None = None,
        undo_bytes: int | None = None,
    ) -> None:
        self._weights: ReplicaWeights = ArrayWeights(threads) if weights is None else weights
        self._swap = swap
        self._threads = threads
        self._undo = UndoLog(undo_bytes)
        self._resolved = ResolvedAhead(self._weights)

    @property
    def commit(self) -> Commit | None:
        return self._weights.state.version

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return self._weights.state

    @property
    def mirror(self) -> None:
        return None

    def move(self, target: Commit, context: SyncContext) -> None:
        if not self._weights.inspect(target, context):
            self._undo.clear()
            self._resolved.drop()
        is_damaged = False
        back: Sequence[UpdateStep] | None = None

        def find() -> Sequence[Hop]:
            nonlocal back
            state = self._weights.state
            back = None if is_damaged else self._undo.steps_back(state.digest, target)
            if back is not None:
                return ()
            with context.report.watch.phase("find"):
                return context.routes.find(None if is_damaged or state.commit is None else context.log.ref(state.commit), target)

        def take(hops: Sequence[Hop]) -> None:
            if back is not None:
                with context.report.watch.phase("apply"):
                    self._make(StepsBack(self._weights, back, target), target, context)
            else:
                self._walk(hops, context)
                context.report.hops += len(hops)

        def drop_base(failure: HopFailed) -> None:
            nonlocal is_damaged
            is_damaged = True  # the state is not that of its commit: memory is damaged, or other code wrote to it
            emit(context.on_event, "state-refused", seq=failure.hop.base, reason=str(failure.error))

        walk_route(context.routes, find, take, drop_base=drop_base)

    def wants_ahead(self) -> bool:
        return True

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        self._resolved.add(files)

    def close(self) -> None:
        """Drop the kept steps. The weights stay for as long as other code refers to them."""
        self._undo.clear()
        self._resolved.drop()

    def _walk(self, hops: Sequence[Hop], context: SyncContext) -> None:
        from_nothing = bool(hops) and hops[0].base is None
        state = MemoryState(threads=self._threads) if from_nothing else self._weights.state
        first = next((hop for hop in hops if hop.files), None)
        ahead = None if first is None or from_nothing else self._resolved.take(first.files)
        fetcher = context.route_fetcher(hops, resolved=() if ahead is None else ahead[1])
        try:
            if context.in_one and not from_nothing and makes_versions(hops) > 1:
                self._walk_in_one(hops, fetcher, context)
                return
            for hop in hops:
                update = self._prepare(state, hop, fetcher, context, ahead if hop is first else None)
                with context.report.watch.phase("apply"):
                    if update is not None and from_nothing:
                        state.apply(update, hop.target)
                    elif update is not None:
                        step = state.step(update, hop.target)
                        self._make(StepForward(self._weights, step), hop.target, context)
                        self._undo.push(step)
        finally:
            fetcher.close()
        if from_nothing:
            context.report.resynced = self.commit is not None
            self._undo.clear()
            self._make(self._weights.replacement(state, hops[-1].target), hops[-1].target, context)

    def _walk_in_one(self, hops: Sequence[Hop], fetcher: RouteFetcher, context: SyncContext) -> None:
        """Take several hops in one swap. Everything is fetched before it, and the first hop is decoded before it."""
        files: list[tuple[FileEntry, memoryview]] = []
        for hop in hops:
            with taking(hop):
                files += fetcher.prefetch(hop.files)
        fetcher.hand_out(files)

        def decode(hop: Hop) -> Update | None:
            return self._prepare(self._weights.state, hop, fetcher, context, None)

        first = decode(hops[0]) if hops[0].files else None
        rest = hops if first is None else hops[1:]
        decoded = [] if first is None else [(hops[0].target, lambda: first)]
        change = StepsForward(self._weights, [*decoded, *((hop.target, partial(decode, hop)) for hop in rest)])
        with context.report.watch.phase("apply"):
            try:
                self._make(change, hops[-1].target, context)
            except SwapFailed as error:
                if isinstance(error.__cause__, HopFailed):  # a delta is wrong, so another route may lead there
                    raise error.__cause__ from None
                raise
        for step in change.steps:
            self._undo.push(step)

    def _make(self, change: PreparedSwap, target: Commit, context: SyncContext) -> None:
        context.check_wanted()
        self._resolved.drop()
        try:
            self._swap(change, Version.of(target))
        except EngineQuarantined:
            self._weights.forget()
            self._undo.clear()
            raise
        finally:
            self._undo.drop_undone()

    def _prepare(self, state: MemoryState, hop: Hop, fetcher: RouteFetcher, context: SyncContext, ahead: Ahead | None) -> Update | None:
        """Take one hop, except for the change of the weights. Returns the update that makes this change, or None if nothing changes.

        `ahead` is the part of it that was decoded before the commit was read.
        """
        with taking(hop):
            if hop.base is None:
                state.load_anchor(hop, fetcher, collected=was_collected(context.log, hop), progress=context.progress)
                context.report.fetched(entry for entry in hop.files if (entry.name or "").endswith(".safetensors"))
                return None
            if not hop.files:
                state.relabel(hop.target)
                return None
            update, resolved = ahead if ahead is not None else (None, {})
            if update is None and state is self._weights.state:
                update = self._weights.new_update()
            update = state.resolve(hop, fetcher, update=update, resolved=resolved)
            context.report.came_ahead(resolved)
            context.report.fetched(hop.files)
            return update

"""The model in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..chain.memory_state import MemoryState, NewUpdate, Undo, Update
from ..chain.restore import Hop
from ..chain.routes import HopFailed, was_collected
from ..errors import ChainError, DataDamaged, DataMissing, DeltaError, StateError, VersionGone
from ..events import emit
from ..format.records.chain_records import Commit
from .sync_context import RouteFetcher, SyncContext
from .undo import UndoLog


class MemoryReplica:
    """Arrays that are changed in place from version to version, hop by hop, each hop whole or not at all.

    A way that begins with a whole checkpoint is gone in memory of its own, and the old arrays are let go when it has led to the target:
    so a resync needs room for two states, and the old version is at hand until the new one is.

    Engines that serve the weights override `change`, `take_back` and `replace`, to pause around them; what those raise ends the move.
    """

    def __init__(self, *, threads: int | None = None, undo_bytes: int | None = None, new_update: NewUpdate | None = None) -> None:
        self._threads = threads
        self._new_update = new_update
        self._state = self._nothing()
        self._commit: Commit | None = None
        """The version at hand where the state's own commit is a fence."""
        self._undo = UndoLog(undo_bytes)

    @property
    def commit(self) -> Commit | None:
        at = self._state.commit
        return self._commit if at is None or at.kind == "fence" else at

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return self._state

    def move(self, target: Commit, context: SyncContext) -> None:
        spoilt = False
        self._commit = self.commit
        while True:
            back = None if spoilt else self._undo.way_back(self._state.digest, target)
            if back is not None:
                with context.report.watch.phase("apply"):
                    self.take_back(back, target)
                return
            have = None if spoilt or self._state.commit is None else context.log.ref(self._state.commit)
            with context.report.watch.phase("find"):
                hops = context.routes.find(have, target)
            try:
                self._walk(hops, context)
            except HopFailed as failure:
                if isinstance(failure.error, StateError) and failure.hop.source != "skip" and hops[0].base is not None:
                    spoilt = True  # not what its commit says: memory rots, and arrays can be written to
                    emit(context.on_event, "state-refused", seq=failure.hop.base, reason=str(failure.error))
                else:
                    context.routes.avoid(failure)
                continue
            context.report.hops += len(hops)
            return

    def close(self) -> None:
        """Forget the way back. The arrays live on for as long as anybody holds them."""
        self._undo.clear()

    def change(self, update: Update, target: Commit) -> Undo:
        """Change the state at hand. Returns what leads back."""
        return self._state.apply(update, target)

    def take_back(self, steps: Sequence[Undo], target: Commit) -> None:
        """Undo the last changes, newest first, which leads to the state of `target`."""
        for step in steps:
            self._state.relabel(step.after)  # it may have got another number since, by a fence or a rewind
            self._state.undo(step)
            self._undo.pop()
            if step.before.kind != "fence":
                self._commit = step.before
        self._state.relabel(target)
        self._commit = target

    def replace(self, state: MemoryState, target: Commit) -> None:
        """Put another state in the place of the one at hand."""
        self._state = state

    def _nothing(self) -> MemoryState:
        return MemoryState(threads=self._threads, new_update=self._new_update)

    def _walk(self, hops: Sequence[Hop], context: SyncContext) -> None:
        from_nothing = bool(hops) and hops[0].base is None
        state = MemoryState(threads=self._threads) if from_nothing else self._state
        fetcher = context.route_fetcher(hops)
        try:
            for hop in hops:
                update = self._prepare(state, hop, fetcher, context)
                with context.report.watch.phase("apply"):
                    if update is not None and from_nothing:
                        state.apply(update, hop.target)
                    elif update is not None:
                        self._undo.push(self.change(update, hop.target))
                if not from_nothing and hop.target.kind != "fence":
                    self._commit = hop.target
        finally:
            fetcher.close()
        if from_nothing:
            context.report.resynced = self._commit is not None
            self.replace(state, hops[-1].target)
            self._undo.clear()
            self._commit = hops[-1].target

    @staticmethod
    def _prepare(state: MemoryState, hop: Hop, fetcher: RouteFetcher, context: SyncContext) -> Update | None:
        """One hop, but for the change that it makes to the arrays of `state`, if it makes one."""
        try:
            if hop.base is None:
                state.load_anchor(hop, fetcher, collected=was_collected(context.log, hop), progress=context.progress)
                context.report.fetched(entry for entry in hop.files if (entry.name or "").endswith(".safetensors"))
                return None
            if not hop.files:
                state.relabel(hop.target)
                return None
            update = state.resolve(hop, fetcher)
            context.report.fetched(hop.files)
            return update
        except (DataDamaged, DataMissing, VersionGone) as error:
            raise HopFailed(hop, error, is_data_lost=True) from error
        except (ChainError, DeltaError, StateError) as error:
            raise HopFailed(hop, error) from error

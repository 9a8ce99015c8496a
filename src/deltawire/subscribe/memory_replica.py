"""The model in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..chain.memory_state import MemoryState, Undo
from ..chain.restore import Hop
from ..errors import ChainError, DataDamaged, DataMissing, DeltaError, StateError, VersionGone
from ..format.records import Commit
from .journey import Journey, RouteFetcher
from .routes import HopFailed, was_collected
from .undo import UndoLog


class MemoryReplica:
    """Arrays that are changed in place from version to version, hop by hop, each hop whole or not at all.

    A way that begins with a whole checkpoint is gone in memory of its own, and the old arrays are let go when it has led to the target:
    so a resync needs room for two states, and the old version is at hand until the new one is.
    """

    def __init__(self, *, threads: int | None = None, undo_bytes: int | None = None) -> None:
        self._threads = threads
        self._state = MemoryState(threads=threads)
        self._commit: Commit | None = None
        self._undo = UndoLog(undo_bytes)

    @property
    def commit(self) -> Commit | None:
        return self._commit

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return self._state

    def move(self, target: Commit, journey: Journey) -> None:
        spoilt = False
        while True:
            back = None if spoilt else self._undo.way_back(target)
            if back is not None:
                with journey.report.watch.phase("apply"):
                    self._go_back(back, target)
                return
            have = None if spoilt or self._state.commit is None else journey.log.ref(self._state.commit)
            with journey.report.watch.phase("find"):
                hops = journey.routes.find(have, target)
            try:
                self._walk(hops, journey)
            except HopFailed as failure:
                if isinstance(failure.error, StateError) and failure.hop.source != "skip" and hops[0].base is not None:
                    spoilt = True  # not what its commit says: memory rots, and arrays can be written to
                else:
                    journey.routes.avoid(failure)
                continue
            journey.report.hops += len(hops)
            return

    def close(self) -> None:
        """Forget the way back. The arrays live on for as long as anybody holds them."""
        self._undo.clear()

    def _go_back(self, steps: Sequence[Undo], target: Commit) -> None:
        for step in steps:
            self._state.relabel(step.after)  # it may have got another number since, by a fence or a rewind
            self._state.undo(step)
            self._undo.pop()
            if step.before.kind != "fence":
                self._commit = step.before
        self._state.relabel(target)
        self._commit = target

    def _walk(self, hops: Sequence[Hop], journey: Journey) -> None:
        from_nothing = bool(hops) and hops[0].base is None
        state = MemoryState(threads=self._threads) if from_nothing else self._state
        fetcher = journey.route_fetcher(hops)
        try:
            for hop in hops:
                undo = self._take(state, hop, fetcher, journey)
                if not from_nothing:
                    if undo is not None:
                        self._undo.push(undo)
                    if hop.target.kind != "fence":
                        self._commit = hop.target
        finally:
            fetcher.close()
        if from_nothing:
            journey.report.resynced = self._commit is not None
            self._undo.clear()
            self._state, self._commit = state, hops[-1].target

    @staticmethod
    def _take(state: MemoryState, hop: Hop, fetcher: RouteFetcher, journey: Journey) -> Undo | None:
        """One hop; returns what leads back, if anything was changed."""
        try:
            if hop.base is None:
                state.load_anchor(hop, fetcher, collected=was_collected(journey.log, hop), progress=journey.progress)
                journey.report.fetched(entry for entry in hop.files if (entry.name or "").endswith(".safetensors"))
                return None
            if not hop.files:
                state.relabel(hop.target)
                return None
            update = state.resolve(hop, fetcher)
            journey.report.fetched(hop.files)
        except (DataDamaged, DataMissing, VersionGone) as error:
            raise HopFailed(hop, error, is_data_lost=True) from error
        except (ChainError, DeltaError, StateError) as error:
            raise HopFailed(hop, error) from error
        with journey.report.watch.phase("apply"):
            return state.apply(update, hop.target)

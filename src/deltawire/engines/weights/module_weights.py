"""The weights of a module: changed in place, or dequantised from a quantised chain."""

from __future__ import annotations

from collections.abc import Mapping

from ...chain.memory_state import MemoryState, Update
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ...subscribe.prepared_swap import PreparedSwap
from ...subscribe.sync_context import SyncContext
from .dequantised import DequantisedWeights, holds_codes
from .host_copy import HostCopyWeights
from .in_place import InPlaceWeights
from .live_tensors import LiveTensors

Weights = InPlaceWeights | HostCopyWeights | DequantisedWeights


class ModuleWeights:
    """A module's weights, held in the way that suits each version.

    If a version was quantised and the module holds floating-point weights, they are dequantised. Otherwise the module holds the published
    tensors themselves. A module may change: a model of compressed-tensors holds codes until its first forward pass. The next sync then
    loads a full checkpoint.

    Parameters
    ----------
    tensors
        The module's tensors.
    plain
        The weights of versions whose tensors the module holds as they are.
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, tensors: LiveTensors, plain: InPlaceWeights | HostCopyWeights, *, threads: int | None = None) -> None:
        self._tensors = tensors
        self._plain = plain
        self._dequantised = DequantisedWeights(tensors, threads=threads)
        self.current: Weights = plain
        """How the module's weights are held now."""

    @property
    def state(self) -> MemoryState:
        return self.current.state

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        chosen, now = self._choose(target), self.current.state.commit
        if chosen is not self.current and (now is None or now.recipe == target.recipe):
            chosen.forget()  # the module has another form than before
            self.current = chosen
            return False
        return self.current.inspect(target, context)

    def new_update(self) -> Update:
        return self.current.new_update()

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        return self.current.still_hold(digests)

    def check_written(self, update: Update) -> None:
        self.current.check_written(update)

    def check_all(self, commit: Commit) -> None:
        self.current.check_all(commit)

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        chosen = self._choose(target)
        return _Replacement(self, chosen, chosen.replacement(state, target))

    def forget(self) -> None:
        self.current.forget()

    def _choose(self, target: Commit) -> Weights:
        return self._plain if target.recipe is None or holds_codes(self._tensors.now()) else self._dequantised


class _Replacement:
    """Replaces the weights, and from then on holds them in the chosen way."""

    def __init__(self, weights: ModuleWeights, chosen: Weights, replacement: PreparedSwap) -> None:
        self._weights = weights
        self._chosen, self._before = chosen, weights.current
        self._replacement = replacement

    def apply(self) -> None:
        self._replacement.apply()
        self._weights.current = self._chosen

    def confirm(self, *, full: bool) -> None:
        self._replacement.confirm(full=full)

    def revert(self) -> None:
        self._weights.current = self._before
        self._replacement.revert()

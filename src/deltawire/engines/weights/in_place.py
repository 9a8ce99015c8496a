"""Live weights that the codec can reach: they are themselves the state that deltas are decoded against, and there is no copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...chain.memory_state import MemoryState, Update
from ...codec.bits import on_gpu
from ...delta.prepared import PreparedUpdate
from ...errors import BaseMismatch, ResultMismatch
from ...format.delta_file import DeltaBytes
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ...subscribe.prepared_swap import PreparedSwap
from ...subscribe.sync_context import SyncContext
from ...tensors.bits import tensor_bits
from ...tensors.gpu_handover import GpuHandover
from ...tensors.module_tensors import tied_names
from ...tensors.state import codec_for, state_digest
from .fit import check_fits
from .live_tensors import LiveTensors, as_bits, check_digest, check_none_removed

if TYPE_CHECKING:
    import torch

Tensors = dict[str, Any]


class InPlaceWeights:
    """A module's weights on the CPU or on one GPU that the codec works on. They are changed in place.

    Decoding reads every weight of the tensors that a delta changes, and compares them with their digest. If other code has changed one of
    these weights, decoding notices it before anything is written, and the weights are loaded from a full checkpoint. A changed weight
    elsewhere is noticed when a swap is confirmed in full. That swap fails and cannot be reverted, so the engine is quarantined until the
    next sync has loaded a full checkpoint.

    Parameters
    ----------
    tensors
        The module's tensors.
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, tensors: LiveTensors, *, threads: int | None = None) -> None:
        self.state = MemoryState(threads=threads)
        self._tensors = tensors
        self._threads = threads
        self._is_unknown = False
        """Whether a swap failed and could not be reverted."""

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        if self.state.commit is None and not self._is_unknown:
            found = self._tensors.find_version(target, context, self.digest)
            if found is not None:
                self.adopt(found[1], found[1], found[0])
        return not self._follow_replaced_parameters()

    def new_update(self) -> Update:
        return InPlaceUpdate(self._tensors.now(), self._threads)

    def live(self) -> Tensors:
        """Return all tensors of the state as they are now: those of the module, and the others that are kept."""
        return self._tensors.complete(self.state)

    def digest(self, tensors: Mapping[str, Any]) -> Digest:
        """Return the digest of live tensors. A GPU computes it on a separate stream, so that generation continues."""
        with GpuHandover(tensors).on_side_stream():
            return state_digest(tensors, threads=self._threads)

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        return all(self.digest(self.state.segment(entry)) == digest for entry, digest in digests.items())

    def check_written(self, update: Update) -> None:
        """Raise `ResultMismatch` unless the module still uses the tensors that were written to."""
        for name, tensor in self.live().items():
            if tensor_bits(name, tensor).memory != tensor_bits(name, self.state.writable[name]).memory:
                raise ResultMismatch(f"tensor {name!r} of the module was replaced while it was being changed.")

    def check_all(self, commit: Commit) -> None:
        check_digest(self.digest(self.live()), commit)

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        arrays = dict(state.writable)
        return _Exchange(self, self._tensors.for_checkpoint(arrays), arrays, target)

    def forget(self) -> None:
        self.state = MemoryState(threads=self._threads)
        self._is_unknown = True

    def adopt(self, live: Mapping[str, torch.Tensor], arrays: Mapping[str, Any], commit: Commit) -> None:
        """Make the live tensors the state, together with the tensors that the module does not have."""
        self.state = MemoryState(threads=self._threads)
        self.state.adopt({name: live.get(name, array) for name, array in arrays.items()}, commit)
        self._is_unknown = False

    def _follow_replaced_parameters(self) -> bool:
        """Adopt parameters that replaced others since the last update. Decoding checks what they hold. Returns whether there were any."""
        arrays = self.state.writable
        live = {name: tensor for name, tensor in self._tensors.now().items() if name in arrays}
        check_none_removed((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), live)
        if self.state.commit is None or all(live[name] is arrays[name] for name in live):
            return False
        check_fits(live, {name: _shape_and_type(name, arrays[name]) for name in live}, keep_others=False)
        self.adopt(live, arrays, self.state.commit)
        return True


class InPlaceUpdate(PreparedUpdate):
    """An update that a GPU decodes on a separate stream, so that generation does not wait for it.

    Some of its parts may change only tensors that the module does not have, which are on the host. The module's tensors decide which codec
    works.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], threads: int | None) -> None:
        super().__init__(threads=threads)
        first = [tensor_bits(name, tensor) for name, tensor in itertools.islice(live.items(), 1)]  # all are on one device
        self._resolution = codec_for(first).deferred_resolution(self._threads)

    def add(self, state: Any, delta: DeltaBytes) -> tuple[Digest, Digest]:
        with GpuHandover(state).on_side_stream():
            return super().add(state, delta)


class _Exchange:
    """Exchanges a full checkpoint with the live weights, tensor by tensor. The old weights are kept until the new ones are confirmed."""

    def __init__(self, weights: InPlaceWeights, live: Mapping[str, torch.Tensor], arrays: Tensors, target: Commit) -> None:
        self._weights = weights
        self._live = {name: live[name] for name in arrays if name in live}
        self._arrays = arrays
        self._target = target
        self._old_state = weights.state
        tied = tied_names(self._live)
        self._pairs = [(as_bits(tensor), arrays[name]) for name, tensor in self._live.items() if name not in tied]
        self._exchanged = 0
        self._before = weights.digest(self._live)

    def apply(self) -> None:
        for live, array in self._pairs:
            self._exchanged += 1
            _exchange(live, array)
        self._weights.adopt(self._live, self._arrays, self._target)

    def confirm(self, *, full: bool) -> None:
        """Read every weight, always: a module of unknown weights cannot be confirmed with less."""
        self._weights.check_all(self._target)

    def revert(self) -> None:
        self._weights.state = self._old_state
        for live, array in self._pairs[: self._exchanged]:
            _exchange(live, array)
        self._exchanged = 0
        if self._weights.digest(self._live) != self._before:
            raise BaseMismatch("the live weights are not what they were before the swap.")


def _exchange(live: torch.Tensor, array: NDArray[Any]) -> None:
    """Exchange the bits of a tensor on any device with those of an array."""
    import torch

    kept = live.to("cpu", copy=True)
    bits = array.view(f"i{array.itemsize}")
    live.copy_(torch.from_numpy(bits))
    np.copyto(bits, kept.numpy())


def _shape_and_type(name: str, tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array. For a tensor on a GPU only shape and type are right, not the values."""
    found = tensor_bits(name, tensor)
    bits = found.bits
    return np.broadcast_to(np.zeros((), found.dtype.numpy), found.shape) if on_gpu(bits) else bits.view(found.dtype.numpy)

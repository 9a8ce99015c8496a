"""Live weights that the codec cannot reach: deltas are decoded against a copy on the host, and patches go to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...chain.memory_state import MemoryState, Update
from ...codec.bits import in_host_memory
from ...delta.patch import ResolvedPatch, TensorPatch
from ...delta.resolve import resolve_file
from ...errors import BaseMismatch, CorruptDelta, ResultMismatch
from ...format import delta_file
from ...format.delta_file import DeltaBytes
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ...subscribe.prepared_swap import PreparedSwap
from ...subscribe.sync_context import SyncContext
from ...tensors.bits import tensor_bits
from ...tensors.state import batches, state_digest
from ...tensors.torch_types import to_torch
from .live_tensors import LiveTensors, as_bits, check_digest, check_none_removed

if TYPE_CHECKING:
    import torch

Arrays = dict[str, NDArray[Any]]


class HostCopyWeights:
    """A module's weights on any device or several, with a copy on the host.

    The copy takes as much host memory as the weights. The device holds the patches that can be undone. If other code changes a weight on
    the device, the next full confirmation notices it. Decoding does not, because it reads the copy.

    Parameters
    ----------
    tensors
        The module's tensors.
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, tensors: LiveTensors, *, threads: int | None = None) -> None:
        self.state = MemoryState(threads=threads)
        """The copy on the host."""
        self._tensors = tensors
        self._threads = threads
        self._is_unknown = False
        """Whether a swap failed and could not be reverted."""
        self._memory: dict[str, int] = {}
        """The addresses of the module's tensors at the last look."""

    def inspect(self, target: Commit, context: SyncContext) -> bool:
        if self.state.commit is None and not self._is_unknown:
            found = self._tensors.find_version(target, context, self.digest)
            if found is not None:
                self.adopt({name: host_copy(tensor) for name, tensor in found[1].items()}, found[0])
        live = self._tensors.now()
        check_none_removed(self._memory.keys() & self.state.writable.keys(), live)
        before, self._memory = self._memory, {name: tensor.data_ptr() for name, tensor in live.items()}
        return before == self._memory  # kept steps write to the tensors that they were made for

    def new_update(self) -> Update:
        return HostCopyUpdate(self._tensors, self._threads)

    def live(self) -> dict[str, Any]:
        """Return all tensors of the state as they are now: those of the module, and the others that are kept."""
        return self._tensors.complete(self.state)

    def digest(self, tensors: Mapping[str, Any]) -> Digest:
        return digest_on_host(tensors, self._threads)

    def still_hold(self, digests: Mapping[FileEntry, Digest]) -> bool:
        """Return True: only the replica writes to the copy that deltas are decoded against."""
        return True

    def check_written(self, update: Update) -> None:
        """Read the written elements back."""
        assert isinstance(update, HostCopyUpdate)
        update.check()

    def check_all(self, commit: Commit) -> None:
        check_digest(self.digest(self.live()), commit)

    def replacement(self, state: MemoryState, target: Commit) -> PreparedSwap:
        arrays = dict(state.writable)
        return _Overwrite(self, self._tensors.for_checkpoint(arrays), arrays, target)

    def forget(self) -> None:
        self.state = MemoryState(threads=self._threads)
        self._is_unknown = True

    def adopt(self, arrays: Arrays, commit: Commit) -> None:
        """Use these arrays as the copy on the host. The module holds the same weights."""
        self.state = MemoryState(threads=self._threads)
        self.state.adopt(arrays, commit)
        self._is_unknown = False


class _Overwrite:
    """Writes a full checkpoint to the device. The old weights are kept on the host until the new ones are confirmed."""

    def __init__(self, weights: HostCopyWeights, live: Mapping[str, torch.Tensor], arrays: Arrays, target: Commit) -> None:
        self._weights = weights
        self._live = {name: live[name] for name in arrays if name in live}
        self._arrays = arrays
        self._target = target
        self._old_state = weights.state
        self._old = {name: host_copy(tensor) for name, tensor in self._live.items()}

    def apply(self) -> None:
        self._write(self._arrays)
        self._weights.adopt(self._arrays, self._target)

    def confirm(self, *, full: bool) -> None:
        """Read every weight, always: a module of unknown weights cannot be confirmed with less."""
        self._weights.check_all(self._target)

    def revert(self) -> None:
        self._weights.state = self._old_state
        self._write(self._old)
        if self._weights.digest(self._live) != self._weights.digest(self._old):
            raise BaseMismatch("the live weights are not what they were before the swap.")

    def _write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, tensor in self._live.items():
            as_bits(tensor).copy_(as_bits(to_torch(np.asarray(arrays[name], order="C"))))


@dataclass(slots=True)
class StagedPatch:
    """The changes of one tensor, on its device."""

    target: torch.Tensor
    indices: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor

    def write(self, values: torch.Tensor) -> None:
        if self.target.is_contiguous():
            self.target.view(-1).index_copy_(0, self.indices, values)
        else:
            self.target.index_put_(_coordinates(self.indices, self.target.shape), values)

    def holds(self, values: torch.Tensor) -> bool:
        flat = self.target.is_contiguous()
        found = self.target.view(-1)[self.indices] if flat else self.target[_coordinates(self.indices, self.target.shape)]
        return bool((found == values).all())


class HostCopyUpdate:
    """An update of the copy on the host and of the tensors with the same names on a device.

    Parameters
    ----------
    tensors
        The module's tensors.
    threads
        Number of threads for decoding. None means one per core.
    """

    def __init__(self, tensors: LiveTensors, threads: int | None) -> None:
        self._tensors = tensors
        self._threads = threads
        self._host: list[tuple[Arrays, ResolvedPatch, ResolvedPatch]] = []
        self._staged: list[StagedPatch] = []
        self.nbytes = 0
        self.is_applied = False

    def add(self, state: Arrays, delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against a part of the copy, and bring the patch to the device. Changes nothing."""
        import torch

        live = self._tensors.now()
        patch = resolve_file(state, delta_file.parse(delta, names=state), threads=self._threads)
        if patch.added or patch.removed:
            raise CorruptDelta("the delta adds or removes tensors, but an update of live weights can only change values.")
        old = {name: overwritten(state[name], change) for name, change in patch.changed.items()}
        self._host.append((state, patch, ResolvedPatch(patch.after, patch.before, old, {}, ())))
        for name, change in patch.changed.items():
            self.nbytes += change.indices.nbytes + 2 * change.values.nbytes
            if name in live:
                device = live[name].device
                new, before = (as_bits(to_torch(values)).to(device) for values in (change.values, old[name].values))
                self._staged.append(StagedPatch(as_bits(live[name]), torch.from_numpy(change.indices).to(device), new, before))
        return patch.before, patch.after

    def apply(self) -> None:
        """Write the new values, even if `revert` failed half-way."""
        for state, patch, _ in self._host:
            patch.apply(state, threads=self._threads)
        for staged in self._staged:
            staged.write(staged.new)
        self.is_applied = True

    def revert(self) -> None:
        """Write the old values back, even if `apply` failed half-way."""
        for state, _, patch in self._host:
            patch.apply(state, threads=self._threads)
        for staged in self._staged:
            staged.write(staged.old)
        self.is_applied = False

    def check(self) -> None:
        """Raise `ResultMismatch` unless the device holds what was written last."""
        for staged in self._staged:
            if not staged.holds(staged.new if self.is_applied else staged.old):
                raise ResultMismatch("a weight on the device differs from what was written to it.")


def digest_on_host(tensors: Mapping[str, Any], threads: int | None = None) -> Digest:
    """Return the digest of tensors on any device. A few of them at a time are copied to the host, and their digests are added."""
    total = Digest()
    for names in batches(list(tensors), lambda name: int(tensors[name].nbytes)):
        copies = {name: tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu() for name in names for tensor in [tensors[name]]}
        total += state_digest(copies, threads=threads)
    return total


def host_copy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a new array with the bits of a tensor on any device."""
    found = tensor_bits("tensor", tensor.detach().cpu().contiguous())
    array: NDArray[Any] = in_host_memory(found.bits).view(found.dtype.numpy)
    return array.copy()


def overwritten(array: NDArray[Any], change: TensorPatch) -> TensorPatch:
    """Return the values that a patch overwrites, as a patch."""
    return TensorPatch(change.indices, array.reshape(-1)[change.indices], change.shape)


def _coordinates(indices: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.unravel_index(indices, shape))

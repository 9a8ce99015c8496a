"""Live weights that are not plain CPU memory: a copy on the host is what deltas are decoded against, and patches go to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..chain.memory_state import Undo, Update
from ..delta.patch import ResolvedPatch, TensorPatch
from ..delta.resolve import resolve_delta
from ..errors import BaseMismatch, CorruptDelta, ResultMismatch
from ..format.delta_file import DeltaBytes
from ..format.digest import Digest
from ..format.records.chain_records import Commit
from ..tensors.bits import tensor_bits, to_torch
from ..tensors.state import batches, state_digest
from .base import PreparedSwap, Swap
from .live_weights import LiveReplica, LiveTensors, Tensors

if TYPE_CHECKING:
    import torch


class DeviceReplica(LiveReplica):
    """Weights on any device. Takes as much host memory as the weights, and on the device that of the patches that can be undone.

    A weight that something else has changed on the device is noticed by the next full scan, not by decoding as on the CPU.
    """

    def __init__(self, tensors: LiveTensors, swap: Swap, *, threads: int | None = None, **options: Any) -> None:
        super().__init__(tensors, swap, threads=threads, new_update=lambda: DeviceUpdate(self._tensors, threads), **options)
        self._last: DeviceUpdate | None = None

    def check_written(self) -> None:
        """Read back what was written."""
        if self._last is not None:
            self._last.check()

    def _look_again(self) -> None:
        """Updates look at the tensors anew each time; what is kept is the host's copy."""

    def digest(self, tensors: Mapping[str, Any]) -> Digest:
        """A few tensors at a time come to the host: digests add up."""
        total = Digest()
        for names in batches(list(tensors), lambda name: int(tensors[name].nbytes)):
            here = {
                name: tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu() for name in names for tensor in [tensors[name]]
            }
            total += state_digest(here, threads=self._threads)
        return total

    def change(self, update: Update, target: Commit) -> Undo:
        assert isinstance(update, DeviceUpdate)
        self._last = update
        try:
            return super().change(update, target)
        finally:
            self._last = None

    def _replacement(self, live: Mapping[str, torch.Tensor], arrays: Tensors, target: Commit) -> PreparedSwap:
        covered = {name: live[name] for name in arrays if name in live}
        return Replacement(self, covered, arrays, target)

    def _take_on(self, live: Mapping[str, torch.Tensor], arrays: Tensors, commit: Commit) -> None:
        super()._take_on({}, arrays, commit)  # the copy on the host

    def _recognised(self, named: Mapping[str, torch.Tensor], commit: Commit) -> None:
        self._take_on({}, {name: host_copy(tensor) for name, tensor in named.items()}, commit)


class Replacement:
    """A whole checkpoint takes the place of weights on a device. What was there is kept on the host until all is confirmed."""

    def __init__(self, replica: DeviceReplica, live: Mapping[str, torch.Tensor], arrays: Tensors, target: Commit) -> None:
        self._replica = replica
        self._live = live
        self._arrays = arrays
        self._target = target
        self._old = {name: host_copy(tensor) for name, tensor in live.items()}

    def apply(self) -> None:
        self._write(self._arrays)

    def confirm(self, *, full: bool) -> None:
        found = self._replica.digest({**self._arrays, **self._live})
        if found != self._target.digest:
            raise ResultMismatch(f"the live weights have digest {found}, commit {self._target.seq} has {self._target.digest}.")

    def revert(self) -> None:
        self._write(self._old)
        if self._replica.digest(self._live) != self._replica.digest(self._old):
            raise BaseMismatch("the live weights are not what they were.")

    def _write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, tensor in self._live.items():
            as_bits(tensor).copy_(as_bits(to_torch(np.asarray(arrays[name], order="C"))))


@dataclass(slots=True)
class _Staged:
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


class DeviceUpdate:
    """As `PreparedUpdate`, for a copy on the host and the tensors of the same names on a device."""

    def __init__(self, tensors: LiveTensors, threads: int | None) -> None:
        self._tensors = tensors
        self._threads = threads
        self._host: list[tuple[dict[str, NDArray[Any]], ResolvedPatch, ResolvedPatch]] = []
        self._staged: list[_Staged] = []
        self.nbytes = 0
        self.is_applied = False

    def add(self, state: dict[str, NDArray[Any]], delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against a part of the host's copy, and bring the patch to the device. Nothing is changed."""
        import torch

        live = self._tensors()
        patch = resolve_delta(state, delta, threads=self._threads)
        if patch.added or patch.removed:
            raise CorruptDelta("the delta adds or removes tensors, which has no place here.")
        old = {name: _before(state[name], change) for name, change in patch.changed.items()}
        self._host.append((state, patch, ResolvedPatch(patch.after, patch.before, old, {}, ())))
        for name, change in patch.changed.items():
            self.nbytes += change.indices.nbytes + 2 * change.values.nbytes
            if name in live:
                device = live[name].device
                new, before = (as_bits(to_torch(values)).to(device) for values in (change.values, old[name].values))
                self._staged.append(_Staged(as_bits(live[name]), torch.from_numpy(change.indices).to(device), new, before))
        return patch.before, patch.after

    def apply(self) -> None:
        """Write the new values. Does nothing if they are written."""
        if not self.is_applied:
            for state, patch, _ in self._host:
                patch.apply(state, threads=self._threads)
            for staged in self._staged:
                staged.write(staged.new)
            self.is_applied = True

    def revert(self) -> None:
        """Put the old values back, also where `apply` was cut off."""
        for state, _, patch in self._host:
            patch.apply(state, threads=self._threads)
        for staged in self._staged:
            staged.write(staged.old)
        self.is_applied = False

    def check(self) -> None:
        """`ResultMismatch` unless the tensors that the module has now hold the new values."""
        for staged in self._staged:
            if not staged.holds(staged.new):
                raise ResultMismatch("a weight on the device is not what was written to it.")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: no operation on them can change a NaN."""
    import torch

    return tensor.detach().view(getattr(torch, f"int{8 * tensor.element_size()}"))


def host_copy(tensor: torch.Tensor) -> NDArray[Any]:
    """An array of its own with the bits of a tensor on any device."""
    return _array(tensor.detach().cpu().contiguous()).copy()


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    bits = tensor_bits("tensor", tensor)
    return bits.bits.view(bits.dtype.numpy)


def _before(array: NDArray[Any], change: TensorPatch) -> TensorPatch:
    """What a patch overwrites."""
    return TensorPatch(change.indices, array.reshape(-1)[change.indices], change.shape)


def _coordinates(indices: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.unravel_index(indices, shape))

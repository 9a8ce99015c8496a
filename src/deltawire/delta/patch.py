"""A delta decoded against its base: absolute indices and values. Applying it is idempotent."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..codec.base import Codec
from ..codec.bits import Bits, Indices, on_gpu
from ..errors import DtypeMismatch, ShapeMismatch, StateNotWritable, TensorMissing
from ..format.digest import Digest
from ..tensors.bits import Tensor, TensorBits, named_bits, tensor_bits
from ..tensors.state import codec_for, thread_count
from ..tensors.torch_types import dtype_of, is_torch, to_torch

_WORTH_A_THREAD = 1 << 17
"""Elements to write from which on threads save more time than their start costs."""


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """The changed elements of one tensor. Indices and values are NumPy arrays, or torch tensors on the same GPU as the tensor."""

    indices: Indices
    """Flat (row-major) indices of the changed elements, ascending."""
    values: Tensor
    """The new values of these elements, in the tensor's own type."""
    shape: tuple[int, ...]
    """The shape of the tensor."""


@dataclass(frozen=True, slots=True)
class ResolvedPatch:
    """The changes of a delta to the state that it was made from, in absolute terms.

    A tensor whose type or shape changes is in `removed` and in `added`.
    """

    before: Digest
    """The digest of the state that the delta was made from."""
    after: Digest
    """The digest of the result. `after - before` may be added to a digest that is kept elsewhere."""
    changed: Mapping[str, TensorPatch]
    """The changed elements of each tensor that changes, by name."""
    added: Mapping[str, Tensor]
    """The tensors that the delta adds, by name."""
    removed: Sequence[str]
    """The names of the tensors that the delta removes."""

    def apply(self, state: MutableMapping[str, Tensor], *, threads: int | None = None) -> None:
        """Write the new values in place. This may be repeated, even after it was interrupted half-way.

        Names, types, shapes and writability are checked before anything is written. The old values are not checked: that was done when
        the delta was resolved. If the state is not the one that the delta was resolved against, the result is a mix of both.

        Parameters
        ----------
        state
            The state that the delta was resolved against.
        threads
            The number of threads to use; by default, as many as there are processors that this process may use.
        """
        targets: list[tuple[TensorBits, TensorPatch]] = []
        for name, patch in self.changed.items():
            if name not in state:
                raise TensorMissing(f"the state has no tensor {name!r}.")
            target = tensor_bits(name, state[name])
            if dtype_of(patch.values) != target.dtype:
                raise DtypeMismatch(f"tensor {name!r} is {target.dtype.name}, its patch is {patch.values.dtype}.")
            if target.shape != patch.shape:
                raise ShapeMismatch(f"tensor {name!r} has shape {target.shape}, its patch {patch.shape}.")
            check_writable(target)
            targets.append((target, patch))
        # The state gets copies, because the patch may be applied to another state, or again.
        added = {name: array.copy() if isinstance(array, np.ndarray) else array.clone() for name, array in self.added.items()}
        change_structure(state, added, [name for name in self.removed if name in state])
        codec = codec_for(target for target, _ in targets)
        write_all(codec, [(target.bits, *_changes_for(target, patch)) for target, patch in targets], thread_count(threads))


def write_all(codec: Codec, targets: Sequence[tuple[Bits, Indices, Bits]], threads: int) -> None:
    """Call `codec.write_elements` for all (bits, indices, values), on several threads if there is enough to do."""
    if threads == 1 or sum(len(indices) for _, indices, _ in targets) < _WORTH_A_THREAD:
        for target in targets:
            codec.write_elements(*target)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(codec.write_elements, *target) for target in targets]:
            done.result()


def check_writable(tensor: TensorBits) -> None:
    """Raise `StateNotWritable` unless each element of the tensor can be set independently of the others."""
    if tensor.is_read_only:
        raise StateNotWritable(f"tensor {tensor.name!r} is read-only.")
    if tensor.is_contiguous:
        return
    reach = tensor.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1):
        if stride < reach:
            raise StateNotWritable(f"tensor {tensor.name!r} is expanded or overlaps itself: several of its elements share memory.")
        reach += (size - 1) * stride


def change_structure(state: MutableMapping[str, Tensor], added: Mapping[str, Tensor], removed: Sequence[str]) -> None:
    """Remove tensors from a state and add others, all or nothing. New tensors are torch tensors if the state holds torch tensors."""
    if not added and not removed:
        return
    if not isinstance(state, MutableMapping):
        raise StateNotWritable("the delta adds or removes tensors, but the state is not a mutable mapping.")
    to_state = _as_torch if any(is_torch(state[name]) for name in state) else _unchanged
    old = {name: state[name] for name in (*removed, *added) if name in state}
    done: list[str] = []
    try:
        for name in removed:
            done.append(name)
            del state[name]
        for name, array in added.items():
            done.append(name)
            state[name] = to_state(array)
    except Exception as error:
        for name in reversed(done):
            if name in old:
                state[name] = old[name]
            else:
                state.pop(name, None)
        raise StateNotWritable(f"the delta adds or removes tensors, but the state refuses it: {error}") from error


def _changes_for(target: TensorBits, patch: TensorPatch) -> tuple[Indices, Bits]:
    """Return changes as the codec of the target takes them: in host memory for a target on the host, anywhere for one on a GPU."""
    indices, values = patch.indices, patch.values
    if isinstance(indices, np.ndarray) and isinstance(values, np.ndarray):
        return indices, values.view(target.dtype.bits)
    bits = named_bits(target.name, values).bits
    if on_gpu(bits) and not on_gpu(target.source):
        import torch

        return torch.as_tensor(indices).cpu().numpy(), bits.tensor.cpu().numpy().view(target.dtype.bits)
    return indices, bits


def _as_torch(array: Tensor) -> Tensor:
    return to_torch(array) if isinstance(array, np.ndarray) else array


def _unchanged(array: Tensor) -> Tensor:
    return array

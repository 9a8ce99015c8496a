"""A delta decoded against its base: absolute indices and values. Applying it is idempotent."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codec.base import Bits, Codec
from ..errors import DtypeMismatch, ShapeMismatch, StateNotWritable, TensorMissing
from ..format.digest import Digest
from ..tensors.bits import Tensor, TensorBits, dtype_of, is_torch, tensor_bits, to_torch
from ..tensors.state import codec_for, thread_count

_WORTH_A_THREAD = 1 << 17
"""Elements to write from which on starting threads costs less than it gains."""


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """The changed elements of one tensor: ascending flat (row-major) indices, and their new values in the tensor's own type.

    Arrays; or, of a tensor on a GPU, torch tensors beside it.
    """

    indices: NDArray[np.int64]
    values: NDArray[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPatch:
    """What a delta does to the state it was made from, in absolute terms.

    `before` and `after` are the digests of the two states; `after - before` may be added to a digest that is kept elsewhere.
    A tensor whose type or shape changes is in `removed` and in `added`.
    """

    before: Digest
    after: Digest
    changed: Mapping[str, TensorPatch]
    added: Mapping[str, NDArray[Any]]
    removed: Sequence[str]

    def apply(self, state: MutableMapping[str, Tensor], *, threads: int | None = None) -> None:
        """Write the new values in place. It may be repeated, also after it was cut off half-way.

        Checks names, types, shapes and writability before it writes anything, but not the values it overwrites: that was done when the
        delta was resolved. On another state than that one the result is a mix of both.
        """
        targets: list[tuple[TensorBits, Any, Any]] = []
        for name, patch in self.changed.items():
            if name not in state:
                raise TensorMissing(f"the state has no tensor {name!r}.")
            target = tensor_bits(name, state[name])
            if dtype_of(patch.values) != target.dtype:
                raise DtypeMismatch(f"tensor {name!r} is {target.dtype.name}, its patch is {patch.values.dtype}.")
            if target.shape != patch.shape:
                raise ShapeMismatch(f"tensor {name!r} has shape {target.shape}, its patch {patch.shape}.")
            check_writable(target)
            targets.append((target, patch.indices, patch.values))
        # The state's own: the patch may be applied elsewhere, or again.
        added = {name: array.copy() if isinstance(array, np.ndarray) else array.clone() for name, array in self.added.items()}
        change_structure(state, added, [name for name in self.removed if name in state])
        codec = codec_for(target for target, _, _ in targets)
        write_all(codec, [(target.bits, *_elements(target, *changes)) for target, *changes in targets], thread_count(threads))


def write_all(codec: Codec, targets: Sequence[tuple[Bits, NDArray[np.int64], Bits]], threads: int) -> None:
    """`codec.write_elements` of all (bits, indices, values), on several threads where there is enough to do."""
    if threads == 1 or sum(len(indices) for _, indices, _ in targets) < _WORTH_A_THREAD:
        for target in targets:
            codec.write_elements(*target)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(codec.write_elements, *target) for target in targets]:
            done.result()


def check_writable(tensor: TensorBits) -> None:
    """Raise `StateNotWritable` unless each element of the tensor can be set on its own."""
    if tensor.is_read_only:
        raise StateNotWritable(f"tensor {tensor.name!r} is read-only.")
    if tensor.is_contiguous:
        return
    reach = tensor.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1):
        if stride < reach:
            raise StateNotWritable(f"tensor {tensor.name!r} is expanded or overlaps itself: several of its elements are one memory.")
        reach += (size - 1) * stride


def change_structure(state: MutableMapping[str, Tensor], added: Mapping[str, NDArray[Any]], removed: Sequence[str]) -> None:
    """Take tensors out of a state and put others in, all or nothing. New ones are torch tensors if the state holds such."""
    if not added and not removed:
        return
    if not isinstance(state, MutableMapping):
        raise StateNotWritable("tensors appear or vanish, but the state is not a mutable mapping.")
    wrap = _to_torch if any(is_torch(state[name]) for name in state) else _unchanged
    old = {name: state[name] for name in (*removed, *added) if name in state}
    done: list[str] = []
    try:
        for name in removed:
            done.append(name)
            del state[name]
        for name, array in added.items():
            done.append(name)
            state[name] = wrap(array)
    except Exception as error:
        for name in reversed(done):
            if name in old:
                state[name] = old[name]
            else:
                state.pop(name, None)
        raise StateNotWritable(f"tensors appear or vanish, and the state refuses it: {error}") from error


def _elements(target: TensorBits, indices: Any, values: Any) -> tuple[Any, Any]:
    """Changes as the codec of this tensor takes them: arrays for one on the host, and for one on a GPU wherever they are."""
    if target.on_host and not isinstance(indices, np.ndarray):
        indices, values = indices.cpu().numpy(), tensor_bits(target.name, values.cpu()).bits
    return indices, values.view(target.dtype.bits) if isinstance(values, np.ndarray) else values


def _to_torch(array: Any) -> Any:
    return to_torch(array) if isinstance(array, np.ndarray) else array


def _unchanged(array: NDArray[Any]) -> NDArray[Any]:
    return array

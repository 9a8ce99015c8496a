"""The publisher's own copies of states: where they are kept, and how weights are copied there.

Copies of weights on a GPU are kept in pinned memory of the host, or on the GPU, where they are compared at the speed of its memory.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..codec import copy_elements
from ..codec.bits import Bits, BitsColumn, DeviceBits, in_gpu_memory, on_gpu
from ..dtypes import DType
from ..tensors.bits import State, Tensor, TensorPart, tensor_bits, typed
from ..tensors.casting import Casts
from ..tensors.columns import Columns
from ..tensors.gpu_handover import GpuHandover, on_side_stream
from ..tensors.state import thread_count
from .upload.segments import TensorTable

if TYPE_CHECKING:
    import torch

Arrays: TypeAlias = dict[str, Tensor]
"""Tensors by name, C-contiguous and owned by the publisher: arrays, or torch tensors on a GPU; `TensorPart`s as in `State`."""

SnapshotDevice: TypeAlias = Literal["host", "device"]
"""Where copies of weights on a GPU are kept. Copies of other weights are on the host."""


_CACHE_LINE = 64

_PIECE = 8 << 20
"""The number of bytes that are copied from a GPU through pinned memory at a time."""


def new_arrays(table: TensorTable, state: State, device: SnapshotDevice) -> Arrays:
    """Return memory for tensors of these types and shapes, each on the device of the tensor with its name in `state`, or on the host.

    Its contents are undefined.
    """
    each = zip(table.names, table.dtypes, table.shapes, strict=True)
    columns = Columns.of(state)
    if columns is not None and not columns.is_on_gpu:
        return {name: np.empty(shape, dtype.numpy) for name, dtype, shape in each}
    return {name: new_array(dtype, shape, tensor_bits(name, state[name]).bits, device) for name, dtype, shape in each}


def is_kept_like(arrays: Mapping[str, Any], state: State, device: SnapshotDevice) -> bool:
    """Return whether these arrays are where `new_arrays` would put them."""
    kept, given = Columns.of(arrays), Columns.of(state)
    if kept is not None and given is not None:  # all of each are on one device
        return kept.is_on_gpu == (device == "device" and given.is_on_gpu)
    return all(
        on_gpu(tensor_bits(name, arrays[name]).bits) == (device == "device" and on_gpu(tensor_bits(name, tensor).bits))
        for name, tensor in state.items()
    )


def are_on_gpu(state: State) -> bool:
    """Tell whether all tensors of a state are on GPUs."""
    if isinstance(next(iter(state.values()), None), np.ndarray):
        return False
    columns = Columns.of(state)
    if columns is not None:
        return columns.is_on_gpu
    return all(on_gpu(tensor_bits(name, tensor).bits) for name, tensor in state.items())


class SnapshotMemory:
    """Keeps the memory of one copy of the state that is no longer needed, so that the next copy need not allocate. Thread-safe.

    With `keeps_spare` False, it keeps nothing: use that if no further copy will be made.
    """

    def __init__(self, device: SnapshotDevice, *, keeps_spare: bool) -> None:
        self.device = device
        self._keeps_spare = keeps_spare
        self._lock = threading.Lock()
        self._spare: Arrays | None = None

    def take(self, table: TensorTable, state: State, arrays: Arrays | None = None) -> Arrays:
        """Return memory for a copy of `state`; its contents are undefined. `arrays` are used first, then the spare, if they fit."""
        if arrays is None:
            with self._lock:
                arrays, self._spare = self._spare, None
        if not arrays or TensorTable.of(arrays) != table or not is_kept_like(arrays, state, self.device):
            return new_arrays(table, state, self.device)
        return arrays

    def give_back(self, arrays: Arrays) -> None:
        """Accept memory that nothing uses now."""
        with self._lock:
            if self._keeps_spare and self._spare is None:
                self._spare = arrays


def copy_tensors(source: State, target: Mapping[str, Any], *, wait: bool = True) -> None:
    """Copy every tensor of `source` to the memory of the same name, bit for bit. A tensor of another type than that memory is cast.

    Without `wait`, a GPU may still be copying on return. Use a `GpuHandover` before another thread reads the copy.
    """
    goals = target if len(target) == len(source) else {name: target[name] for name in source}
    given, there = Columns.of(source), Columns.of(goals)
    if given is not None and there is not None and given.layout.is_like(there.layout) and not (given.is_on_gpu or there.is_on_gpu):
        copy_elements(given.bits, there.bits, thread_count(None))
        return
    if given is not None and there is not None and given.layout.is_like(there.layout) and given.is_on_gpu and there.is_on_gpu:
        _copy_on_gpu(given.bits, there.bits, wait)
        if wait:
            GpuHandover(source, goals).synchronize()
        return
    for name, tensor in source.items():
        _copy(name, tensor, target[name], wait)
    if wait:
        GpuHandover(source, goals).synchronize()


def _copy(name: str, source: Tensor | TensorPart, target: Tensor | TensorPart, wait: bool) -> None:
    goal = tensor_bits(name, target)
    to, bits = goal.bits, Casts().cast(tensor_bits(name, source), goal.dtype, goal).bits
    if on_gpu(bits) or on_gpu(to):
        _as_tensor(to).copy_(_as_tensor(bits), non_blocking=not wait)
        if on_gpu(to) and not wait:
            _keep(to)
    else:
        np.copyto(to, bits)


def _copy_on_gpu(source: BitsColumn, target: BitsColumn, wait: bool) -> None:
    """Copy many tensors on GPUs with few kernels."""
    import torch

    goals = [_as_tensor(bits) for bits in target]
    torch._foreach_copy_(goals, [_as_tensor(bits) for bits in source], non_blocking=not wait)
    if not wait:
        for bits in target:
            _keep(in_gpu_memory(bits))


def _keep(bits: DeviceBits) -> None:
    """Keep memory that was allocated on another stream from being reused there before the current stream is done with it."""
    from ..codec.gpu.device import gpu_at

    gpu = gpu_at(bits.device)
    gpu.keep(bits.tensor, gpu.current())


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy on the same device."""
    return tensor.copy() if isinstance(tensor, np.ndarray | TensorPart) else tensor.detach().clone()


class ScratchMemory:
    """Memory for copies of segments, one after the other.

    The system clears new memory page by page, which takes several times as long as the copy. So this memory is used again.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def reserve(self, size: int) -> None:
        """Have at least `size` bytes ready, so that a copy takes no longer than necessary. Copies that were made before are lost."""
        if self._memory.size < size:
            self._memory = np.empty(0, np.uint8)  # frees it before more is allocated
            self._memory = np.empty(size, np.uint8)
            self._memory.fill(0)

    def copy(self, state: State) -> Arrays:
        """Return a copy of tensors or parts of tensors, on their devices. Those on the host are valid until the next call.

        The tensors are contiguous, as those of a baseline are.
        """
        on_host = {name: array for name, tensor in state.items() if isinstance(array := _elements(tensor), np.ndarray)}
        ends = np.cumsum([_room(array) for array in on_host.values()], dtype=np.int64)
        starts = dict(zip(on_host, [0, *ends.tolist()], strict=False))
        if on_host and self._memory.size < ends[-1]:
            self.reserve(int(ends[-1]))
        copies: Arrays = {}
        for name, tensor in state.items():
            array = on_host.get(name)
            if array is None:
                copies[name] = copy_of(tensor)
                continue
            copied = self._memory[starts[name] : starts[name] + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copied.view(f"u{array.itemsize}"), array.view(f"u{array.itemsize}"))
            copies[name] = dataclasses.replace(tensor, elements=copied) if isinstance(tensor, TensorPart) else copied
        return copies


def scratch_size(state: State) -> int:
    """Return how many bytes `ScratchMemory` needs for a copy of a state."""
    return sum(_room(array) for tensor in state.values() if isinstance(array := _elements(tensor), np.ndarray))


def _room(array: NDArray[Any]) -> int:
    return array.nbytes + -array.nbytes % _CACHE_LINE


def _elements(tensor: Tensor | TensorPart) -> Tensor:
    return tensor.elements if isinstance(tensor, TensorPart) else tensor


def host_array(name: str, array: Tensor) -> NDArray[Any]:
    """Return a NumPy array as it is, or copy a tensor from a GPU. The tensor must be complete, because a side stream reads it."""
    if isinstance(array, np.ndarray):
        return array
    from ..codec.gpu.device import gpu_at

    tensor = tensor_bits(name, array)
    there = _as_tensor(tensor.bits).view(-1)
    found = np.empty(tensor.shape, tensor.dtype.numpy)
    flat = found.reshape(-1).view(f"i{found.itemsize}")
    step = _PIECE // found.itemsize
    pinned = gpu_at(there.device).pinned(min(step, flat.size), there.dtype)
    with on_side_stream({name: array}) as wait:
        for start in range(0, flat.size, step):
            piece = there[start : start + step]
            pinned[: piece.numel()].copy_(piece, non_blocking=True)
            wait()
            flat[start : start + step] = pinned.numpy()[: piece.numel()]
    return found


def new_array(dtype: DType, shape: tuple[int, ...], like: Bits, device: SnapshotDevice) -> Tensor:
    """Return memory for a copy of a tensor, where copies of tensors on the device of `like` are kept. Its contents are undefined."""
    if not on_gpu(like):
        return np.empty(shape, dtype.numpy)
    import torch

    from ..codec.gpu.device import gpu_at

    gpu, integer = gpu_at(like.device), getattr(torch, f"int{dtype.width}")
    if device == "device":
        return typed(DeviceBits(gpu.empty(math.prod(shape), integer)), dtype, shape)
    return gpu.pinned(math.prod(shape), integer).numpy().view(dtype.numpy).reshape(shape)


def _as_tensor(bits: Bits) -> torch.Tensor:
    """Return bits as a torch tensor of signed integers, without a copy."""
    if on_gpu(bits):
        return bits.elements()
    import torch

    return torch.from_numpy(bits.view(f"i{bits.itemsize}"))

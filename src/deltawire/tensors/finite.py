"""Finding weights that are NaN or infinite, at the speed of memory: the largest bit patterns of a tensor tell whether it has any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..codec import reaching
from ..codec.bits import DeviceBits, HostBits, in_host_memory, on_gpu
from ..dtypes import DType, first_nonfinite
from .bits import State, TensorBits, state_bits
from .columns import Columns
from .state import thread_count
from .torch_types import torch_dtype

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 18
"""Bytes per step. A step reads them twice, the second time from the cache."""

_WORTH_A_THREAD = 64 << 20
"""Bytes from which on threads save more time than their start costs."""


_OnGpu: TypeAlias = tuple[str, DType, DeviceBits]
"""A tensor on a GPU: its name, its type, its bits."""


def count_nonfinite(state: State, *, threads: int | None = None) -> dict[str, int]:
    """Return how many elements of each tensor are NaN or infinite. Tensors without such elements are not listed.

    Every element is read once, and nothing is copied. Integer tensors are never listed.

    Parameters
    ----------
    state
        Names to NumPy arrays or torch tensors, on the CPU or a GPU.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    columns = Columns.of(state)
    if columns is not None and not columns.is_on_gpu:
        tensors = _suspects(columns, thread_count(threads))
    else:
        tensors = [tensor for tensor in state_bits(state) if tensor.size and first_nonfinite(tensor.dtype) is not None]
    on_host = [tensor for tensor in tensors if not on_gpu(tensor.source)]
    on_device = [(tensor.name, tensor.dtype, tensor.source) for tensor in tensors if on_gpu(tensor.source)]
    counts = {tensor.name: _count_on_host(tensor) for tensor in _nonfinite_on_host(on_host, thread_count(threads))}
    return counts | {name: _count_on_gpu(dtype, bits) for name, dtype, bits in _nonfinite_on_gpu(on_device)}


def _suspects(columns: Columns, threads: int) -> list[TensorBits]:
    """Return the tensors that have a nonfinite element, and those that are not contiguous."""
    masks, limits = columns.layout.magnitudes
    numbers = np.flatnonzero((limits > 0) & (columns.layout.sizes > 0))
    contiguous = columns.bits.take(numbers).are_each_plain
    plain = numbers[contiguous]
    found = plain[reaching(columns.take(plain), masks[plain], limits[plain], threads)]
    return [columns[number] for number in sorted([*found.tolist(), *numbers[~contiguous].tolist()])]


def _nonfinite_on_host(tensors: Sequence[TensorBits], threads: int) -> list[TensorBits]:
    """Return the tensors that have a nonfinite element."""
    if threads > 1 and sum(tensor.nbytes for tensor in tensors) >= _WORTH_A_THREAD:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:  # pools refuse work once the main thread has ended
            return [tensor for tensor, found in zip(tensors, pool.map(_has_nonfinite, tensors), strict=True) if found]
    return [tensor for tensor in tensors if _has_nonfinite(tensor)]


def _has_nonfinite(tensor: TensorBits) -> bool:
    limits = first_nonfinite(tensor.dtype)
    assert limits is not None
    signed = f"i{tensor.dtype.itemsize}"
    return any(int(piece.view(signed).max()) >= limits[0] or int(piece.max()) >= limits[1] for piece in _pieces(tensor))


def _count_on_host(tensor: TensorBits) -> int:
    limits = first_nonfinite(tensor.dtype)
    assert limits is not None
    sign = 1 << (tensor.dtype.width - 1)
    return sum(int(np.count_nonzero((piece >= limits[1]) | ((piece >= limits[0]) & (piece < sign)))) for piece in _pieces(tensor))


def _pieces(tensor: TensorBits) -> Iterator[HostBits]:
    bits = in_host_memory(tensor.bits)
    if not bits.flags.c_contiguous:
        yield bits
        return
    flat, step = bits.reshape(-1), _PIECE // bits.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def _nonfinite_on_gpu(tensors: Sequence[_OnGpu]) -> list[_OnGpu]:
    """Return the tensors that have a nonfinite element."""
    if not tensors:
        return []
    import torch

    verdicts = []
    for _, dtype, bits in tensors:
        numbers = _numbers(dtype, bits)
        if dtype.width == 8:
            verdicts.append(~numbers.isfinite().all())
        else:  # one pass without a copy: a NaN becomes both the smallest and the largest
            low, high = torch.aminmax(numbers)
            verdicts.append(~(low.isfinite() & high.isfinite()))
    found = torch.stack([verdict.to(verdicts[0].device) for verdict in verdicts]).tolist()
    return [tensor for tensor, is_found in zip(tensors, found, strict=True) if is_found]


def _count_on_gpu(dtype: DType, bits: DeviceBits) -> int:
    return int((~_numbers(dtype, bits).isfinite()).sum())


def _numbers(dtype: DType, bits: DeviceBits) -> torch.Tensor:
    """Return a tensor on a GPU in its own type; 8-bit floats, with which torch cannot compute, as float32."""
    numbers = bits.elements().view(torch_dtype(dtype))
    return numbers.float() if dtype.width == 8 else numbers

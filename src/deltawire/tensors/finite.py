"""Finding weights that are NaN or infinite, at the speed of memory: the largest bit patterns of a tensor tell whether it has any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..codec import reaching
from ..codec.bits import BitsColumn, DeviceBits, HostBits, in_gpu_memory, in_host_memory, on_gpu
from ..dtypes import DType, first_nonfinite
from .bits import State, TensorBits, state_bits
from .columns import Columns, magnitude_limit
from .state import thread_count
from .torch_types import torch_dtype

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 18
"""Bytes per step. A step reads them twice, the second time from the cache."""

_WORTH_A_THREAD = 64 << 20
"""Bytes from which on threads save more time than their start costs."""


def count_nonfinite(state: State, *, threads: int | None = None) -> dict[str, int]:
    """Return how many elements of each tensor are NaN or infinite. Tensors without such elements are not listed.

    Every element is read once, and nothing is copied. Integer tensors are never listed. Each GPU looks at all its tensors in one pass, and
    is waited for once; a second time only if there are such elements.

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
    elif columns is not None:
        tensors = [columns[number] for number in _nonfinite_columns(columns).tolist()]
    else:
        tensors = [tensor for tensor in state_bits(state) if tensor.size and first_nonfinite(tensor.dtype) is not None]
    on_host = [tensor for tensor in tensors if not on_gpu(tensor.source)]
    on_device = [tensor for tensor in tensors if on_gpu(tensor.source)]
    if columns is None:
        on_device = _nonfinite_on_gpus(on_device)
    counts = {tensor.name: _count_on_host(tensor) for tensor in _nonfinite_on_host(on_host, thread_count(threads))}
    return counts | _counts_on_gpus(on_device)


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


def _nonfinite_columns(columns: Columns) -> NDArray[np.int64]:
    """Return the numbers of tensors on one GPU that have a nonfinite element."""
    masks, limits = columns.layout.magnitudes
    numbers = np.flatnonzero((limits > 0) & (columns.layout.sizes > 0))
    dtypes = [columns.layout.dtypes[number] for number in numbers.tolist()]
    return numbers[_are_nonfinite(columns.take(numbers), dtypes, masks[numbers], limits[numbers])]


def _nonfinite_on_gpus(tensors: Sequence[TensorBits]) -> list[TensorBits]:
    """Return the tensors that have a nonfinite element."""
    by_device: dict[torch.device, list[TensorBits]] = {}
    for tensor in tensors:
        assert on_gpu(tensor.source)
        by_device.setdefault(tensor.source.device, []).append(tensor)
    found = []
    for device, own in by_device.items():
        dtypes = [tensor.dtype for tensor in own]
        masks, limits = np.array([magnitude_limit(dtype) for dtype in dtypes], np.uint64).T
        bits = [in_gpu_memory(tensor.source) for tensor in own]
        addresses = np.array([each.address for each in bits], np.uint64)
        sizes, itemsizes = np.array([each.size for each in bits], np.int64), np.array([each.itemsize for each in bits], np.uint8)
        contiguous = np.array([each.is_contiguous for each in bits], np.bool_)
        column = BitsColumn(bits, lambda each: each, addresses, sizes, itemsizes, contiguous, device)
        found += [own[number] for number in np.flatnonzero(_are_nonfinite(column, dtypes, masks, limits)).tolist()]
    return found


def _are_nonfinite(column: BitsColumn, dtypes: Sequence[DType], masks: NDArray[np.uint64], limits: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Tell which tensors on one GPU have a nonfinite element. A kernel reads all that it can read; torch looks at each of the others."""
    if not len(column):
        return np.zeros(0, np.bool_)
    import torch

    from ..codec.gpu.device import gpu_at, has_kernels
    from ..codec.gpu.find_large_elements import ALIGNMENT, start_reaching

    assert column.device is not None
    readable = column.are_contiguous & (column.addresses % ALIGNMENT == 0)
    if column.device.type == "cuda" and not has_kernels(column.device):
        readable[:] = False
    here, elsewhere = np.flatnonzero(readable), np.flatnonzero(~readable)
    gpu = gpu_at(column.device)
    with gpu.active():
        verdicts = [_has_nonfinite_on_gpu(dtypes[number], in_gpu_memory(column[number])).view(1) for number in elsewhere.tolist()]
        if here.size:
            own = column.take(here)
            verdicts.append(start_reaching(own.addresses, own.sizes, own.itemsizes, masks[here], limits[here], gpu) != 0)
        found = np.zeros(len(column), np.bool_)
        found[np.concatenate([elsewhere, here])] = torch.cat(verdicts).cpu().numpy()
    return found


def _has_nonfinite_on_gpu(dtype: DType, bits: DeviceBits) -> torch.Tensor:
    """Return a truth value on the GPU, without waiting."""
    import torch

    numbers = _numbers(dtype, bits)
    if dtype.width == 8:
        return ~numbers.isfinite().all()
    low, high = torch.aminmax(numbers)  # one pass without a copy: a NaN becomes both the smallest and the largest
    return ~(low.isfinite() & high.isfinite())


def _counts_on_gpus(tensors: Sequence[TensorBits]) -> dict[str, int]:
    """Return how many elements of tensors are nonfinite."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for tensor in tensors:
        assert on_gpu(tensor.source)
        count = (~_numbers(tensor.dtype, tensor.source).isfinite()).sum()
        by_device.setdefault(count.device, {})[tensor.name] = count
    counts: dict[str, int] = {}
    for own in by_device.values():
        import torch

        counts.update(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
    return counts


def _numbers(dtype: DType, bits: DeviceBits) -> torch.Tensor:
    """Return a tensor on a GPU in its own type; 8-bit floats, with which torch cannot compute, as float32."""
    numbers = bits.elements().view(torch_dtype(dtype))
    return numbers.float() if dtype.width == 8 else numbers

"""Finding weights that are NaN or infinite, at the speed of memory: by the largest bit patterns of each tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..codec.base import Bits
from ..dtypes import DType
from .bits import State, TensorBits, state_bits, torch_dtype
from .state import thread_count

_PIECE = 1 << 18
"""Bytes that are looked at a second time while they are still in the cache."""

_WORTH_A_THREAD = 64 << 20
"""Bytes from which on starting threads costs less than it gains."""


def count_nonfinite(state: State, *, threads: int | None = None) -> dict[str, int]:
    """Return how many elements of each tensor are NaN or infinite; tensors that have none are not listed.

    It reads every element once, and makes no copies. Integers are never listed.
    """
    tensors = [tensor for tensor in state_bits(state) if tensor.size and _limits(tensor.dtype) is not None]
    on_host = [tensor for tensor in tensors if tensor.on_host]
    found = [*_among_host(on_host, thread_count(threads)), *_among_gpu([tensor for tensor in tensors if not tensor.on_host])]
    return {tensor.name: _count(tensor) for tensor in found}


def _limits(dtype: DType) -> tuple[int, int] | None:
    """The first bit patterns that are no numbers: of those that signed integers count as positive, and of the largest unsigned ones.

    Infinities and NaNs are the largest magnitudes there are. e4m3fn has no infinity and one NaN; e8m0 has neither sign nor infinity.
    """
    sign = 1 << (dtype.width - 1)
    if dtype.name == "F8_E4M3":
        return 0x7F, 0xFF
    if dtype.name == "F8_E8M0":
        return sign, 0xFF
    if dtype.exponent_bits:
        first = ((1 << dtype.exponent_bits) - 1) << dtype.exponent_shift
        return first, sign | first
    return None


def _among_host(tensors: Sequence[TensorBits], threads: int) -> list[TensorBits]:
    if threads > 1 and sum(tensor.nbytes for tensor in tensors) >= _WORTH_A_THREAD:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:  # pools refuse work once the main thread has ended
            return [tensor for tensor, found in zip(tensors, pool.map(_has_any, tensors), strict=True) if found]
    return [tensor for tensor in tensors if _has_any(tensor)]


def _has_any(tensor: TensorBits) -> bool:
    limits = _limits(tensor.dtype)
    assert limits is not None
    signed = f"i{tensor.dtype.itemsize}"
    return any(int(piece.view(signed).max()) >= limits[0] or int(piece.max()) >= limits[1] for piece in _pieces(tensor.bits))


def _count(tensor: TensorBits) -> int:
    if not tensor.on_host:
        return int((~_numbers(tensor).isfinite()).sum())
    limits = _limits(tensor.dtype)
    assert limits is not None
    sign = 1 << (tensor.dtype.width - 1)
    return sum(int(np.count_nonzero((piece >= limits[1]) | ((piece >= limits[0]) & (piece < sign)))) for piece in _pieces(tensor.bits))


def _pieces(bits: Bits) -> Iterator[Bits]:
    if not bits.flags.c_contiguous:
        yield bits
        return
    flat, step = bits.reshape(-1), _PIECE // bits.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def _among_gpu(tensors: Sequence[TensorBits]) -> list[TensorBits]:
    if not tensors:
        return []
    import torch

    verdicts = []
    for tensor in tensors:
        numbers: Any = _numbers(tensor)
        if tensor.dtype.width == 8:
            verdicts.append(~numbers.isfinite().all())
        else:  # one pass without a copy: a NaN becomes both the smallest and the largest
            low, high = torch.aminmax(numbers)
            verdicts.append(~(low.isfinite() & high.isfinite()))
    found = torch.stack([verdict.to(verdicts[0].device) for verdict in verdicts]).tolist()
    return [tensor for tensor, is_found in zip(tensors, found, strict=True) if is_found]


def _numbers(tensor: TensorBits) -> Any:
    """A tensor on a GPU in its own type, or in one that torch computes with."""
    bits: Any = tensor.bits
    numbers = bits.elements().view(torch_dtype(tensor.dtype))
    return numbers.float() if tensor.dtype.width == 8 else numbers

"""Work on whole states: their digest, the codec that they need, and batches of their tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ..codec import default_codec
from ..codec.base import Codec
from ..codec.bits import on_gpu
from ..format.digest import Digest
from .bits import State, TensorBits, keys_of, state_bits
from .columns import Columns

Progress = Callable[[int], None]
"""A function that is called with the number of bytes of weights processed since its last call."""

_BATCH_BYTES = 1 << 29
"""Bytes of weights that the codec gets at a time. Between batches Python reports progress and handles signals."""

_BATCH_TENSORS = 512
"""The most tensors that the codec gets at a time. Python frees the objects of a batch before its garbage collector tracks them for long."""


def state_digest(state: State, *, threads: int | None = None) -> Digest:
    """Return the digest of a state (docs/format.md §2).

    It is equal for equal names, types, shapes and bits, whatever their order or memory layout. It is linear: if
    `patch.after - patch.before` of a resolved patch is added to the digest of its base, the sum is the digest of its result.

    Parameters
    ----------
    state
        Names to NumPy arrays or torch tensors, on the CPU or a GPU.
    threads
        The number of threads to use; by default, as many as there are processors that this process may use.
    """
    tensors: Sequence[TensorBits] = Columns.of(state) or state_bits(state)
    return digest_tensors(tensors, thread_count(threads), codec_for(tensors))


def codec_for(tensors: Iterable[TensorBits]) -> Codec:
    """Return the codec that can work on all of these tensors: the GPU codec if one of them is on a GPU, else that of the host."""
    if isinstance(tensors, Columns):
        device = tensors.bits.device
    else:
        device = next((tensor.source.device for tensor in tensors if on_gpu(tensor.source)), None)
    if device is None:
        return default_codec()
    from ..codec.gpu.codec import GpuCodec

    return GpuCodec(device)


def digest_tensors(tensors: Sequence[TensorBits], threads: int, codec: Codec) -> Digest:
    """Return the sum of the tensors' digests."""
    if isinstance(tensors, Columns):
        seeds, total = tensors.layout.keys.seeds, tensors.layout.keys.tag()
        for some in _runs(tensors, codec):
            total += Digest.sum(codec.digest(tensors.bits.part(some), seeds[some], threads))
        return total
    keys = keys_of(tensors)
    total = keys.tag()
    for numbers in batches(range(len(tensors)), lambda number: tensors[number].nbytes, codec):
        total += Digest.sum(codec.digest([tensors[number].bits for number in numbers], keys.seeds[numbers], threads))
    return total


def _runs(tensors: Columns, codec: Codec) -> Iterator[slice]:
    """Cut columns into runs of about `_BATCH_BYTES`; one run if the codec prefers that."""
    if codec.prefers_whole_state:
        yield slice(0, len(tensors))
        return
    upto, first = np.cumsum(tensors.layout.nbytes), 0
    while first < len(tensors):
        end = max(first + 1, int(np.searchsorted(upto, (upto[first - 1] if first else 0) + _BATCH_BYTES, "right")))
        yield slice(first, end)
        first = end


_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], size: Callable[[_Item], int], codec: Codec | None = None) -> Iterator[list[_Item]]:
    """Split a list into batches of about `_BATCH_BYTES` and at most `_BATCH_TENSORS` items; one batch if the codec prefers that."""
    if codec is not None and codec.prefers_whole_state:
        if items:
            yield list(items)
        return
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= _BATCH_BYTES or len(batch) == _BATCH_TENSORS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def thread_count(threads: int | None) -> int:
    """Return the number of threads to use: the caller's choice, or as many as there are processors that this process may use."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return threads

"""What holds for whole states, whatever is done with them: their digest, and how work on them is cut up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from ..codec import default_codec
from ..codec.base import Codec
from ..format.digest import Digest
from .bits import State, TensorBits, keys_of, state_bits

Progress = Callable[[int], None]
"""Called with the number of bytes of weights done since the last call."""

_BATCH = 1 << 29
"""Bytes of weights handed to the codec at a time: between batches Python reports progress and takes signals."""

_MOST_AT_A_TIME = 512
"""Tensors handed to it at a time, at most. What Python makes for each of them is gone again before its collector gets to know it."""


def state_digest(state: State, *, threads: int | None = None) -> Digest:
    """The digest of a state: equal for equal names, types, shapes and bits, in whatever order or memory layout (docs/format.md §2).

    It is linear: `patch.after - patch.before` of a resolved patch, added to the digest of its base, gives that of its result.
    """
    tensors = state_bits(state)
    return digest_tensors(tensors, thread_count(threads), codec_for(tensors))


def codec_for(tensors: Iterable[TensorBits]) -> Codec:
    """The codec that can work on all of these: the GPU's where one of them is on a GPU, else that of the host."""
    on_device = next((tensor for tensor in tensors if not tensor.on_host), None)
    if on_device is None:
        return default_codec()
    from ..codec.gpu.codec import GpuCodec

    return GpuCodec(cast(Any, on_device.bits).tensor.device)


def digest_tensors(tensors: Sequence[TensorBits], threads: int, codec: Codec) -> Digest:
    """The digest of a part of a state."""
    keys = keys_of(tensors)
    seeds = keys.seeds.tolist()
    total = keys.tag()
    for numbers in batches(range(len(tensors)), lambda number: tensors[number].nbytes, codec):
        total += Digest.sum(codec.digest([(tensors[number].bits, seeds[number]) for number in numbers], threads))
    return total


_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], size: Callable[[_Item], int], codec: Codec | None = None) -> Iterator[list[_Item]]:
    """Cut a list into parts of about `_BATCH` bytes and no more than `_MOST_AT_A_TIME` items; or all of it, if the codec wants that."""
    if codec is not None and codec.takes_all:
        if items:
            yield list(items)
        return
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= _BATCH or len(batch) == _MOST_AT_A_TIME:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def thread_count(threads: int | None) -> int:
    """The number of threads to use: as many as this process may run on, unless the caller says."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return threads

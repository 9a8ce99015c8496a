"""The codec: what a delta says about one tensor, and digests. Names and files are not its business.

base       what every codec does
bits       the bits of one tensor, in host memory or on a GPU
varints    integers of variable length
routing    routed experts as bytes
native     the codec in C++
reference  the codec that defines the format, in NumPy
gpu        the codec on NVIDIA GPUs

The native codec on the machine's best instruction set is used, unless the environment variable DELTAWIRE_CODEC names another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CodecUnavailable
from .base import Buffer, Codec
from .bits import Bits, BitsColumn, in_host_memory

_WORTH_THREADS = 8 << 20
"""Bytes from which on several threads copy faster than one."""


def codec_named(name: str) -> Codec:
    """Return the codec `auto`, `reference`, or the native codec on the instruction set `avx512`, `avx2` or `scalar`."""
    if name == "reference":
        from .reference import ReferenceCodec

        return ReferenceCodec()
    try:
        from .native import NativeCodec
    except ImportError as error:
        raise CodecUnavailable(
            f"the native codec is not built ({error}); `pip install .` in a clone of deltawire's repository builds it."
        ) from None
    return NativeCodec(None if name == "auto" else name)


_chosen: list[Codec] = []


def default_codec() -> Codec:
    """Return the codec that DELTAWIRE_CODEC named when this was first called; `auto` if it is not set. `using_codec` overrides it."""
    if not _chosen:
        _chosen.append(codec_named(os.environ.get("DELTAWIRE_CODEC", "auto")))
    return _chosen[-1]


@contextlib.contextmanager
def using_codec(name: str) -> Iterator[Codec]:
    """Let all threads use another codec within the context. Tests and benchmarks need this."""
    codec = codec_named(name)
    default_codec()
    _chosen.append(codec)
    try:
        yield codec
    finally:
        _chosen.remove(codec)


def memory_of(arrays: list[NDArray[Any]]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Return the address of each array, of any type, and flags: 1 if it is contiguous, 2 if it is writable."""
    try:
        from .._native import memory_of as native
    except ImportError:
        flags = [array.flags.c_contiguous + 2 * array.flags.writeable for array in arrays]
        return np.array([array.ctypes.data for array in arrays], np.uint64), np.array(flags, np.uint8)
    return native(arrays)


def reaching(arrays: Sequence[Bits], masks: NDArray[np.uint64], limits: NDArray[np.uint64], threads: int) -> NDArray[np.bool_]:
    """Tell for each contiguous array in host memory whether one of its elements is at least the limit, after it was masked."""
    try:
        from .._native import reaching as native
    except ImportError:
        columns = zip(arrays, masks.tolist(), limits.tolist(), strict=True)
        return np.array([bool((in_host_memory(array) & mask >= limit).any()) for array, mask, limit in columns], np.bool_)
    from .native import native_tensors

    return native(native_tensors(arrays), masks, limits, threads).astype(np.bool_)


def copy_elements(source: BitsColumn, target: BitsColumn, threads: int) -> None:
    """Copy tensors in host memory to others of the same sizes. Read-only targets must be refused by the caller."""
    if source.are_plain and target.are_plain:
        with contextlib.suppress(ImportError):
            from .._native import copy
            from .native import native_tensors

            copy(native_tensors(source), native_tensors(target), threads)
            return
    for bits, to in zip(source, target, strict=True):
        np.copyto(in_host_memory(to), in_host_memory(bits))


def join_pieces(pieces: Sequence[Buffer], threads: int) -> bytes:
    """Return buffers one after the other. Several threads copy large ones, because the first write to new memory is slow."""
    if threads > 1 and sum(map(len, pieces)) >= _WORTH_THREADS:
        with contextlib.suppress(ImportError):
            from .._native import join

            return join([np.frombuffer(piece, np.uint8) for piece in pieces], threads)
    return b"".join(pieces)


def copy_pieces(pieces: Sequence[Buffer], to: NDArray[np.uint8], threads: int) -> None:
    """Copy buffers, one after the other, to memory of their total size."""
    sources: list[Bits] = [np.frombuffer(piece, np.uint8) for piece in pieces]
    targets: list[Bits] = list(np.split(to, np.cumsum([source.size for source in sources])[:-1]))
    try:
        from .._native import copy
    except ImportError:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(in_host_memory(target), in_host_memory(source))
    else:
        copy(sources, targets, threads)

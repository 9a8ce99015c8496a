"""The codec: what a delta says about one tensor, and digests. Names and files are not its business.

base       what every codec does
bits       the bits of one tensor, in host memory or on a GPU
native     the codec in C++
reference  the codec that defines the format, in NumPy
gpu        the codec on NVIDIA GPUs

The native codec on the machine's best instruction set is used, unless the environment variable DELTAWIRE_CODEC names another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import CodecUnavailable
from .base import Codec
from .bits import Bits, in_host_memory


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


def memory_of(arrays: list[Bits]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Return the address of each array in host memory, and flags: 1 if it is contiguous, 2 if it is writable."""
    try:
        from .._native import memory_of as native
    except ImportError:
        host = [in_host_memory(array) for array in arrays]
        flags = [array.flags.c_contiguous + 2 * array.flags.writeable for array in host]
        return np.array([array.ctypes.data for array in host], np.uint64), np.array(flags, np.uint8)
    return native(arrays)


def reaching(arrays: list[Bits], masks: NDArray[np.uint64], limits: NDArray[np.uint64], threads: int) -> NDArray[np.bool_]:
    """Tell for each contiguous array in host memory whether one of its elements is at least the limit, after it was masked."""
    try:
        from .._native import reaching as native
    except ImportError:
        columns = zip(arrays, masks.tolist(), limits.tolist(), strict=True)
        return np.array([bool((in_host_memory(array) & mask >= limit).any()) for array, mask, limit in columns], np.bool_)
    return native(arrays, masks, limits, threads).astype(np.bool_)

"""Which codec works: the native one on the best instruction set, unless the environment variable DELTAWIRE_CODEC says otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..errors import CodecUnavailable
from .base import Codec


def codec_named(name: str) -> Codec:
    """`auto`, `reference`, or an instruction set of the native codec: `avx512`, `avx2`, `scalar`."""
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
    """The codec named by DELTAWIRE_CODEC, read once; `auto` without it. `using_codec` overrides it."""
    if not _chosen:
        _chosen.append(codec_named(os.environ.get("DELTAWIRE_CODEC", "auto")))
    return _chosen[-1]


@contextlib.contextmanager
def using_codec(name: str) -> Iterator[Codec]:
    """Let all threads work with another codec for a while: for tests and benchmarks."""
    codec = codec_named(name)
    default_codec()
    _chosen.append(codec)
    try:
        yield codec
    finally:
        _chosen.remove(codec)

"""Which codec works: the native one on the best instruction set, unless the environment variable DELTAWIRE_CODEC says otherwise."""

from __future__ import annotations

import functools
import os

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
        raise CodecUnavailable(f"the native codec is not built ({error}); 'pip install deltawire' builds it.") from None
    return NativeCodec(None if name == "auto" else name)


@functools.lru_cache(maxsize=1)
def default_codec() -> Codec:
    """The codec named by DELTAWIRE_CODEC, read once; `auto` without it."""
    return codec_named(os.environ.get("DELTAWIRE_CODEC", "auto"))

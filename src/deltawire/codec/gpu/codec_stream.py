"""The stream that the codec works on, and the codec of the host."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import CodecUnavailable
from .. import default_codec
from . import device as devices


class codec_stream:
    """A context in which the calling thread's work goes to the codec's stream.

    That work starts after earlier work of the caller's stream, and later work of the caller's stream starts after it.
    """

    def __init__(self, device: torch.device) -> None:
        gpu = devices.gpu_at(device)
        self._stream = gpu.stream("codec")
        self._caller = gpu.current()
        self._context = gpu.using(self._stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._stream.wait_stream(self._caller)
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._caller.wait_stream(self._stream)


@functools.cache
def host_codec_works() -> bool:
    try:
        default_codec()
    except CodecUnavailable:
        return False
    return True

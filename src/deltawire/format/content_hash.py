"""The hash that objects and the data of deltas go by: BLAKE3."""

from __future__ import annotations

import os

from blake3 import blake3

from ..codec.base import Buffer

_WORTH_THREADS = 1 << 20
"""Bytes from which on several threads are faster than one."""

_several = blake3.AUTO


def content_hash(data: Buffer) -> str:
    """BLAKE3 of some bytes, as 64 hexadecimal digits."""
    return blake3(data, max_threads=_several if memoryview(data).nbytes >= _WORTH_THREADS else 1).hexdigest()


def new_hash(*, threads: bool = True) -> blake3:
    """The same of bytes that come piece by piece, by several threads or by the calling one."""
    return blake3(max_threads=_several if threads else 1)


def _in_forked_child() -> None:
    # The threads of BLAKE3 stay with the parent; the child would wait for them for ever.
    global _several
    _several = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)

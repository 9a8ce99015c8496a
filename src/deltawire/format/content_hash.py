"""The hash of objects and of the data in deltas: BLAKE3."""

from __future__ import annotations

import os

from blake3 import blake3

from ..codec.base import Buffer

_WORTH_THREADS = 1 << 20
"""From this many bytes on, several threads are faster than one."""

_several = blake3.AUTO


def content_hash(data: Buffer, *, threads: bool = True) -> str:
    """Return the BLAKE3 hash of some bytes, as 64 hexadecimal digits. Several threads hash many bytes, unless `threads` is False."""
    return blake3(data, max_threads=_several if threads and memoryview(data).nbytes >= _WORTH_THREADS else 1).hexdigest()


def new_hash(*, threads: bool = True) -> blake3:
    """Return a hasher for bytes that come in pieces. It uses several threads, or only the calling one."""
    return blake3(max_threads=_several if threads else 1)


def _in_forked_child() -> None:
    # The threads of BLAKE3 do not exist in a forked child, which would wait for them forever.
    global _several
    _several = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)

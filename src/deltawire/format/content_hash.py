"""The hash that objects and the data of deltas go by: BLAKE3."""

from __future__ import annotations

from blake3 import blake3

from ..codec.base import Buffer

_WORTH_THREADS = 1 << 20
"""Bytes from which on several threads are faster than one."""


def content_hash(data: Buffer) -> str:
    """BLAKE3 of some bytes, as 64 hexadecimal digits."""
    return blake3(data, max_threads=blake3.AUTO if memoryview(data).nbytes >= _WORTH_THREADS else 1).hexdigest()

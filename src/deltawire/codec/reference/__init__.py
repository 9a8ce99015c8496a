"""docs/format.md §2–5 in NumPy: slow and obvious. Every other codec is tested against this one.

digest   §2: the state digest
groups   §3: the groups of a delta of version 3, their tiles and chunks
payload  §3: the chunks of a payload of versions 1 and 2
terms    §4: the terms that encoder and decoder share
decoder  §4: reading a coded chunk, one code at a time
encoder  §5: the choices of the encoder; it finds the cost of a choice by making the bits and counting them
routing  §8: routed experts
codec    the functions above as a `Codec`
"""

from __future__ import annotations

from .codec import ReferenceCodec

__all__ = ["ReferenceCodec"]

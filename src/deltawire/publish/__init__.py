"""The writing side: a trainer's states become versions in an object store (docs/protocol.md §4)."""

from __future__ import annotations

from .background import PendingVersion
from .publisher import Publisher
from .shortcuts.cadence import AnchorPolicy
from .writer_options import WriterOptions

__all__ = ["AnchorPolicy", "PendingVersion", "Publisher", "WriterOptions"]

"""Delta files (docs/format.md §1): reading any version. This module does not know how payloads are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ..errors import UnsupportedVersion
from .delta_files.grouped import MAGIC, GroupedDelta, parse_grouped, peek_grouped
from .delta_files.named import NamedDelta, parse_named
from .delta_files.shared import ByteRange, Coverage, DeltaBytes, Parts, Structure
from .digest import Digest

__all__ = ["ByteRange", "Coverage", "DeltaBytes", "DeltaFile", "GroupedDelta", "NamedDelta", "Parts", "Structure", "parse", "peek"]

DeltaFile: TypeAlias = GroupedDelta | NamedDelta
"""A parsed delta of any version."""


def parse(delta: DeltaBytes, *, names: Iterable[str] | None = None, threads: bool = True) -> DeltaFile:
    """Parse and check a delta file. Raises `CorruptDelta` or `UnsupportedVersion`. Needs little more memory than its lists.

    `names` are the only tensors that the file may cover, if known. Lists that are longer than they need are not read at all. Several
    threads hash a large file, unless `threads` is False.
    """
    view = memoryview(delta).cast("B")
    if view[:7] != MAGIC[:7]:
        return parse_named(view, names)
    if bytes(view[7:8]) > MAGIC[7:]:
        raise UnsupportedVersion("the delta is of a later version; this release reads versions 1 to 3.")
    return parse_grouped(view, names, threads=threads)


def peek(delta: DeltaBytes) -> tuple[Digest, Digest]:
    """Return the digests before and after that a delta file says that it has. The first bytes are enough, and nothing is checked.

    Raises `CorruptDelta` or `UnsupportedVersion`, as `parse` does.
    """
    view = memoryview(delta).cast("B")
    if view[:8] == MAGIC:
        return peek_grouped(view)
    file = parse(delta)
    return file.before, file.after

"""The common parts of all versions of the delta file: lists of added, removed and tied tensors, and which elements a file covers."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ...dtypes import DType, dtype_named
from ...errors import CorruptDelta, UnsupportedDtype
from ..safetensors_header import MalformedHeader, check_density, parse_json_object

DeltaBytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

_MAX_ELEMENTS = 2**62
_HEADER_BYTES, _ENTRY_BYTES = 1 << 16, 256
_ESCAPED = 7
"""Most bytes that one byte of a name can take where JSON is nested in JSON."""
_TEXT_BYTES = 90
"""For each this many bytes of JSON, one entry's share of strings, keys and containers is allowed."""


ByteRange: TypeAlias = tuple[int, int]
"""A range of bytes in the data of a file: start and stop."""

Parts: TypeAlias = Mapping[str, tuple[int, int]]
"""The elements that a delta covers, by tensor: from the first number up to but not including the second (docs/format.md §6)."""


@dataclass(frozen=True, slots=True)
class Structure:
    """How the set of tensors changes, and which of them share memory."""

    added: Mapping[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


class Coverage:
    """The elements that the deltas of one step change. They were made from the same state, so no two may change the same element."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[tuple[int, int], ...]] = {}
        self._whole: set[str] = set()

    def add_whole(self, names: Collection[str]) -> None:
        """Add a delta for all elements of these tensors. Raise `CorruptDelta` if an earlier one was for some of them."""
        if not (self._whole.isdisjoint(names) and self._ranges.keys().isdisjoint(names)):
            name = next(name for name in names if name in self._whole or name in self._ranges)
            raise CorruptDelta(f"two deltas are for the same elements of tensor {name!r}.")
        self._whole.update(names)

    def add(self, ranges: Parts) -> None:
        """Add a delta for these elements. Raise `CorruptDelta` if an earlier one was for some of them."""
        for name, (start, stop) in ranges.items():
            others = self._ranges.get(name, ())
            if name in self._whole or any(start < end and begin < stop for begin, end in others):
                raise CorruptDelta(f"two deltas are for the same elements of tensor {name!r}.")
            self._ranges[name] = (*others, (start, stop))


def changes_text(structure: Structure) -> str:
    """Return the JSON text of a structure; empty if the set of tensors stays as it is."""
    changes: dict[str, object] = {}
    if structure.added:
        changes["added"] = {name: [dtype.name, list(shape)] for name, (dtype, shape) in sorted(structure.added.items())}
    if structure.removed:
        changes["removed"] = sorted(structure.removed)
    if structure.aliases:
        changes["aliases"] = dict(sorted(structure.aliases.items()))
    return to_json(changes) if changes else ""


def longest_header(names: Iterable[str]) -> int:
    """Return the largest length of a header about these tensors (docs/format.md §1)."""
    sizes = [len(name.encode(errors="replace")) for name in names]
    return _HEADER_BYTES + len(sizes) * (_ENTRY_BYTES + _ESCAPED * max(sizes, default=0)) + 3 * _ESCAPED * sum(sizes)


def read_changes(text: str | None) -> Structure:
    if text is None:
        return Structure()
    try:
        changes = parse_text(text)
    except MalformedHeader:
        changes = {}
    if not changes or not changes.keys() <= {"added", "removed", "aliases"} or not all(changes.values()):
        refuse("its list of changes is malformed.")
    added, removed, aliases = changes.get("added", {}), changes.get("removed", []), changes.get("aliases", {})
    if not (isinstance(added, dict) and isinstance(removed, list) and isinstance(aliases, dict)):
        refuse("its list of changes is malformed.")
    if not all(isinstance(name, str) for name in [*removed, *aliases.values()]) or removed != sorted(set(removed)):
        refuse("its list of changes is malformed.")
    return Structure({name: _added(name, facts) for name, facts in added.items()}, tuple(removed), aliases)


def parse_text(text: str) -> dict[str, Any]:
    """Parse JSON that is part of a delta file."""
    data = text.encode()
    check_density(data, len(data) // _TEXT_BYTES)
    return parse_json_object(data)


def _added(name: str, facts: object) -> tuple[DType, tuple[int, ...]]:
    if name in ("", "__metadata__"):
        refuse(f"it adds a tensor with the name {name!r}, which is not allowed.")
    if not (isinstance(facts, list) and len(facts) == 2 and isinstance(facts[0], str) and is_sizes(facts[1])):
        refuse(f"the entry of the added tensor {name!r} is malformed.")
    try:
        dtype = dtype_named(facts[0])
    except UnsupportedDtype:
        refuse(f"the added {name!r} is of the unknown type {facts[0]!r}.")
    if len(facts[1]) > 32 or math.prod(size or 1 for size in facts[1]) > _MAX_ELEMENTS:
        refuse(f"the added {name!r} claims an impossible shape.")
    return dtype, tuple(facts[1])


def is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value)


def to_json(value: object) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def refuse(why: str) -> NoReturn:
    """Raise `CorruptDelta` with this reason."""
    raise CorruptDelta(f"the file cannot be used as a delta: {why}")

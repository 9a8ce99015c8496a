"""The delta file: a safetensors container of payloads (docs/format.md §1). This module does not know how payloads are made."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ..dtypes import DType, dtype_named
from ..errors import CorruptDelta, UnsupportedDtype, UnsupportedVersion
from . import safetensors_header
from .content_hash import content_hash
from .digest import Digest
from .safetensors_header import (
    LENGTH_BYTES,
    Header,
    MalformedHeader,
    TensorEntry,
    check_density,
    header_length,
    parse_header,
    parse_json_object,
)

DeltaBytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

VERSION, VERSION_OF_PARTS = "delta/1", "delta/2"
_MAX_ELEMENTS = 2**62
_PAYLOAD = dtype_named("U8")
_HEADER_BYTES, _ENTRY_BYTES = 1 << 16, 256
_ESCAPED = 7
"""Most bytes that one byte of a name can take where JSON is nested in JSON."""
_TEXT_BYTES = 90
"""For each this many bytes of `parts` and `changes`, one entry's share of strings, keys and containers is allowed."""


ByteRange: TypeAlias = tuple[int, int]
"""A range of bytes in the data section: start and stop."""

Parts: TypeAlias = Mapping[str, tuple[int, int]]
"""The elements that a delta covers, by tensor: from the first number up to but not including the second (docs/format.md §6)."""


@dataclass(frozen=True, slots=True)
class Structure:
    """How the set of tensors changes, and which of them share memory."""

    added: Mapping[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A parsed delta. `data` is a view of the file's bytes, checked against its BLAKE3 hash. Payloads are parts of it and not decoded."""

    before: Digest
    after: Digest
    data: memoryview
    payloads: Mapping[str, ByteRange]
    structure: Structure
    parts: Parts | None = None
    """The parts of tensors that the file covers, if it does not cover whole tensors."""

    def payload(self, name: str) -> ByteRange | None:
        """Return the payload that changes this tensor, or the tensor that it is tied to. Return None if it does not change."""
        return self.payloads.get(self.structure.aliases.get(name, name))


def build_header(
    before: Digest, after: Digest, data_hash: str, sizes: Iterable[tuple[str, int]], structure: Structure, parts: Parts | None = None
) -> bytes:
    """Return the bytes before the data section. `sizes` are names and payload sizes, ascending by name."""
    version = VERSION if parts is None else VERSION_OF_PARTS
    metadata = {"deltawire": version, "before": before.hex(), "after": after.hex(), "blake3": data_hash}
    changes: dict[str, object] = {}
    if structure.added:
        changes["added"] = {name: [dtype.name, list(shape)] for name, (dtype, shape) in sorted(structure.added.items())}
    if structure.removed:
        changes["removed"] = sorted(structure.removed)
    if structure.aliases:
        changes["aliases"] = dict(sorted(structure.aliases.items()))
    if changes:
        metadata["changes"] = _dump(changes)
    if parts is not None:
        metadata["parts"] = _dump(dict(sorted(parts.items())))
    return safetensors_header.build_header(_entries(sizes), metadata)


def _entries(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, TensorEntry]]:
    end = 0
    for name, size in sizes:
        yield name, TensorEntry(_PAYLOAD, (size,), end, end + size)
        end += size


class Coverage:
    """The elements that the deltas of one step change. They were made from the same state, so no two may change the same element."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[tuple[int, int], ...]] = {}

    def add(self, spans: Parts) -> None:
        """Another delta, for these elements. Raises `CorruptDelta` if an earlier one was for some of them."""
        for name, (start, stop) in spans.items():
            others = self._spans.get(name, ())
            if any(start < end and begin < stop for begin, end in others):
                raise CorruptDelta(f"two deltas are for the same elements of tensor {name!r}.")
            self._spans[name] = (*others, (start, stop))


def parse(delta: DeltaBytes, *, names: Iterable[str] | None = None) -> DeltaFile:
    """Parse and check a delta file. Raises `CorruptDelta` or `UnsupportedVersion`. Needs little more memory than the header.

    `names` are the only tensors that the file may cover, if known. A header that is longer than they need is not read at all.
    """
    view = memoryview(delta).cast("B")
    try:
        length = header_length(bytes(view[:LENGTH_BYTES]), len(view))
        if names is not None and length > (most := _longest_header(names)):
            raise MalformedHeader(f"its header has {length:,} bytes; the tensors that it is for need {most:,} at most.")
        header = parse_header(bytes(view[LENGTH_BYTES : LENGTH_BYTES + length]), len(view))
    except MalformedHeader as reason:
        _refuse(str(reason))
    metadata = header.metadata or {}
    if "deltawire" not in metadata:
        _refuse("it is a safetensors file, but not a delta.")
    version = metadata["deltawire"]
    if version not in (VERSION, VERSION_OF_PARTS):
        raise UnsupportedVersion(f"the delta is of version {version!r}; this release reads {VERSION!r} and {VERSION_OF_PARTS!r}.")
    required = {"deltawire", "before", "after", "blake3"} | ({"parts"} if version == VERSION_OF_PARTS else set())
    if not required <= metadata.keys() <= required | {"changes"}:
        _refuse("its metadata has missing or unknown keys.")
    try:
        before, after = Digest.from_hex(metadata["before"]), Digest.from_hex(metadata["after"])
    except ValueError:
        _refuse("its metadata has a malformed digest.")
    data = view[header.data_start :]
    payloads = _payloads(header)
    structure = _structure(metadata.get("changes"))
    for name in structure.added:
        if name not in payloads:
            _refuse(f"it adds {name!r} without a payload.")
    for name in structure.removed:
        if name in payloads and name not in structure.added:
            _refuse(f"it has a payload for {name!r}, which it removes.")
    for name, target in structure.aliases.items():
        lives_on = name not in structure.added and name not in structure.removed
        if name in payloads or target not in payloads or target in structure.aliases or not lives_on:
            _refuse(f"it ties {name!r} to {target!r}, which cannot be.")
    parts = _parts(metadata["parts"]) if version == VERSION_OF_PARTS else None
    if parts is not None and (structure.added or structure.removed or not {*payloads, *structure.aliases} <= parts.keys()):
        _refuse("it covers parts of tensors, and more than these.")
    if content_hash(data) != metadata["blake3"]:
        _refuse("its data does not match its BLAKE3.")
    return DeltaFile(before, after, data, payloads, structure, parts)


def _longest_header(names: Iterable[str]) -> int:
    """Return the largest length of a header about these tensors (docs/format.md §1)."""
    sizes = [len(name.encode(errors="replace")) for name in names]
    return _HEADER_BYTES + len(sizes) * (_ENTRY_BYTES + _ESCAPED * max(sizes, default=0)) + 3 * _ESCAPED * sum(sizes)


def _payloads(header: Header) -> dict[str, ByteRange]:
    if list(header.plain_entries) != sorted(header.plain_entries) or "" in header.plain_entries:
        _refuse("its entries are out of order, or nameless.")
    for name, (_, _, code, *shape) in header.plain_entries.items():
        if code != _PAYLOAD.code or len(shape) != 1:
            _refuse(f"the entry of {name!r} is not a payload.")
    return {name: (begin, end) for name, (begin, end, *_) in header.plain_entries.items()}


def _structure(text: str | None) -> Structure:
    if text is None:
        return Structure()
    try:
        changes = _parse_text(text)
    except MalformedHeader:
        changes = {}
    if not changes or not changes.keys() <= {"added", "removed", "aliases"} or not all(changes.values()):
        _refuse("its list of changes is malformed.")
    added, removed, aliases = changes.get("added", {}), changes.get("removed", []), changes.get("aliases", {})
    if not (isinstance(added, dict) and isinstance(removed, list) and isinstance(aliases, dict)):
        _refuse("its list of changes is malformed.")
    if not all(isinstance(name, str) for name in [*removed, *aliases.values()]) or removed != sorted(set(removed)):
        _refuse("its list of changes is malformed.")
    return Structure({name: _added(name, facts) for name, facts in added.items()}, tuple(removed), aliases)


def _parts(text: str) -> Parts:
    try:
        parts = _parse_text(text)
    except MalformedHeader:
        _refuse("its list of parts is malformed.")
    for bounds in parts.values():
        if not (_is_sizes(bounds) and len(bounds) == 2 and bounds[0] < bounds[1]):
            _refuse("its list of parts is malformed.")
    return {name: (bounds[0], bounds[1]) for name, bounds in parts.items()}


def _parse_text(text: str) -> dict[str, Any]:
    """Parse JSON that is nested in the metadata."""
    data = text.encode()
    check_density(data, len(data) // _TEXT_BYTES)
    return parse_json_object(data)


def _added(name: str, facts: object) -> tuple[DType, tuple[int, ...]]:
    if not (isinstance(facts, list) and len(facts) == 2 and isinstance(facts[0], str) and _is_sizes(facts[1])):
        _refuse(f"what it says of the added {name!r} is malformed.")
    try:
        dtype = dtype_named(facts[0])
    except UnsupportedDtype:
        _refuse(f"the added {name!r} is of the unknown type {facts[0]!r}.")
    if len(facts[1]) > 32 or math.prod(size or 1 for size in facts[1]) > _MAX_ELEMENTS:
        _refuse(f"the added {name!r} claims an impossible shape.")
    return dtype, tuple(facts[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _refuse(why: str) -> NoReturn:
    raise CorruptDelta(f"the file cannot be used as a delta: {why}")

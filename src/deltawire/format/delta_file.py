"""The delta file: a safetensors container of payloads (docs/format.md §1). Knows nothing of how payloads are made."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from blake3 import blake3

from ..dtypes import DType, dtype_named
from ..errors import BadTensorName, CorruptDelta, UnsupportedDtype, UnsupportedVersion
from .digest import Digest

DeltaBytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

VERSION = "delta/1"
MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True)
class Structure:
    """How the set of tensors changes, and which of them are one memory."""

    added: Mapping[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A parsed delta. Payloads are views into the file's bytes, checked against its BLAKE3 but not decoded."""

    before: Digest
    after: Digest
    payloads: Mapping[str, memoryview]
    structure: Structure

    def payload(self, name: str) -> memoryview | None:
        """The payload that changes this tensor, its own or that of the tensor it is tied to; None if it does not change."""
        return self.payloads.get(self.structure.aliases.get(name, name))


def build_header(before: Digest, after: Digest, data_hash: str, sizes: Iterable[tuple[str, int]], structure: Structure) -> bytes:
    """The bytes before the data section. `sizes` are names and payload sizes, ascending by name."""
    metadata = {"deltawire": VERSION, "before": before.hex(), "after": after.hex(), "blake3": data_hash}
    changes: dict[str, object] = {}
    if structure.added:
        changes["added"] = {name: [dtype.name, list(shape)] for name, (dtype, shape) in sorted(structure.added.items())}
    if structure.removed:
        changes["removed"] = sorted(structure.removed)
    if structure.aliases:
        changes["aliases"] = dict(sorted(structure.aliases.items()))
    if changes:
        metadata["changes"] = _dump(changes)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, size in sizes:
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = _dump(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse(delta: DeltaBytes) -> DeltaFile:
    """Parse and check a delta file. Raises `CorruptDelta` or `UnsupportedVersion`; takes memory of the order of the header only."""
    view = memoryview(delta).cast("B")
    header, data = _split(view)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or "deltawire" not in metadata:
        _refuse("it is a safetensors file, but not a delta.")
    version = metadata["deltawire"]
    if version != VERSION:
        raise UnsupportedVersion(f"the delta is of version {version!r}; this release reads {VERSION!r}.")
    required = {"deltawire", "before", "after", "blake3"}
    if not required <= metadata.keys() <= required | {"changes"}:
        _refuse("its metadata has missing or unknown keys.")
    try:
        before, after = Digest.from_hex(metadata["before"]), Digest.from_hex(metadata["after"])
    except (ValueError, TypeError):
        _refuse("its metadata has a malformed digest.")
    payloads = _payloads(header, data)
    structure = _structure(metadata.get("changes"))
    for name in structure.added:
        if name not in payloads:
            _refuse(f"it adds {name!r} without a payload.")
    for name, target in structure.aliases.items():
        lives_on = name not in structure.added and name not in structure.removed
        if name in payloads or target not in payloads or target in structure.aliases or not lives_on:
            _refuse(f"it ties {name!r} to {target!r}, which cannot be.")
    if blake3(data).hexdigest() != metadata["blake3"]:
        _refuse("its data does not match its BLAKE3.")
    return DeltaFile(before, after, payloads, structure)


def _split(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(view) < 8:
        _refuse("it is shorter than a safetensors header.")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER:
        _refuse(f"its header claims {length} bytes.")
    if length > len(view) - 8:
        _refuse("its header is cut short.")
    try:
        header = json.loads(bytes(view[8 : 8 + length]).decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        _refuse("its header is not valid JSON.")
    if not isinstance(header, dict):
        _refuse("its header is not a JSON object.")
    return header, view[8 + length :]


def _payloads(header: Mapping[str, Any], data: memoryview) -> dict[str, memoryview]:
    payloads: dict[str, memoryview] = {}
    end = 0
    last = ""
    for name, entry in header.items():
        if name <= last:
            _refuse("its entries are out of order, or nameless.")
        last = name
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"} or entry["dtype"] != "U8":
            _refuse(f"the entry of {name!r} is malformed.")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not (_is_sizes(shape) and _is_sizes(offsets) and len(shape) == 1 and len(offsets) == 2):
            _refuse(f"the entry of {name!r} is malformed.")
        if offsets != [end, end + shape[0]]:
            _refuse(f"the payload of {name!r} overlaps another or leaves a hole.")
        end = offsets[1]
        if end > len(data):
            _refuse("its data is cut short.")
        payloads[name] = data[offsets[0] : end]
    if end != len(data):
        _refuse("it has bytes after its last payload.")
    return payloads


def _structure(text: object) -> Structure:
    if text is None:
        return Structure()
    try:
        changes = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        changes = None
    if not isinstance(changes, dict) or not changes or not changes.keys() <= {"added", "removed", "aliases"} or not all(changes.values()):
        _refuse("its list of changes is malformed.")
    added, removed, aliases = changes.get("added", {}), changes.get("removed", []), changes.get("aliases", {})
    if not (isinstance(added, dict) and isinstance(removed, list) and isinstance(aliases, dict)):
        _refuse("its list of changes is malformed.")
    if not all(isinstance(name, str) for name in [*removed, *aliases.values()]) or removed != sorted(set(removed)):
        _refuse("its list of changes is malformed.")
    return Structure({name: _added(name, facts) for name, facts in added.items()}, tuple(removed), aliases)


def _added(name: str, facts: object) -> tuple[DType, tuple[int, ...]]:
    if not (isinstance(facts, list) and len(facts) == 2 and isinstance(facts[0], str) and _is_sizes(facts[1])):
        _refuse(f"what it says of the added {name!r} is malformed.")
    try:
        dtype = dtype_named(facts[0])
    except (UnsupportedDtype, BadTensorName):
        _refuse(f"the added {name!r} is of the unknown type {facts[0]!r}.")
    elements = 1
    for size in facts[1]:
        elements *= size
        if elements > _MAX_ELEMENTS:
            _refuse(f"the added {name!r} claims an impossible shape.")
    if len(facts[1]) > 32:
        _refuse(f"the added {name!r} claims an impossible shape.")
    return dtype, tuple(facts[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _refuse(why: str) -> NoReturn:
    raise CorruptDelta(f"the file cannot be used as a delta: {why}")

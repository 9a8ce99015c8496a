"""Delta files of versions 1 and 2: safetensors containers of payloads with names (docs/format.md §7). They are only read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...dtypes import dtype_named
from ...errors import UnsupportedVersion
from ..content_hash import content_hash
from ..digest import Digest
from ..safetensors_header import LENGTH_BYTES, Header, MalformedHeader, header_length, parse_header
from .shared import ByteRange, Parts, Structure, is_sizes, longest_header, parse_text, read_changes, refuse

VERSION, VERSION_OF_PARTS = "delta/1", "delta/2"
_PAYLOAD = dtype_named("U8")


@dataclass(frozen=True, slots=True)
class NamedDelta:
    """A parsed delta of version 1 or 2.

    `data` is a view of the file's bytes, checked against its BLAKE3 hash. Payloads are parts of it and not decoded.
    """

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


def parse_named(view: memoryview, names: Iterable[str] | None) -> NamedDelta:
    """Parse and check a delta file, as `delta_file.parse` does."""
    try:
        length = header_length(bytes(view[:LENGTH_BYTES]), len(view))
        if names is not None and length > (most := longest_header(names)):
            raise MalformedHeader(f"its header has {length:,} bytes; the tensors that it is for need {most:,} at most.")
        header = parse_header(bytes(view[LENGTH_BYTES : LENGTH_BYTES + length]), len(view))
    except MalformedHeader as reason:
        refuse(str(reason))
    metadata = header.metadata or {}
    if "deltawire" not in metadata:
        refuse("it is a safetensors file, but not a delta.")
    version = metadata["deltawire"]
    if version not in (VERSION, VERSION_OF_PARTS):
        raise UnsupportedVersion(f"the delta is of version {version!r}; this release does not read it.")
    required = {"deltawire", "before", "after", "blake3"} | ({"parts"} if version == VERSION_OF_PARTS else set())
    if not required <= metadata.keys() <= required | {"changes"}:
        refuse("its metadata has missing or unknown keys.")
    try:
        before, after = Digest.from_hex(metadata["before"]), Digest.from_hex(metadata["after"])
    except ValueError:
        refuse("its metadata has a malformed digest.")
    data = view[header.data_start :]
    payloads = _payloads(header)
    structure = read_changes(metadata.get("changes"))
    for name in structure.added:
        if name not in payloads:
            refuse(f"it adds {name!r} without a payload.")
    for name in structure.removed:
        if name in payloads and name not in structure.added:
            refuse(f"it has a payload for {name!r}, which it removes.")
    for name, target in structure.aliases.items():
        lives_on = name not in structure.added and name not in structure.removed
        if name in payloads or target not in payloads or target in structure.aliases or not lives_on:
            refuse(f"it ties {name!r} to {target!r}, which cannot be.")
    parts = _parts(metadata["parts"]) if version == VERSION_OF_PARTS else None
    if parts is not None and (structure.added or structure.removed or not {*payloads, *structure.aliases} <= parts.keys()):
        refuse("it covers parts of tensors, and more than these.")
    if content_hash(data) != metadata["blake3"]:
        refuse("its data does not match its BLAKE3.")
    return NamedDelta(before, after, data, payloads, structure, parts)


def _payloads(header: Header) -> dict[str, ByteRange]:
    if list(header.plain_entries) != sorted(header.plain_entries) or "" in header.plain_entries:
        refuse("its entries are out of order, or nameless.")
    for name, (_, _, code, *shape) in header.plain_entries.items():
        if code != _PAYLOAD.code or len(shape) != 1:
            refuse(f"the entry of {name!r} is not a payload.")
    return {name: (begin, end) for name, (begin, end, *_) in header.plain_entries.items()}


def _parts(text: str) -> Parts:
    try:
        parts = parse_text(text)
    except MalformedHeader:
        refuse("its list of parts is malformed.")
    for bounds in parts.values():
        if not (is_sizes(bounds) and len(bounds) == 2 and bounds[0] < bounds[1]):
            refuse("its list of parts is malformed.")
    return {name: (bounds[0], bounds[1]) for name, bounds in parts.items()}

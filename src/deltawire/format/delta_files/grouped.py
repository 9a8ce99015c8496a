"""Delta files of version 3: groups of tensors without names (docs/format.md §1). This module does not know how payloads are made."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from ...codec.base import Buffer
from ...codec.varints import read_varint, to_varint
from ...dtypes import PAYLOAD_TYPES, DType
from ...errors import BaseMismatch, CorruptDelta
from ..content_hash import new_hash
from ..digest import PART_ALIGNMENT, Digest
from .shared import ByteRange, Parts, Structure, changes_text, longest_header, read_changes, refuse

MAGIC = b"dwdelta3"
HEADER_BYTES = 72
_CODES = 32
"""Ids of groups have room for this many codes of payload types."""
_NAMES_HASH_BYTES = 8
_WORTH_THREADS = 1 << 20
_OTHER_NAMES = "the delta covers parts of tensors, and was made from a state with other names."


class FilePart(NamedTuple):
    """A part of a tensor, as a file names it: the tensor's index in the order of names, the first block of 512 bytes, and the size."""

    tensor: int
    block: int
    elements: int


@dataclass(frozen=True, slots=True)
class FileParts:
    """The parts that a file covers, before the reader's names are known. They are read only when the names are known."""

    names_hash: bytes
    listed: memoryview
    """The list as it is in the file, without the hash of the names."""

    def of(self, names: Sequence[str], dtypes: Mapping[str, DType]) -> Parts:
        """Return the parts by name. `names` are all tensors of the state, ascending. Raise `BaseMismatch` if they are others."""
        found = {}
        if hash_of_names(names) != self.names_hash:
            raise BaseMismatch(_OTHER_NAMES)
        for index, block, elements in _each_part(self.listed):
            if index >= len(names):
                raise BaseMismatch(_OTHER_NAMES)
            start = block * PART_ALIGNMENT // dtypes[names[index]].itemsize
            found[names[index]] = start, start + elements
        return found


@dataclass(frozen=True, slots=True)
class GroupedDelta:
    """A parsed delta of version 3. `data` is the whole file, checked against its BLAKE3 hash. Payloads are not decoded."""

    before: Digest
    after: Digest
    data: memoryview
    tensors: int
    """The number of tensors of the new state."""
    structure: Structure
    file_parts: FileParts | None
    """The parts of tensors that the file covers, if it does not cover whole tensors."""
    groups: Mapping[int, ByteRange]
    """The payloads, by the ids of their groups."""

    @property
    def targets(self) -> list[str]:
        """The tensors that aliases name, in ascending order. Each is a group of its own."""
        return sorted(set(self.structure.aliases.values()))


def group_id(code: int, target: int = 0) -> int:
    """Return the id of the group of a payload type, or of the `target`-th alias target, counted from 1."""
    return _CODES * target + code


def split_id(group: int) -> tuple[int, int]:
    """Return the number of the alias target, or 0, and the code of the payload type."""
    return divmod(group, _CODES)


def hash_of_names(names: Iterable[str]) -> bytes:
    return blake3("\0".join(names).encode()).digest(_NAMES_HASH_BYTES)


def start_of_body(tensors: int, structure: Structure, parts: Parts | None, all_names: Sequence[str], dtypes: Mapping[str, DType]) -> bytes:
    """Return the bytes between the header and the groups. `all_names` are the names of the state, ascending."""
    changes = changes_text(structure).encode()
    listed = b"" if parts is None else _parts_bytes(parts, all_names, dtypes)
    return b"".join([to_varint(tensors), to_varint(len(changes)), changes, to_varint(len(listed)), listed])


def start_of_group(group: int, size: int) -> bytes:
    """Return the bytes before the payload of a group."""
    return to_varint(group) + to_varint(size)


def header(before: Digest, after: Digest, body: Sequence[Buffer], *, threads: bool) -> bytes:
    """Return the bytes before the body, which is given in pieces. With `threads`, several threads hash a body that is large."""
    digests = _bytes(before) + _bytes(after)
    hasher = new_hash(threads=threads and sum(map(len, body)) >= _WORTH_THREADS)
    hasher.update(digests)
    for piece in body:
        hasher.update(piece)
    return MAGIC + digests + hasher.digest()


def parse_grouped(view: memoryview, names: Iterable[str] | None, *, threads: bool = True) -> GroupedDelta:
    """Parse and check a delta file, as `delta_file.parse` does."""
    if len(view) <= HEADER_BYTES or view[:8] != MAGIC:
        refuse("it is cut short.")
    hasher = new_hash(threads=threads and len(view) >= _WORTH_THREADS)
    hasher.update(view[8:40])
    hasher.update(view[HEADER_BYTES:])
    if hasher.digest() != view[40:HEADER_BYTES]:
        refuse("its data does not match its BLAKE3.")
    before, after = peek_grouped(view)
    try:
        tensors, at = read_varint(view, HEADER_BYTES)
        changes, at = _piece(view, at)
        listed, at = _piece(view, at)
    except CorruptDelta as error:
        refuse(error.message)
    if changes and names is not None and len(changes) > longest_header(names):
        refuse("its list of changes is longer than the tensors that it is for need.")
    structure = _structure(bytes(changes))
    groups = _read_groups(view, at, targets=len(set(structure.aliases.values())))
    parts = _file_parts(listed) if listed else None
    if parts is not None and (structure.added or structure.removed):
        refuse("it covers parts of tensors, but adds or removes tensors.")
    return GroupedDelta(before, after, view, tensors, structure, parts, groups)


def peek_grouped(view: memoryview) -> tuple[Digest, Digest]:
    """Return the digests before and after, as `delta_file.peek` does."""
    if len(view) <= HEADER_BYTES:
        refuse("it is cut short.")
    lanes = struct.unpack_from("<8I", view, 8)
    return Digest(lanes[:4]), Digest(lanes[4:])


def _structure(changes: bytes) -> Structure:
    try:
        structure = read_changes(changes.decode() if changes else None)
    except UnicodeDecodeError:
        refuse("its list of changes is malformed.")
    for name, target in structure.aliases.items():
        lives_on = name not in structure.added and name not in structure.removed
        target_lives_on = target not in structure.added and target not in structure.removed
        if name == target or target in structure.aliases or not (lives_on and target_lives_on):
            refuse(f"it ties {name!r} to {target!r}, which cannot be.")
    return structure


def _read_groups(view: memoryview, at: int, targets: int) -> dict[int, ByteRange]:
    """Return the payloads by the ids of their groups. There are few valid ids, so a file of many groups is refused soon."""
    groups: dict[int, ByteRange] = {}
    last = -1
    while at < len(view):
        try:
            group, at = read_varint(view, at)
            size, at = read_varint(view, at)
        except CorruptDelta as error:
            refuse(error.message)
        if group <= last or not 0 < size <= len(view) - at:
            refuse("its groups are out of order, empty or cut off.")
        target, code = split_id(group)
        if target > targets or code >= len(PAYLOAD_TYPES):
            refuse("it has a group of an unknown type, or of a tensor that it does not tie.")
        groups[group] = at, at + size
        last, at = group, at + size
    return groups


def _file_parts(listed: memoryview) -> FileParts:
    if len(listed) < _NAMES_HASH_BYTES:
        refuse("its list of parts is malformed.")
    return FileParts(bytes(listed[:_NAMES_HASH_BYTES]), listed[_NAMES_HASH_BYTES:])


def _each_part(listed: memoryview) -> Iterator[FilePart]:
    """Yield the parts of a list, one by one, because a part takes 40 times as much memory as its bytes in the list."""
    at, index = 0, -1
    while at < len(listed):
        try:
            skipped, at = read_varint(listed, at)
            block, at = read_varint(listed, at)
            elements, at = read_varint(listed, at)
        except CorruptDelta as error:
            refuse(error.message)
        index += 1 + skipped
        if not elements:
            refuse("its list of parts is malformed.")
        yield FilePart(index, block, elements)


def _parts_bytes(parts: Parts, all_names: Sequence[str], dtypes: Mapping[str, DType]) -> bytes:
    pieces = [hash_of_names(all_names)]
    last = -1
    for index, name in enumerate(all_names):
        if name in parts:
            start, stop = parts[name]
            pieces += map(to_varint, (index - last - 1, start * dtypes[name].itemsize // PART_ALIGNMENT, stop - start))
            last = index
    return b"".join(pieces)


def _piece(view: memoryview, at: int) -> tuple[memoryview, int]:
    """Return the bytes that follow their length, and the position after them."""
    size, at = read_varint(view, at)
    if size > len(view) - at:
        raise CorruptDelta("a list is cut off.")
    return view[at : at + size], at + size


def _bytes(digest: Digest) -> bytes:
    return bytes.fromhex(digest.hex())

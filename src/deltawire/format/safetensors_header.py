"""The header of a safetensors file, read strictly and written canonically.

A file is 8 bytes of header length, that many bytes of JSON, then the data section. Everything that a header claims is checked against the
size of the file before anything is mapped. So a valid header cannot make a reader look outside the file, at a hole, or at bytes twice.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ..dtypes import DTYPES, DType, dtype_named
from ..errors import UnsupportedDtype

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 8
_MAX_DIMENSIONS = 32
_MAX_EXTENT = 1 << 62
_FIELDS = {"dtype", "shape", "data_offsets"}
_LEAST_ENTRY = 48
"""The fewest bytes that a tensor needs in a header."""
_SPARE = 1 << 16
"""JSON text may have this many strings, keys and containers in addition to those of its tensors, mainly for metadata."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class MalformedHeader(ValueError):
    """A header breaks a rule, which the text names. The caller knows the file and adds what to do."""


class TensorEntry(NamedTuple):
    """The position of a tensor: `begin` and `end` count bytes from the start of the data section."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


PlainEntry: TypeAlias = tuple[int, ...]
"""An entry as a plain tuple: begin, end, code of the type, and the shape. Python's garbage collector ignores tuples of numbers."""


@dataclass(frozen=True)
class Header:
    """The entries in the order of their data, the free-form metadata (None if the file has none), and the start of the data section."""

    plain_entries: dict[str, PlainEntry]
    metadata: dict[str, str] | None
    data_start: int

    @functools.cached_property
    def entries(self) -> dict[str, TensorEntry]:
        return {
            name: TensorEntry(DTYPES[code], tuple(shape), begin, end) for name, (begin, end, code, *shape) in self.plain_entries.items()
        }


def header_length(prefix: bytes, file_size: int) -> int:
    """Return the header's length from the first 8 bytes of a file. Raises `MalformedHeader` if such a header does not fit in the file."""
    if len(prefix) < LENGTH_BYTES:
        raise MalformedHeader(f"{file_size} bytes are too few for a safetensors file.")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    fits = LENGTH_BYTES + length <= file_size
    if length > MAX_HEADER_BYTES and fits:
        raise MalformedHeader(f"its header has {length:,} bytes; {MAX_HEADER_BYTES:,} are allowed.")
    if length > MAX_HEADER_BYTES:
        raise MalformedHeader("it is not a safetensors file: it does not begin with the length of a header.")
    if not fits:
        raise MalformedHeader("the file ends inside its header.")
    return length


def parse_header(text: bytes, file_size: int, *, most_tensors: int | None = None) -> Header:
    """Return the header in `text`, for a file of `file_size` bytes. Raises `MalformedHeader`.

    `most_tensors` is the largest possible number of tensors, if known. A header that would need far more objects is refused first.
    """
    possible = len(text) // _LEAST_ENTRY
    check_density(text, possible if most_tensors is None else min(possible, most_tensors))
    document = parse_json_object(text, _sound_entry)
    metadata = _metadata(document.pop("__metadata__", None))
    plain_entries = {name: extent if type(extent) is tuple else _plain_entry(name, extent) for name, extent in document.items()}
    # Tensors without elements share their offset with a neighbour; sorting by the end too puts them before it.
    ordered = dict(sorted(plain_entries.items(), key=lambda item: item[1][:2]))
    data_start = LENGTH_BYTES + len(text)
    _check_entries(ordered, file_size - data_start)
    return Header(ordered, metadata, data_start)


def build_header(tensors: Iterable[tuple[str, TensorEntry]], metadata: Mapping[str, str] | None) -> bytes:
    """Return length and JSON, padded so that the data section starts at a multiple of 8. The inverse of `parse_header`."""
    members = [] if metadata is None else [f'"__metadata__":{_dump(dict(metadata))}']
    for name, (dtype, shape, begin, end) in tensors:  # as text at once: thousands of small objects would take several times as long
        plain_entries = ",".join(map(str, shape))
        members.append(f'{_dump(name)}:{{"dtype":"{dtype.name}","shape":[{plain_entries}],"data_offsets":[{begin},{end}]}}')
    text = f"{{{','.join(members)}}}".encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def place_in_order(tensors: Sequence[tuple[str, DType, tuple[int, ...]]]) -> list[tuple[str, TensorEntry]]:
    """Return entries without holes, each aligned to its element size: in the given order if that aligns them, otherwise the widest elements
    first.
    """
    placed = _place(tensors)
    if all(not entry.begin % entry.dtype.itemsize for _, entry in placed):
        return placed
    return _place(sorted(tensors, key=lambda tensor: -tensor[1].itemsize))


def check_density(text: bytes, tensors: int) -> None:
    """Raise `MalformedHeader` if JSON text has more strings, keys or containers than this many tensors need.

    As Python objects, `[],[],[],…` takes 25 times the memory of the text. A tensor's entry has at most three containers, five strings and
    four keys. They are counted in the text, before it is parsed.
    """
    strings = (text.count(b'"') - text.count(b'\\"')) // 2
    containers, keys = text.count(b"[") + text.count(b"{"), text.count(b":")
    most_containers, most_strings, most_keys = 3 * tensors + _SPARE, 5 * tensors + _SPARE, 4 * tensors + _SPARE
    if strings <= most_strings and (containers > most_containers or keys > most_keys):
        for match in _STRING.finditer(text):  # brackets and colons within strings are only text
            string = match[0]
            containers -= string.count(b"[") + string.count(b"{")
            keys -= string.count(b":")
    if strings > most_strings or containers > most_containers or keys > most_keys:
        raise MalformedHeader(
            f"its JSON cannot be read: {containers:,} containers, {strings:,} strings and {keys:,} keys are too many for its tensors."
        )


def parse_json_object(text: bytes, convert: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Return a JSON object in which no key occurs twice at any depth and no text is invalid Unicode. Raises `MalformedHeader`.

    `convert` may replace inner objects as they are read.
    """

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise MalformedHeader(f"the key {twice!r} occurs twice.")
        return found if convert is None else convert(found)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        decoded = text.decode("utf-8")
        if "\\u" in decoded:  # "\ud800" is JSON, but half a character. First, so that what is read twice is not held twice
            json.dumps(json.loads(decoded), ensure_ascii=False).encode("utf-8")
        document = json.loads(decoded, object_pairs_hook=unique, parse_constant=refuse)
    except MalformedHeader:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedHeader(f"its JSON cannot be read ({error}).") from None
    if not isinstance(document, dict):
        raise MalformedHeader("its JSON is not an object.")
    return document


def _place(tensors: Sequence[tuple[str, DType, tuple[int, ...]]]) -> list[tuple[str, TensorEntry]]:
    placed: list[tuple[str, TensorEntry]] = []
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        placed.append((name, TensorEntry(dtype, tuple(shape), begin, end)))
        begin = end
    return placed


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise MalformedHeader("__metadata__ must map strings to strings.")
    return value


def _sound_entry(fields: dict[str, Any]) -> PlainEntry | dict[str, Any]:
    """Return the entry of these fields, if they are sound."""
    if fields.keys() != _FIELDS:
        return fields
    try:
        return _plain_entry("", fields)
    except MalformedHeader:
        return fields  # who knows its name refuses it


def _plain_entry(name: str, fields: Any) -> PlainEntry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise MalformedHeader(f"tensor {name!r} must have exactly dtype, shape and data_offsets.")
    shape, offsets, dtype_name = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not _is_list_of_sizes(shape) or len(shape) > _MAX_DIMENSIONS or math.prod(filter(None, shape)) >= _MAX_EXTENT // 8:
        raise MalformedHeader(f"tensor {name!r} has no usable shape.")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedHeader(f"tensor {name!r} has no usable data_offsets.")
    try:
        dtype = dtype_named(dtype_name) if isinstance(dtype_name, str) else None
    except UnsupportedDtype as error:
        raise MalformedHeader(f"tensor {name!r}: {error}") from None
    if dtype is None:
        raise MalformedHeader(f"tensor {name!r} has no usable dtype.")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise MalformedHeader(f"tensor {name!r}: {offsets[1] - offsets[0]:,} bytes do not fit {dtype.name} {shape}.")
    return (*offsets, dtype.code, *shape)


def _is_list_of_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for size in value:  # noqa: SIM110 — a generator would take three times as long
        if type(size) is not int or not 0 <= size < _MAX_EXTENT:
            return False
    return True


def _check_entries(ordered: Mapping[str, PlainEntry], data_bytes: int) -> None:
    end = 0
    for name, (begin, its_end, *_) in ordered.items():
        if begin != end:
            kind = "overlaps the one before it" if begin < end else "leaves a hole before it"
            raise MalformedHeader(f"tensor {name!r} {kind} ({begin:,} instead of {end:,}).")
        end = its_end
    if end > data_bytes:
        raise MalformedHeader(f"the file is cut short: {end - data_bytes:,} bytes are missing.")
    if end < data_bytes:
        raise MalformedHeader(f"{data_bytes - end:,} bytes after the last tensor belong to nothing.")

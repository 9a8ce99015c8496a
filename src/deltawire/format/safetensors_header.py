"""The header of a safetensors file, read strictly and written canonically.

A file is 8 bytes of header length, that many bytes of JSON, then the data section. Whatever a header claims is checked against the size
of the file before anything is mapped: a header that passes cannot make a reader look outside the file, at a hole, or at bytes twice.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import DType, dtype_named
from ..errors import CheckpointError, UnsupportedDtype

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 8
_MAX_DIMENSIONS = 32
_MAX_EXTENT = 1 << 62
_AGAIN = "Download or save the checkpoint again."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `begin` and `end` count bytes from the start of the data section."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The entries in the order of their data, the free-form metadata (None where the file has none), and where the data section starts."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str] | None
    data_start: int


def header_length(prefix: bytes, file_size: int, where: str) -> int:
    """The header's length from the first 8 bytes of a file. Raises `CheckpointError` where such a header cannot be in such a file."""
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{where}: {file_size} bytes are too few for a safetensors file. {_AGAIN}")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where} is not a safetensors file: it claims a header of {length:,} bytes. Pass a checkpoint.")
    if LENGTH_BYTES + length > file_size:
        raise CheckpointError(f"{where}: the file ends inside its header. {_AGAIN}")
    return length


def parse_header(text: bytes, file_size: int, where: str) -> Header:
    """The header in `text`, for a file of `file_size` bytes that is called `where` in errors. Raises `CheckpointError`."""
    document = parse_json_object(text, where)
    metadata = _metadata(document.pop("__metadata__", None), where)
    entries = {name: _entry(name, fields, where) for name, fields in document.items()}
    # Tensors without elements share their offset with a neighbour; sorting by the end too puts them before it.
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    data_start = LENGTH_BYTES + len(text)
    _check_extents(ordered, file_size - data_start, where)
    return Header(ordered, metadata, data_start)


def build_header(tensors: Iterable[tuple[str, TensorEntry]], metadata: Mapping[str, str] | None) -> bytes:
    """Length and JSON, padded so that the data section starts at a multiple of 8. The inverse of `parse_header`."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in tensors:
        document[name] = {"dtype": entry.dtype.name, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def place_in_order(tensors: Sequence[tuple[str, DType, tuple[int, ...]]]) -> list[tuple[str, TensorEntry]]:
    """Entries without holes, each aligned to its element size: in the order given if that aligns them, else the widest elements first."""
    placed = _place(tensors)
    if all(entry.begin % entry.dtype.itemsize == 0 for _, entry in placed):
        return placed
    return _place(sorted(tensors, key=lambda tensor: -tensor[1].itemsize))


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no key occurs twice at any depth and no text is invalid Unicode. Raises `CheckpointError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{where}: the key {twice!r} occurs twice. {_AGAIN}")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # "\ud800" is JSON, but half a character
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its JSON cannot be read ({error}). {_AGAIN}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: its JSON is not an object. {_AGAIN}")
    return document


def _place(tensors: Sequence[tuple[str, DType, tuple[int, ...]]]) -> list[tuple[str, TensorEntry]]:
    placed: list[tuple[str, TensorEntry]] = []
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        placed.append((name, TensorEntry(dtype, tuple(shape), begin, end)))
        begin = end
    return placed


def _metadata(value: Any, where: str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings. {_AGAIN}")
    return value


def _entry(name: str, fields: Any, where: str) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: tensor {name!r} must have exactly dtype, shape and data_offsets. {_AGAIN}")
    shape, offsets, dtype_name = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not _is_list_of_sizes(shape) or len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= _MAX_EXTENT // 8:
        raise CheckpointError(f"{where}: tensor {name!r} has no usable shape. {_AGAIN}")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: tensor {name!r} has no usable data_offsets. {_AGAIN}")
    try:
        dtype = dtype_named(dtype_name) if isinstance(dtype_name, str) else None
    except UnsupportedDtype as error:
        raise CheckpointError(f"{where}: tensor {name!r}: {error}") from None
    if dtype is None:
        raise CheckpointError(f"{where}: tensor {name!r} has no usable dtype. {_AGAIN}")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise CheckpointError(f"{where}: tensor {name!r}: {offsets[1] - offsets[0]:,} bytes do not fit {dtype.name} {shape}. {_AGAIN}")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_EXTENT for size in value)


def _check_extents(ordered: Mapping[str, TensorEntry], data_bytes: int, where: str) -> None:
    end = 0
    for name, entry in ordered.items():
        if entry.begin != end:
            kind = "overlaps the one before it" if entry.begin < end else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {name!r} {kind} ({entry.begin:,} instead of {end:,}). {_AGAIN}")
        end = entry.end
    if end > data_bytes:
        raise CheckpointError(f"{where}: the file is cut short: {end - data_bytes:,} bytes are missing. {_AGAIN}")
    if end < data_bytes:
        raise CheckpointError(f"{where}: {data_bytes - end:,} bytes after the last tensor belong to nothing. {_AGAIN}")

"""Remember which tensor was in which file of a published checkpoint, so that it can be written again byte for byte.

A chain stores weights in its own files. `deltawire publish` attaches a description of the files that it read (docs/protocol.md §3), and
`pull` writes the weights to such files again. The description holds names and headers only, so it is the same for all versions.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..safetensors_header import LENGTH_BYTES, Header, MalformedHeader, check_density, parse_header, parse_json_object
from .checkpoint import INDEX_FILE, Checkpoint, is_plain_file_name
from .staged_output import sync_file

LAYOUT_FILE = "deltawire-layout.json"
_VERSION = 1
_MOST_BYTES = 256 << 20
_MOST_FILES = 10_000
_WORK = "layout.tmp"


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """`headers` maps file names to headers, as text and parsed. `index` is the text of the index."""

    index: bytes
    headers: dict[str, tuple[bytes, Header]]


def describe_layout(checkpoint: Checkpoint) -> bytes | None:
    """Return the description of a sharded checkpoint's files. Return None for a single file, which every reader writes alike."""
    if checkpoint.index is None:
        return None
    files = {shard.name: shard.map[LENGTH_BYTES : shard.header.data_start].decode() for shard in checkpoint.shards}
    document = {
        "deltawire": "layout",
        "version": _VERSION,
        "index": (checkpoint.path / INDEX_FILE).read_bytes().decode(),
        "files": files,
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_layout(data: bytes, most_tensors: int) -> ShardLayout:
    """Return the layout in a description. Raises `MalformedHeader` if this release cannot read it.

    `most_tensors` is the largest possible number of tensors. A description that would need far more objects is refused first.
    """
    check_density(data, _MOST_FILES)
    document = parse_json_object(data)
    files, index = document.get("files"), document.get("index")
    if document.get("deltawire") != "layout" or document.get("version") != _VERSION or not isinstance(index, str):
        raise MalformedHeader("it is not a layout that this release reads.")
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise MalformedHeader("its files are not names with headers.")
    headers = {}
    for name, text in files.items():
        if not is_plain_file_name(name) or not name.endswith(".safetensors") or name.startswith("."):
            raise MalformedHeader(f"it names the file {name!r}.")
        encoded = text.encode()
        headers[name] = encoded, _header(encoded, most_tensors)
    weight_map = {tensor: name for name, (_, header) in headers.items() for tensor in header.entries}
    check_density(index.encode(), most_tensors)
    if parse_json_object(index.encode()).get("weight_map") != weight_map:
        raise MalformedHeader("its index does not fit its files.")
    return ShardLayout(index.encode(), headers)


def restore_layout(folder: Path) -> bool:
    """Write the weights in `folder` to the files that its description names, and remove the description. Return whether it did.

    If the description cannot be used, it is only removed: it may belong to an earlier version with other tensors. No other process may use
    `folder`, because it is between two states meanwhile. Raises `OSError`, and `CheckpointError` if `folder` is not a checkpoint.
    """
    path = folder / LAYOUT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return False
    path.unlink()
    source = Checkpoint(folder)
    try:
        layout = parse_layout(data, len(source)) if len(data) <= _MOST_BYTES else None
    except MalformedHeader:
        layout = None
    if layout is None or not _has_same_tensors(layout, source):
        return False
    work = folder / _WORK
    work.mkdir()
    for name, (text, header) in layout.headers.items():
        _write(work / name, text, header, source)
    (work / INDEX_FILE).write_bytes(layout.index)
    sync_file(work / INDEX_FILE)
    for shard in source.shards:
        shard.path.unlink()
    if source.index is not None:
        (folder / INDEX_FILE).unlink()
    for written in sorted(work.iterdir()):
        os.replace(written, folder / written.name)
    shutil.rmtree(work)
    return True


def _header(text: bytes, most_tensors: int) -> Header:
    """Parse the header in a text. The size of the file is taken from the header."""
    check_density(text, most_tensors)
    document = parse_json_object(text)
    ends = [entry["data_offsets"][1] for name, entry in document.items() if name != "__metadata__" and _has_offsets(entry)]
    return parse_header(text, LENGTH_BYTES + len(text) + max(ends, default=0), most_tensors=most_tensors)


def _has_offsets(entry: object) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int)


def _has_same_tensors(layout: ShardLayout, source: Checkpoint) -> bool:
    """Return whether the layout names exactly these tensors, each in one file."""
    found = [(name, entry.dtype, entry.shape) for _, header in layout.headers.values() for name, entry in header.entries.items()]
    return sorted(name for name, _, _ in found) == sorted(source) and all(
        (source.entry(name).dtype, source.entry(name).shape) == (dtype, shape) for name, dtype, shape in found
    )


def _write(path: Path, text: bytes, header: Header, source: Checkpoint) -> None:
    with path.open("xb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in header.entries:  # in the order of their data, without holes
            array = source[name]
            if array.nbytes:
                file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())

"""A checkpoint on disk as a mapping of names to arrays: one safetensors file, or a Hugging Face directory of them.

Opening reads headers only. Arrays are views of memory-mapped files, so a checkpoint may be far larger than memory. No other process may
truncate the files while a `Checkpoint` is in use: the operating system kills a process that reads missing pages (SIGBUS).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ..safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    MalformedHeader,
    TensorEntry,
    header_length,
    parse_header,
    parse_json_object,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MIRROR_RECORD_FILE = "deltawire.json"
"""The record that a mirror adds to each checkpoint. No file of a version has this name."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a checkpoint, memory-mapped. `name` is its name in the index."""

    name: str
    path: Path
    header: Header
    map: mmap.mmap

    def array(self, entry: TensorEntry) -> NDArray[Any]:
        """Return a view of the tensor in the file. Writing to it changes the file, if the map is writable."""
        return np.ndarray(entry.shape, entry.dtype.numpy, self.map, self.header.data_start + entry.begin)


class Checkpoint(Mapping[str, NDArray[Any]]):
    """The tensors of the checkpoint at `path`, read-only (bf16 and fp8 as `ml_dtypes`).

    Headers and index are checked on opening. `CheckpointError` names the file, the tensor and the remedy. A tensor whose data is not
    aligned to its element size, as some early writers left it, is copied into memory when it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_directory = path.is_dir()
        if not self.is_directory:
            self.index: dict[str, Any] | None = None
            self.shards = [open_shard(path.name, path)]
        else:
            self.index = _read_index(path)
            self.shards = [open_shard(name, contained(path, name)) for name in _shard_names(path, self.index)]
        self._found: dict[str, tuple[Shard, TensorEntry]] = {}
        for shard in self.shards:
            self._refuse_delta(shard)
            for name, entry in shard.header.entries.items():
                if name in self._found:
                    both = f"{self._found[name][0].name} and {shard.name}"
                    raise CheckpointError(f"{path}: tensor {name!r} is in both {both}. Save the checkpoint again.")
                self._found[name] = shard, entry
        if self.index is not None:
            self._check_against_index(self.index["weight_map"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        shard, entry = self._found[name]
        array = shard.array(entry)
        if array.flags.aligned:
            return array
        aligned = array.copy()
        aligned.flags.writeable = False
        return aligned

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def entry(self, name: str) -> TensorEntry:
        """Return the header's entry of a tensor, without reading its data."""
        return self._found[name][1]

    @property
    def weight_bytes(self) -> int:
        return sum(entry.nbytes for _, entry in self._found.values())

    @staticmethod
    def _refuse_delta(shard: Shard) -> None:
        if "deltawire" in (shard.header.metadata or {}):
            raise CheckpointError(f"{shard.path} is a delta, not a checkpoint. Pass the full weights here.")

    def _check_against_index(self, weight_map: Mapping[str, str]) -> None:
        for name, shard_name in weight_map.items():
            if name not in self._found or self._found[name][0].name != shard_name:
                raise CheckpointError(
                    f"{self.path}: the index says that tensor {name!r} is in {shard_name}, but it is not. Download the checkpoint again."
                )
        for name, (shard, _) in self._found.items():
            if name not in weight_map:
                raise CheckpointError(f"{self.path}: tensor {name!r} of {shard.name} is not in the index. Save the checkpoint again.")


def open_shard(name: str, path: Path, *, writable: bool = False) -> Shard:
    """Map one safetensors file and check its header. Raises `CheckpointError`, or `OSError` if it cannot be opened."""
    _require_regular_file(path)
    with path.open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        with _refused_by_name(path):
            header = parse_header(file.read(header_length(file.read(LENGTH_BYTES), size)), size)
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return Shard(name, path, header, mapped)


def contained(directory: Path, name: str) -> Path:
    """Return the path of the file `name` in `directory`. Raises `CheckpointError` if a link leads out of the directory.

    A snapshot in the cache of huggingface_hub consists of links into `blobs`, next to `snapshots`. These count as inside.
    """
    root = directory.resolve()
    target = (root / name).resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{directory / name} is a link that leads out of the checkpoint. Replace it by the file itself.")
    if not target.exists():
        raise CheckpointError(f"{directory / name} is missing. Download the checkpoint again, or wait until it is written completely.")
    return root / name


def _read_index(directory: Path) -> dict[str, Any] | None:
    """Return the index of a sharded directory, or None for a directory with a single file."""
    single, index = (directory / SINGLE_FILE).exists(), (directory / INDEX_FILE).exists()
    if single and index:
        raise CheckpointError(f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}. Pass the one file, or remove what is stale.")
    if single:
        return None
    if not index:
        others = ", ".join(sorted(found.name for found in directory.glob("*.safetensors"))[:4])
        remedy = f"Pass one of its files instead: {others}." if others else "Is it a checkpoint, and completely downloaded?"
        raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}. {remedy}")
    path = contained(directory, INDEX_FILE)
    _require_regular_file(path)
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: an index of more than {MAX_HEADER_BYTES:,} bytes. Download the checkpoint again.")
    with _refused_by_name(path):
        document = parse_json_object(path.read_bytes())
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names. Download the checkpoint again.")
    return document


def _shard_names(directory: Path, index: Mapping[str, Any] | None) -> list[str]:
    if index is None:
        return [SINGLE_FILE]
    names = sorted(set(index["weight_map"].values()))
    for name in names:
        if not is_plain_file_name(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{directory}: the index names the shard {name!r}, which is not a .safetensors file of this directory. "
                "Do not trust this checkpoint; download it from its source."
            )
    return names


@contextlib.contextmanager
def _refused_by_name(path: Path) -> Iterator[None]:
    try:
        yield
    except MalformedHeader as reason:
        raise CheckpointError(f"{path}: {reason} Download or save the checkpoint again.") from None


def is_plain_file_name(name: str) -> bool:
    """Return whether `name` can only mean an entry of the directory itself, on any operating system."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\:\0")


def check_can_be_written(name: str) -> None:
    """Raise `CheckpointError` if this process cannot write a file of that name, for example in a locale that lacks its characters."""
    encoding = sys.getfilesystemencoding()
    try:
        name.encode(encoding, sys.getfilesystemencodeerrors())
    except UnicodeEncodeError:
        raise CheckpointError(
            f"a file with the name {name!a} cannot be written, since this process encodes file names as {encoding}. "
            f"Set PYTHONUTF8=1, or a locale with UTF-8, such as LC_ALL=C.UTF-8."
        ) from None


def _require_regular_file(path: Path) -> None:
    """Refuse pipes, which would block, and devices, which cannot be mapped."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a regular file. Pass a .safetensors file or a checkpoint directory.")

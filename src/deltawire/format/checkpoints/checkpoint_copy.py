"""Copy a checkpoint into a new one of the same layout, whose tensors can then be changed in place.

The copy goes through a small buffer and the arrays are mapped, so memory does not grow with the checkpoint. Space is really allocated, also
for reserved tensors. So a full disk causes an `OSError` while copying, and not a SIGBUS while writing to a map. File systems that copy on
write, such as btrfs, cannot promise this.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DType, dtype_of_numpy
from ...errors import CheckpointError, DtypeMismatch, ShapeMismatch, TensorMissing, TensorUnexpected
from ..safetensors_header import ALIGNMENT, TensorEntry, build_header, place_in_order
from .checkpoint import INDEX_FILE, Checkpoint, Shard, contained, open_shard
from .staged_output import StagedOutput, files_below, refuse_overlap, sync_file

_BUFFER_BYTES = 8 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".index.json")
"""Suffixes of files that hold or list weights. If the weights of a directory change, its other weight files would be out of date."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How one file of the copy is made: its entries in the order of their data, some copied from `source`, the others zeros."""

    source: Shard
    entries: dict[str, TensorEntry]
    copied: AbstractSet[str]

    @property
    def is_verbatim(self) -> bool:
        """Whether the file is an exact copy of the source, header included."""
        header = self.source.header
        return header.data_start % ALIGNMENT == 0 and list(self.entries.items()) == list(header.entries.items())


def plan_copy(shards: list[Shard], drop: AbstractSet[str], add: Mapping[str, tuple[DType, tuple[int, ...]]]) -> list[ShardPlan]:
    """Return what each file of the copy holds. Added tensors go to the last file. Any other file that loses all its tensors is left out."""
    plans = []
    for shard in shards:
        is_last = shard is shards[-1]
        kept = [(name, entry.dtype, entry.shape) for name, entry in shard.header.entries.items() if name not in drop]
        added = [(name, *add[name]) for name in sorted(add, key=lambda name: (-add[name][0].itemsize, name))] if is_last else []
        if kept or is_last:
            plans.append(ShardPlan(shard, dict(place_in_order([*kept, *added])), {name for name, _, _ in kept}))
    return plans


class WritableCheckpoint(MutableMapping[str, NDArray[Any]]):
    """A copy of a checkpoint that does not have its final name yet. Use it as a context manager; leaving it without `commit` removes the
    copy.

    Arrays are writable views of the new files. Names to drop can be read from the source until `del state[name]`. Names to add appear with
    `state[name] = array`, which copies the values; later changes of `array` have no effect. No other name can be set or deleted.
    """

    def __init__(
        self, source: Checkpoint, staged: StagedOutput, shards: list[Shard], dropping: set[str], adding: set[str], left_out: list[str]
    ) -> None:
        self.left_out = left_out
        """Files of the source directory that were not copied: other weights, which would be out of date, and linked directories."""
        self._source = source
        self._staged = staged
        self._shards = shards
        self._dropping = dropping
        self._adding = adding
        self._found = {name: (shard, entry) for shard in shards for name, entry in shard.header.entries.items()}
        self._order = dict.fromkeys(source)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._dropping:
            return self._source[name]
        if name in self._adding:
            raise KeyError(name)
        shard, entry = self._found[name]
        return shard.array(entry)

    def __setitem__(self, name: str, array: NDArray[Any]) -> None:
        if name not in self._adding:
            raise CheckpointError(f"no room is reserved for tensor {name!r}. Name it in `add`, or write into its array.")
        shard, entry = self._found[name]
        if dtype_of_numpy(array.dtype) is not entry.dtype:
            raise DtypeMismatch(f"tensor {name!r} is {array.dtype}, but room is reserved for {entry.dtype.name}.")
        if array.shape != entry.shape:
            raise ShapeMismatch(f"tensor {name!r} has shape {array.shape}, but room is reserved for {entry.shape}.")
        target = shard.array(entry).view(entry.dtype.bits)
        np.copyto(target, array.view(entry.dtype.bits))
        self._dropping.discard(name)
        self._adding.discard(name)
        self._order[name] = None

    def __delitem__(self, name: str) -> None:
        if name not in self._dropping:
            if name not in self:
                raise KeyError(name)
            raise CheckpointError(f"the copy has room for tensor {name!r}. To leave it out, name it in `drop` when you make the copy.")
        self._dropping.discard(name)
        del self._order[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._order

    def __enter__(self) -> WritableCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._staged.discard()

    def commit(self) -> None:
        """Give the copy its final name, durably. Raises `CheckpointError` if a name was not yet dropped or added."""
        if self._dropping or self._adding:
            names = sorted(self._dropping | self._adding)
            raise CheckpointError(f"tensors are still to be dropped or added: {names}. Finish the change first.")
        for shard in self._shards:
            shard.map.flush()
            sync_file(shard.path)
        self._staged.commit()


def copy_checkpoint(
    source: Checkpoint,
    out: Path,
    *,
    drop: AbstractSet[str] = frozenset(),
    add: Mapping[str, tuple[DType, tuple[int, ...]]] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> WritableCheckpoint:
    """Copy `source` to a temporary name next to `out`, without the tensors in `drop` and with zeros for those in `add`.

    A file becomes a file. A directory becomes a directory with the same file names, a matching index, and the files that are not weights. A
    tensor in both `drop` and `add` changes its dtype or shape. Refuses an `out` that exists (unless `replace`) or overlaps the source.
    `progress` gets the number of bytes copied since its last call. The temporary copy is removed after any failure.
    """
    adding = dict(add or {})
    for name in drop:
        if name not in source:
            raise TensorMissing(f"{source.path} has no tensor {name!r} to remove.")
    for name in adding:
        if name in source and name not in drop:
            raise TensorUnexpected(f"{source.path} already has a tensor {name!r}.")
    refuse_overlap(source.path, out)
    plans = plan_copy(source.shards, drop, adding)
    _refuse_small_disk(out, sum(entry.nbytes for plan in plans for entry in plan.entries.values()))
    staged = StagedOutput(out, directory=source.is_directory, replace=replace)
    try:
        staged.refuse_losses(files_below(source.path))  # before copying; repeated at the end
        shards, left_out = _write_files(source, staged.path, plans, progress or (lambda _: None))
    except BaseException:
        staged.discard()
        raise
    return WritableCheckpoint(source, staged, shards, set(drop), set(adding), left_out)


def _refuse_small_disk(out: Path, needed: int) -> None:
    """Fail before hours of copying. A small delta can also ask for any amount of zeros."""
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise CheckpointError(
            f"{out} needs {needed:,} bytes, but there are {free:,} left on its disk. Free some space, or choose another directory."
        )


def _write_files(source: Checkpoint, target: Path, plans: list[ShardPlan], progress: Progress) -> tuple[list[Shard], list[str]]:
    left_out: list[str] = []
    if source.is_directory:  # the small files first: a link that leads outside is refused before gigabytes are copied
        left_out = _copy_companions(source, target)
        if source.index is not None:
            _write_index(source, target, plans)
    paths = [target / plan.source.name if source.is_directory else target for plan in plans]
    for plan, path in zip(plans, paths, strict=True):
        _write_shard(plan, path, progress)
    return [open_shard(plan.source.name, path, writable=True) for plan, path in zip(plans, paths, strict=True)], left_out


def _write_shard(plan: ShardPlan, path: Path, progress: Progress) -> None:
    header = plan.source.header
    with plan.source.path.open("rb", buffering=0) as origin, path.open("xb", buffering=0) as target:
        if plan.is_verbatim:
            _copy_range(origin, 0, plan.source.map.size(), target, progress)
            return
        _write_all(target, build_header(plan.entries.items(), header.metadata))
        for name, entry in plan.entries.items():
            if name in plan.copied:
                _copy_range(origin, header.data_start + header.entries[name].begin, entry.nbytes, target, progress)
            else:
                _write_zeros(entry.nbytes, target, progress)


def _copy_range(origin: FileIO, start: int, length: int, target: FileIO, progress: Progress) -> None:
    """Copy through a buffer, not with `copy_file_range`, which may share blocks: a write to the map would then need new ones."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, length)))
    origin.seek(start)
    while length:
        read = origin.readinto(buffer[: min(length, len(buffer))])
        if not read:
            raise CheckpointError(f"{origin.name} was cut short while it was copied. Wait until it is written completely.")
        _write_all(target, buffer[:read])
        length -= read
        progress(read)


def _write_zeros(length: int, target: FileIO, progress: Progress) -> None:
    zeros = memoryview(bytes(min(_BUFFER_BYTES, length)))
    while length:
        piece = zeros[: min(length, len(zeros))]
        _write_all(target, piece)
        length -= len(piece)
        progress(len(piece))


def _write_all(target: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[target.write(view) :]
    except OSError as error:
        error.filename = error.filename or target.name  # a failed write does not say where
        raise


def _write_index(source: Checkpoint, target: Path, plans: list[ShardPlan]) -> None:
    """Write the index: the source's bytes if no tensor was added or dropped, otherwise with a new weight_map and new totals."""
    assert source.index is not None
    weight_map = {name: plan.source.name for plan in plans for name in plan.entries}
    if all(plan.is_verbatim for plan in plans) and weight_map == source.index["weight_map"]:
        _copy_file(contained(source.path, INDEX_FILE), target / INDEX_FILE)
        return
    entries = [entry for plan in plans for entry in plan.entries.values()]
    metadata = source.index.get("metadata")
    totals = dict(metadata) if isinstance(metadata, dict) else {}
    totals["total_size"] = sum(entry.nbytes for entry in entries)
    if "total_parameters" in totals:
        totals["total_parameters"] = sum(math.prod(entry.shape) for entry in entries)
    document = {**source.index, "metadata": totals, "weight_map": weight_map}
    with (target / INDEX_FILE).open("xb", buffering=0) as file:
        _write_all(file, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")
        os.fsync(file.fileno())


def _copy_companions(source: Checkpoint, target: Path) -> list[str]:
    """Copy configuration, tokenizer and other files that are not weights. Return the files that were left out."""
    own = {shard.name for shard in source.shards} | {INDEX_FILE}
    left_out = []
    for folder, subfolders, files in os.walk(source.path):
        here = Path(folder).relative_to(source.path)
        left_out += [str(here / name) for name in subfolders if (Path(folder) / name).is_symlink()]
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and not (Path(folder) / name).is_symlink())
        for name in sorted(files):
            relative = here / name
            if str(relative) in own:
                continue
            if name.lower().endswith(WEIGHT_SUFFIXES) or not (Path(folder) / name).is_file():
                left_out.append(str(relative))
                continue
            (target / here).mkdir(parents=True, exist_ok=True)
            _copy_file(contained(source.path, str(relative)), target / relative)
    return left_out


def _copy_file(origin: Path, path: Path) -> None:
    with origin.open("rb", buffering=0) as file, path.open("xb", buffering=0) as target:
        _copy_range(file, 0, os.fstat(file.fileno()).st_size, target, lambda _: None)
        os.fsync(target.fileno())

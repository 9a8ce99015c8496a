"""Make the files of shortcuts again from a replica of the model. A file with the hash in its record is that file, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..delta.encode import encode_delta
from ..delta.resolve import apply_delta
from ..dtypes import DType, dtype_of_numpy
from ..errors import DataDamaged, DeltaError, StateError, TensorError
from ..format import delta_file
from ..format.content_hash import new_hash
from ..format.delta_files.grouped import GroupedDelta
from ..format.records.record_parts import FileEntry
from ..format.safetensors_header import LENGTH_BYTES, Header, MalformedHeader, header_length, parse_header
from ..store.base import Store
from ..tensors.bits import TensorPart

State = Mapping[str, NDArray[Any]]
_Parts = tuple[tuple[str, tuple[int, int]], ...] | None
"""The ranges of elements that a file covers, by name. None for whole tensors."""
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class RebuiltShard:
    """A file of a checkpoint that was made again: its header, and the tensors in the order of their data."""

    header: bytes
    tensors: tuple[NDArray[Any], ...]

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of the file."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            for start in range(0, len(flat), _PIECE):
                yield flat[start : start + _PIECE]


def rebuild_shard(source: Store, entry: FileEntry, state: State, *, most_tensors: int) -> RebuiltShard | None:
    """Make a file of a checkpoint from a state. Returns None unless it has the hash in its record.

    Only the header of the file is read from the source, because it says which tensors the file holds, and in which order.

    Parameters
    ----------
    source
        A store that holds the file.
    entry
        The file.
    state
        The state of the checkpoint.
    most_tensors
        The number of tensors of the state.
    """
    text, header = _read_header(source, entry, most_tensors)
    tensors = []
    for name, held in header.entries.items():
        tensor = state.get(name)
        if tensor is None or tensor.shape != held.shape or dtype_of_numpy(tensor.dtype) != held.dtype:
            return None
        tensors.append(tensor)
    shard = RebuiltShard(text, tuple(tensors))
    hasher = new_hash()
    for piece in shard.pieces():
        hasher.update(piece)
    return shard if hasher.hexdigest() == entry.blake3 else None


def rebuild_skip(state: State, names: Sequence[str], steps: Sequence[Sequence[bytes]], *, threads: int | None) -> list[bytes]:
    """Return the deltas of some tensors over several versions: one for whole tensors, or one for each part of them that files cover.

    Returns [] if the deltas do not lead from one version to the next.

    Parameters
    ----------
    state
        The state that the skip starts from.
    names
        The tensors of some files of the skip.
    steps
        The deltas of these tensors, version by version.
    threads
        Number of threads. None means one per core.
    """
    try:
        dtypes = {name: dtype_of_numpy(state[name].dtype) for name in names}
        by_parts: dict[_Parts, list[bytes]] = {}
        for delta in (delta for deltas in steps for delta in deltas):
            by_parts.setdefault(_parts_of(delta, names, dtypes), []).append(delta)
        return [_composed(state, names, parts, deltas, threads) for parts, deltas in by_parts.items()]
    except (DeltaError, StateError, TensorError):
        return []


def _parts_of(delta: bytes, names: Sequence[str], dtypes: Mapping[str, DType]) -> _Parts:
    file = delta_file.parse(delta, names=names)
    listed = file.file_parts if isinstance(file, GroupedDelta) else None
    found = file.parts if not isinstance(file, GroupedDelta) else None if listed is None else listed.of(names, dtypes)
    return None if found is None else tuple(sorted(found.items()))


def _composed(state: State, names: Sequence[str], parts: _Parts, deltas: Sequence[bytes], threads: int | None) -> bytes:
    covered = None if parts is None else dict(parts)
    then = {name: _covered(name, state[name], covered) for name in names}
    now = {name: _covered(name, state[name].copy(), covered) for name in names}
    for delta in deltas:
        apply_delta(now, delta, threads=threads)
    return encode_delta(then, now, threads=threads)


def _covered(name: str, tensor: NDArray[Any], parts: Mapping[str, tuple[int, int]] | None) -> Any:
    """Return a tensor, or the part of it that a process of a sharded trainer publishes."""
    if parts is None:
        return tensor
    start, stop = parts.get(name, (0, 0))
    return TensorPart(tensor.reshape(-1)[start:stop], tensor.shape, start)


def _read_header(source: Store, entry: FileEntry, most_tensors: int) -> tuple[bytes, Header]:
    """Return the beginning of a file, up to its first tensor, as bytes and parsed."""
    try:
        prefix = bytearray(min(LENGTH_BYTES, entry.size))
        source.read_into(entry.key, memoryview(prefix))
        text = bytearray(header_length(bytes(prefix), entry.size))
        source.read_into(entry.key, memoryview(text), offset=LENGTH_BYTES)
        return bytes(prefix + text), parse_header(bytes(text), entry.size, most_tensors=most_tensors)
    except MalformedHeader as error:
        raise DataDamaged(f"{entry.key} in {source.url}: {error}") from error

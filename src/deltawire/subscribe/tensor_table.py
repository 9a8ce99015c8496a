"""The names, types and shapes of a chain's tensors.

Deltas of version 3 name no tensors, and commits only count them. A process that has the weights of a version in another form than a
checkpoint, such as a worker of an engine, therefore needs this table. It is read from the headers of a full checkpoint's shards, which are
not covered by a hash of their own. The digest proves it later: the digest of a state depends on the name, type and shape of each tensor,
so weights that are digested with a wrong table do not have the digest that the commit says.

In a spool the table is one JSON file: `{"deltawire": "tensors", "version": 1, "tensors": {NAME: [TYPE, [EXTENT, …]], …}}`.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..chain.fetch import Fetcher, read_header
from ..chain.log import ChainLog
from ..chain.routes.remaining_routes import was_collected
from ..chain.routes.restore import Hop
from ..dtypes import DType, dtype_named
from ..errors import DataDamaged, SpoolError, UnsupportedDtype, UnsupportedVersion
from ..format.records.canonical import dump
from ..format.records.record_parts import FileEntry
from ..format.safetensors_header import MAX_HEADER_BYTES, Header, MalformedHeader, check_density, parse_json_object
from .cache.private_folder import retryable_error, spool_errors
from .sync_context import SyncContext

VERSION = 1
"""The version of the file that `write_table` writes."""

_MOST_DIMENSIONS, _MOST_ELEMENTS = 32, 1 << 59
_LEAST_ROW = 12
"""The fewest bytes that a tensor needs in the file."""
_STREAMS = 8
"""Most headers that are read at the same time. A header is small, so the time to its first byte counts."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor of the chain.

    Parameters
    ----------
    dtype
        The type of the elements.
    shape
        The extent of each dimension.
    """

    dtype: DType
    shape: tuple[int, ...]


TensorTable: TypeAlias = Mapping[str, TensorSpec]
"""All tensors of the chain, by ascending names."""


def read_tensor_table(context: SyncContext, anchor: Hop) -> TensorTable:
    """Read the table of a version that a route begins with. Only the headers of its shards are fetched.

    Raises the errors of `Fetcher.fetch`, and `DataDamaged` if the headers do not fit the records.

    Parameters
    ----------
    context
        The sync in which the route was found.
    anchor
        The first hop of a route from nothing, with its files (`Routes.find`).
    """
    return read_headers(context.log, context.fetcher(), anchor)


def read_headers(log: ChainLog, fetcher: Fetcher, anchor: Hop) -> TensorTable:
    """Read the table as `read_tensor_table` does, without a sync.

    Parameters
    ----------
    log
        The chain.
    fetcher
        Waits for objects that are missing.
    anchor
        The first hop of a route from nothing, with its files.
    """
    collected = was_collected(log, anchor)
    most_tensors = anchor.target.tensors

    def header(entry: FileEntry) -> Header:
        return fetcher.patiently(entry, collected, partial(read_header, log.store, entry, most_tensors=most_tensors))

    shards = [entry for entry in anchor.files if entry.name is not None and entry.name.endswith(".safetensors")]
    found: dict[str, TensorSpec] = {}
    with ThreadPoolExecutor(max(1, min(_STREAMS, len(shards))), thread_name_prefix="deltawire-fetch") as pool:
        waiting = [pool.submit(header, entry) for entry in shards]
        try:
            for entry, future in zip(shards, waiting, strict=True):
                _add_shard(found, entry, future.result(), most_tensors)
        finally:
            for future in waiting:
                future.cancel()
    if len(found) != most_tensors:
        raise DataDamaged(f"the checkpoint of {anchor.target.describe()} has {len(found):,} tensors, not {most_tensors:,}.")
    return dict(sorted(found.items()))


def find_shards(context: SyncContext, anchor: Hop, names: Collection[str]) -> list[FileEntry]:
    """Return the shards of a version that hold some of these tensors. Only headers are fetched. Raises the errors of `Fetcher.fetch`.

    Parameters
    ----------
    context
        The sync in which the route was found.
    anchor
        The first hop of a route from nothing, with its files (`Routes.find`).
    names
        The names of the tensors.
    """
    fetcher, collected = context.fetcher(), was_collected(context.log, anchor)

    def has_some(entry: FileEntry) -> bool:
        read = partial(read_header, context.log.store, entry, most_tensors=anchor.target.tensors)
        return not fetcher.patiently(entry, collected, read).entries.keys().isdisjoint(names)

    shards = [entry for entry in anchor.files if entry.name is not None and entry.name.endswith(".safetensors")]
    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="deltawire-fetch") as pool:
        return [entry for entry, is_home in zip(shards, pool.map(has_some, shards), strict=True) if is_home]


def _add_shard(found: dict[str, TensorSpec], entry: FileEntry, header: Header, most_tensors: int) -> None:
    """Add the tensors of one shard. Raises `DataDamaged` if they do not fit the records, before the table grows beyond what those allow."""
    if sum(tensor.nbytes for tensor in header.entries.values()) != entry.raw:
        raise DataDamaged(f"{entry.key} does not hold {entry.raw:,} bytes of weights.")
    if len(found) + len(header.entries) > most_tensors:
        raise DataDamaged(f"{entry.key} and the shards before it have more than the {most_tensors:,} tensors of their version.")
    for name, tensor in header.entries.items():
        if name in found:
            raise DataDamaged(f"tensor {name!r} is in {entry.key} and in another shard.")
        found[name] = TensorSpec(tensor.dtype, tensor.shape)


def write_table(path: Path, table: TensorTable) -> None:
    """Replace the file of a table as a whole. Does nothing if the file has this table. Raises `SpoolError`.

    Parameters
    ----------
    path
        The file, usually `DeltaSpool.table_path`.
    table
        The table.
    """
    rows = {name: [spec.dtype.name, list(spec.shape)] for name, spec in table.items()}
    data = dump({"deltawire": "tensors", "version": VERSION, "tensors": rows})
    if len(data) > MAX_HEADER_BYTES:
        raise SpoolError(f"{path}: a table of {len(data):,} bytes; {MAX_HEADER_BYTES:,} are allowed.", hint="")
    with spool_errors(path):
        if not (path.exists() and path.read_bytes() == data):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            arriving = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")  # several workers may write the same table
            try:
                arriving.write_bytes(data)
                os.replace(arriving, path)
            except BaseException:
                arriving.unlink(missing_ok=True)
                raise


def load_table(path: Path) -> TensorTable:
    """Return the table in a file. Raises `SpoolError` if the file is missing or damaged, and `UnsupportedVersion`.

    Parameters
    ----------
    path
        The file that `write_table` wrote.
    """
    with spool_errors(path), path.open("rb") as file:
        data = file.read(MAX_HEADER_BYTES + 1)
    try:
        if len(data) > MAX_HEADER_BYTES:
            raise MalformedHeader(f"it has more than {MAX_HEADER_BYTES:,} bytes.")
        check_density(data, len(data) // _LEAST_ROW)
        document = parse_json_object(data)
        if document.get("deltawire") != "tensors" or type(document.get("version")) is not int:
            raise MalformedHeader("it is not a table of tensors.")
        if document["version"] != VERSION:
            raise UnsupportedVersion(f"{path} is a table of version {document['version']}; this release reads {VERSION}.")
        rows = document.get("tensors")
        if document.keys() != {"deltawire", "version", "tensors"} or not isinstance(rows, dict):
            raise MalformedHeader("it is not a table of tensors.")
        return dict(sorted((name, _spec(name, row)) for name, row in rows.items()))
    except (MalformedHeader, UnsupportedDtype) as error:
        raise retryable_error(f"{path} is damaged: {error}") from None


def _spec(name: str, row: Any) -> TensorSpec:
    if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or not isinstance(row[1], list):
        raise MalformedHeader(f"tensor {name!r} has no type and shape.")
    shape = tuple(row[1])
    if len(shape) > _MOST_DIMENSIONS or any(type(extent) is not int or extent < 0 for extent in shape):
        raise MalformedHeader(f"tensor {name!r} has no usable shape.")
    if math.prod(filter(None, shape)) > _MOST_ELEMENTS:
        raise MalformedHeader(f"tensor {name!r} has no usable shape.")
    return TensorSpec(dtype_named(row[0]), shape)

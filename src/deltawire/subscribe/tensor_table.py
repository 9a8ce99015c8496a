"""The names, types and shapes of a chain's tensors.

Deltas of version 3 name no tensors, and commits only count them. A process that has the weights of a version in another form than a
checkpoint, such as a worker of an engine, therefore needs this table. It is read from the headers of a full checkpoint's shards, which are
not covered by a hash of their own. The digest proves it later: the digest of a state depends on the name, type and shape of each tensor,
so weights that are digested with a wrong table do not have the digest that the commit says.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ..chain.fetch import Fetcher, read_header
from ..chain.log import ChainLog
from ..chain.restore import Hop
from ..chain.routes import was_collected
from ..dtypes import DType
from ..errors import DataDamaged
from ..format.records.record_parts import FileEntry
from ..format.safetensors_header import Header
from .sync_context import SyncContext

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

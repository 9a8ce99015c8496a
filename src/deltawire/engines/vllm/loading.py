"""Loads everything anew into a model, through its own loaders. This cannot be reverted: after a failure the model holds a mix of two
versions.

The tensors come from a checkpoint on disk, or from the store: `stream_anchor` fetches a full checkpoint shard by shard, so a host needs
memory for two shards only. Tensors are given to the model in the order of its modules. vLLM collects the tensors of a module until
it has all of them, so in any other order it would collect much of the model.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...chain.routes.restore import Hop
from ...errors import CheckpointError, DataDamaged
from ...format.checkpoints.checkpoint import Checkpoint, open_shard
from ...format.records.record_parts import FileEntry
from ...format.safetensors_header import Header
from ...subscribe.cache.private_folder import retryable_error
from ...subscribe.spool.delta_spool import DeltaSpool
from ...subscribe.sync_context import SyncContext
from ...subscribe.tensor_table import find_shards
from ...tensors.torch_types import to_torch

Tensors = Iterator[tuple[str, torch.Tensor]]
"""Tensors by their names in the checkpoint."""

_NUMBER = re.compile(r"(\d+)")
_ATTEMPTS = 8
"""A shard that other workers keep deleting is fetched this many times."""


def module_order(names: Iterable[str]) -> list[str]:
    """Return names of tensors in the order in which a model is loaded: all tensors of a module one after the other, and layer 2 before 10.

    Parameters
    ----------
    names
        The names of tensors in the checkpoint.
    """
    return sorted(names, key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)])


def whole_tensors(weights: Checkpoint, names: Iterable[str]) -> Tensors:
    """Yield tensors of a checkpoint, as memory that is mapped from its files. Changes of this memory do not reach the files.

    Parameters
    ----------
    weights
        The checkpoint. Its files must not change while the tensors are used.
    names
        The tensors, in this order.
    """
    shards = {shard.name: shard for shard in weights.shards}
    home = {name: shard.name for shard in weights.shards for name in shard.header.entries}
    maps = {name: _PrivateMap(shard.path, shard.header) for name, shard in shards.items()}
    for name in names:
        yield name, maps[home[name]].tensor(name)


def load_tensors(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load everything as at the start, including vLLM's processing after loading, into the memory that the kernels use.

    Parameters
    ----------
    model
        The model.
    model_config
        vLLM's configuration of the model.
    tensors
        All tensors of a checkpoint. Those of a module should follow each other.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        with torch.no_grad():
            model.load_weights(tensors)
    finally:  # even after a failure, or the next attempt would find half-loaded layers
        finalize_layerwise_reload(model, model_config)


def stream_anchor(hop: Hop, context: SyncContext, order: Sequence[str], *, spool: DeltaSpool) -> Tensors:
    """Yield all tensors of a full checkpoint in the store. The next shard is fetched while the tensors of one are used.

    The workers of a host call it at the same time and share the shards, each of which is fetched once. A shard is checked against its
    hash. Raises the errors of `Fetcher.fetch`, `SpoolError`, and `DataDamaged` if the shards do not fit the records. Then the model holds
    a mix of versions.

    Parameters
    ----------
    hop
        The full checkpoint: the first hop of a route from nothing, with its files (`Routes.find`).
    context
        The sync in which the route was found.
    order
        The names of all tensors in the order of modules (`module_order`). The tensors of each shard are sorted by it.
    spool
        Holds the shards while they are loaded.
    """
    position = {name: number for number, name in enumerate(order)}
    shards = [entry for entry in hop.files if (entry.name or "").endswith(".safetensors")]
    seen: set[str] = set()
    with spool.loading(), ThreadPoolExecutor(1, "deltawire-shards") as ahead:
        coming = ahead.submit(_fetch, spool, hop, shards[0], context) if shards else None
        try:
            for number, entry in enumerate(shards):
                assert coming is not None
                shard = coming.result()
                following = shards[number + 1 : number + 2]
                coming = ahead.submit(_fetch, spool, hop, following[0], context) if following else None
                names = shard.header.entries.keys()
                if sum(tensor.nbytes for tensor in shard.header.entries.values()) != entry.raw or names & seen:
                    raise DataDamaged(f"{entry.key} does not hold what the record of {hop.target.describe()} says.")
                seen |= names
                for name in sorted(names, key=lambda name: position.get(name, len(position))):
                    yield name, shard.tensor(name)
        except BaseException:
            context.abandon()  # the thread is joined, so it must not wait for data
            raise
    if len(seen) != hop.target.tensors:
        raise DataDamaged(f"the checkpoint of {hop.target.describe()} has {len(seen):,} tensors, not {hop.target.tensors:,}.")


def fetch_tensors(hop: Hop, context: SyncContext, names: Collection[str], *, spool: DeltaSpool) -> dict[str, torch.Tensor]:
    """Return some tensors of a full checkpoint in the store. Only the shards that hold them are fetched.

    Parameters
    ----------
    hop
        The full checkpoint, as for `stream_anchor`.
    context
        The sync in which the route was found.
    names
        The names of the tensors.
    spool
        Holds the shards while they are fetched.
    """
    found: dict[str, torch.Tensor] = {}
    with spool.loading():
        for entry in find_shards(context, hop, names):
            shard = _fetch(spool, hop, entry, context)
            found |= {name: shard.tensor(name) for name in shard.header.entries.keys() & set(names)}
    return found


def _fetch(spool: DeltaSpool, hop: Hop, entry: FileEntry, context: SyncContext) -> _PrivateMap:
    """Fetch a shard and map it. Its file may be deleted before it is mapped, if another worker is two shards ahead."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _open(spool.shard(hop, entry, context))
    raise retryable_error(f"{spool.folder}: other processes delete the shards that this one loads.")


def _open(path: Path) -> _PrivateMap:
    try:
        return _PrivateMap(path, open_shard(path.name, path).header)
    except CheckpointError as error:
        raise DataDamaged(f"a shard is not a safetensors file: {error.message}") from None


class _PrivateMap:
    """A safetensors file in memory that may be written, without any effect on the file."""

    def __init__(self, path: Path, header: Header) -> None:
        self.header = header
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that shares this memory, and keeps it."""
        entry = self.header.entries[name]
        array: NDArray[Any] = np.ndarray(entry.shape, entry.dtype.numpy, self._memory, self.header.data_start + entry.begin)
        return to_torch(array if array.flags.aligned else array.copy())

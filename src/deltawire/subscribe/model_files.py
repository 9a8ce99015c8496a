"""Read what a chain says about its model apart from the weights: config, tokenizer, and the element type of each tensor.

This is enough to build an empty model of the right form, which then gets its weights by following the chain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..chain.attachments import attachments_hop, attachments_of, fetch_attachments
from ..chain.fetch import Fetcher
from ..chain.log import ChainLog
from ..chain.reader_options import ReaderOptions
from ..chain.routes.remaining_routes import Routes
from ..chain.routes.restore import Hop
from ..chain.routes.walk_route import taking, walk_route
from ..chain.version import Version
from ..dtypes import DType
from ..errors import DataDamaged
from ..format.checkpoints.checkpoint import check_can_be_written
from ..format.content_hash import content_hash
from ..format.records.record_parts import RecipeRecord
from ..format.records.version_records import Commit
from ..store.base import Store
from .cache.host_cache import open_host_cache
from .chain_view import ChainView
from .tensor_table import read_headers

_Loaded = TypeVar("_Loaded")
_MOST_BYTES = 256 << 20
"""Larger than any tokenizer. If a record claims more, the files are refused and not fetched."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The attachments of a version, and the types of its tensors.

    The files are checked against their records. The types are not checked: wrong ones show as `EngineRefused` when weights are loaded.

    Parameters
    ----------
    files
        The attachments by name.
    dtypes
        The types of the tensors in the checkpoint that the version is rebuilt from.
    state_bytes
        The size of the weights, from the version's commit. None if not known.
    tensors
        The number of tensors, from the version's commit. None if not known.
    recipe
        How the weights were quantised, from the version's commit. None if they were not.
    """

    files: Mapping[str, bytes]
    dtypes: Mapping[str, DType]
    state_bytes: int | None = None
    tensors: int | None = None
    recipe: RecipeRecord | None = None

    def write(self, folder: Path) -> Path:
        """Write the files to a directory, for libraries that load from one. Raises `CheckpointError` if a name cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            check_can_be_written(name)
            (folder / name).write_bytes(data)
        return folder


class FollowedFiles(Generic[_Loaded]):
    """Keeps an object that is loaded from the attachments, such as a tokenizer, at the version of a reader.

    The object is loaded again when a version has other attachments than the one before. May be used from several threads.

    Parameters
    ----------
    store
        The store that holds the chain.
    load
        Makes the object from the files.
    options
        Which chain to accept and how to read it.
    """

    def __init__(self, store: Store, load: Callable[[ModelFiles], _Loaded], *, options: ReaderOptions | None = None) -> None:
        self._store = store
        self._load = load
        self._options = options
        self._lock = threading.Lock()
        self.first = read_model_files(store, options=options)
        """The files of the version that was newest at the start."""
        self._hashes = {name: content_hash(data) for name, data in self.first.files.items()}
        self._loaded = load(self.first)

    def at(self, version: Version | None) -> _Loaded:
        """Return the object for a version. Raises the errors of `read_model_files` and `load`, and then keeps the previous object.

        Without a version, or for a version whose commit names no attachments, it returns the object that was loaded last.
        """
        with self._lock:
            if version is not None and version.attachments and version.attachments != self._hashes:
                files = read_model_files(self._store, options=self._options, seq=version.seq)
                self._loaded = self._load(files)
                self._hashes = dict(version.attachments)
            return self._loaded


def read_model_files(store: Store, *, seq: int | None = None, options: ReaderOptions | None = None) -> ModelFiles:
    """Read the files of one version. Raises the errors of `Subscriber.sync`, such as `NoChain` before the first version.

    Only the header of each file of weights is fetched.

    Parameters
    ----------
    store
        The store that holds the chain.
    seq
        The number of the version's commit, `Version.seq`. None reads the newest.
    options
        Which chain to accept and how to read it.
    """
    options = options or ReaderOptions()
    log = options.open_log(store)
    chain = ChainView(log, max_silence=options.max_silence, channel=options.open_channel(log))
    shared = open_host_cache(options)
    files = chain.reach(
        seq, lambda target: _read(chain.log, target, Fetcher(store, limits=chain.log.limits, patience=options.patience, shared=shared))
    )
    chain.check_silence()
    return files


def _read(log: ChainLog, target: Commit, fetcher: Fetcher) -> ModelFiles:
    """Read the attachments, and the types of the tensors from the first hop of the cheapest route that is left."""
    files = None if target.attachments is None else _attachments(log, target, attachments_hop(target), fetcher)
    routes = Routes(log, fetcher=fetcher)

    def read(hops: Sequence[Hop]) -> ModelFiles:
        with taking(hops[0]):
            found = _attachments(log, target, hops[0], fetcher) if files is None else files
            dtypes = {name: spec.dtype for name, spec in read_headers(log, fetcher, hops[0]).items()}
            return ModelFiles(found, dtypes, target.state_bytes, target.tensors, target.recipe)

    return walk_route(routes, lambda: routes.find(None, target), read)


def _attachments(log: ChainLog, target: Commit, hop: Hop, fetcher: Fetcher) -> dict[str, bytes]:
    entries = attachments_of(target, hop)
    if sum(entry.size for entry in entries) > _MOST_BYTES:
        raise DataDamaged(f"the attachments of {target.describe()} claim more than {_MOST_BYTES:,} bytes.")
    return fetch_attachments(log, entries, hop, fetcher)

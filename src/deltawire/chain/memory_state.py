"""A version of the model in memory, changed whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..delta.prepared import PreparedUpdate
from ..errors import BaseMismatch, ChainBroken, DataDamaged, LimitExceeded, ResultMismatch
from ..format.delta_file import DeltaBytes
from ..format.digest import Digest
from ..format.records.chain_records import Commit, FileEntry
from ..format.safetensors_header import LENGTH_BYTES, MalformedHeader, header_length, parse_header
from ..store.base import Progress
from ..tensors.state import state_digest
from .fetch import Fetcher, WasCollected
from .restore import Hop

Arrays = dict[str, NDArray[Any]]


class Update(Protocol):
    """A change that is decoded and checked part by part, then made and taken back at will: a `PreparedUpdate`, or what an engine has."""

    nbytes: int
    is_applied: bool
    """True from the moment that the new values are written until the old ones are back: what tells after Ctrl-C which are there."""

    def add(self, state: Any, delta: DeltaBytes) -> tuple[Digest, Digest]: ...

    def apply(self) -> None: ...

    def revert(self) -> None: ...


NewUpdate = Callable[[], Update]


@dataclass(frozen=True, slots=True)
class Undo:
    """What a change overwrote. It leads back from `after` to `before`, once; `nbytes` is the memory it holds on to."""

    before: Commit
    after: Commit
    update: Update

    @property
    def nbytes(self) -> int:
        return self.update.nbytes


class MemoryState(Mapping[str, NDArray[Any]]):
    """Arrays by name (bf16 and fp8 as `ml_dtypes`) at a version of the chain; empty at first. As a mapping it is read-only.

    Its methods are for one thread at a time. While `apply` or `undo` runs, other threads that read arrays may see a mix of two versions;
    after it, whether it succeeded or not, they see one. `new_update` makes the updates that `resolve` fills.
    """

    def __init__(self, *, threads: int | None = None, new_update: NewUpdate | None = None) -> None:
        self.commit: Commit | None = None
        """The commit whose state this is."""
        self._arrays: Arrays = {}
        self._names: list[str] = []
        self._threads = threads
        self._new_update: NewUpdate = new_update or (lambda: PreparedUpdate(threads=threads))

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._arrays[name].view()
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    @property
    def writable(self) -> Mapping[str, NDArray[Any]]:
        """The arrays themselves. Who writes to them answers for it."""
        return MappingProxyType(self._arrays)

    @property
    def digest(self) -> Digest | None:
        """What the state's digest must be, by its commit; None while it is empty."""
        return None if self.commit is None else self.commit.digest

    def segment(self, entry: FileEntry) -> Arrays:
        """The part of the state that a file of a delta covers: a run of tensors in the order of their names."""
        if entry.first is None or entry.count is None or entry.first + entry.count > len(self._names):
            raise ChainBroken(f"{entry.key} is said to cover tensors that this state does not have.")
        return {name: self._arrays[name] for name in self._names[entry.first : entry.first + entry.count]}

    def check(self) -> None:
        """Scan the whole state and compare it with its digest. `BaseMismatch` if memory has rotted, or somebody wrote to it."""
        found = state_digest(self._arrays, threads=self._threads)
        if self.commit is not None and found != self.commit.digest:
            raise BaseMismatch(f"the state in memory has digest {found}; that of {self.commit.describe()} is {self.commit.digest}.")

    def clear(self) -> None:
        """Forget everything."""
        self.commit, self._arrays, self._names = None, {}, []

    def adopt(self, arrays: Arrays, commit: Commit) -> None:
        """Take over memory that holds the state of `commit`. The caller has checked that it does."""
        self.commit, self._arrays, self._names = commit, arrays, sorted(arrays)

    def load_anchor(self, hop: Hop, fetcher: Fetcher, *, collected: WasCollected | None = None, progress: Progress | None = None) -> None:
        """Take on the state of a checkpoint in the store. Files are read straight into the memory that arrays are views of.

        Checked are every file's BLAKE3, then the digest. Until all is well the old state stays.
        """
        arrays: Arrays = {}
        shards = [entry for entry in hop.files if entry.name is not None and entry.name.endswith(".safetensors")]
        for entry, data in fetcher.prefetch(shards, collected=collected, progress=progress):
            found = _shard_arrays(entry, data, hop.target.tensors)
            twice = found.keys() & arrays.keys()
            if twice:
                raise DataDamaged(f"tensor {min(twice)!r} is in two files of the checkpoint of {hop.target.describe()}.")
            arrays |= found
            if len(arrays) > hop.target.tensors:
                raise LimitExceeded(f"the checkpoint of {hop.target.describe()} has more than its {hop.target.tensors:,} tensors.")
        with fetcher.watch.phase("digest"):
            digest = state_digest(arrays, threads=self._threads)
        if digest != hop.target.digest or len(arrays) != hop.target.tensors:
            raise ResultMismatch(f"the checkpoint of {hop.target.describe()} has digest {digest}, not {hop.target.digest}.")
        self.adopt(arrays, hop.target)

    def resolve(self, hop: Hop, fetcher: Fetcher, *, collected: WasCollected | None = None, progress: Progress | None = None) -> Update:
        """Fetch the files of a delta and decode them against this state, the next on its way while one is decoded. Changes nothing.

        Each part is compared with the digests in its file, and their sum with the commits'. Raises as `PreparedUpdate.add` and `fetch` do.
        """
        base = self.digest
        if base is None or base != hop.base_digest:
            raise BaseMismatch(f"{hop.target.describe()} is to be made from commit {hop.base}, which is not the state at hand.")
        update = self._new_update()
        difference = Digest()
        for entry, data in fetcher.prefetch(hop.files, collected=collected, progress=progress):
            with fetcher.watch.phase("resolve"):
                before, after = update.add(self.segment(entry), data)
            difference += after - before
        if base + difference != hop.target.digest:
            raise ResultMismatch(f"the files of {hop.target.describe()} do not lead to its digest {hop.target.digest}.")
        return update

    def apply(self, update: Update, target: Commit) -> Undo:
        """Write what was resolved, and be at `target`. Returns what leads back. It cannot fail half-way."""
        if self.commit is None:
            raise BaseMismatch("there is no state that an update could change.")
        undo = Undo(self.commit, target, update)
        try:
            update.apply()
        finally:  # Ctrl-C that came while values were written is raised when they are
            if update.is_applied:
                self.commit = target
        return undo

    def undo(self, undo: Undo) -> None:
        """Go back by what `apply` returned; only from where it led to (`BaseMismatch`)."""
        if self.commit is None or self.commit.seq != undo.after.seq:
            raise BaseMismatch(f"this leads back from commit {undo.after.seq}, which is not the state at hand.")
        try:
            undo.update.revert()
        finally:
            if not undo.update.is_applied:
                self.commit = undo.before

    def relabel(self, target: Commit) -> None:
        """Be at another commit that has the same state: a fence or a rewind, or back from one."""
        if self.commit is None or self.commit.digest != target.digest:
            raise BaseMismatch(f"commit {target.seq} has not the state at hand.")
        self.commit = target


def _shard_arrays(entry: FileEntry, data: memoryview, most_tensors: int) -> Arrays:
    """The tensors of one safetensors file, as views of its bytes."""
    try:
        length = header_length(bytes(data[:LENGTH_BYTES]), len(data))
        header = parse_header(bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]), len(data), most_tensors=most_tensors)
    except MalformedHeader as reason:
        raise DataDamaged(f"{entry.key} is not a safetensors file: {reason}") from None
    if sum(tensor.nbytes for tensor in header.entries.values()) != entry.raw:
        raise DataDamaged(f"{entry.key} does not hold {entry.raw:,} bytes of weights.")
    arrays: Arrays = {}
    for name, tensor in header.entries.items():
        array: NDArray[Any] = np.ndarray(tensor.shape, tensor.dtype.numpy, data, header.data_start + tensor.begin)
        arrays[name] = array if array.flags.aligned else array.copy()
    return arrays

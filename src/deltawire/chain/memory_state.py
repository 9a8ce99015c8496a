"""A version of the model in memory. Each change is made completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..delta.prepared import PreparedUpdate
from ..errors import BaseMismatch, ChainBroken, DataDamaged, LimitExceeded, ResultMismatch
from ..format.delta_file import DeltaBytes
from ..format.digest import Digest
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from ..format.safetensors_header import LENGTH_BYTES, MalformedHeader, header_length, parse_header
from ..store.base import Progress
from ..tensors.state import state_digest
from .fetch import Fetcher, WasCollected
from .routes.restore import Hop

Arrays = dict[str, NDArray[Any]]


class Update(Protocol):
    """New values for some elements, decoded and checked. It can be applied and reverted any number of times.

    `PreparedUpdate` is one. Engines have their own for weights that are not arrays in memory.
    """

    nbytes: int
    """Memory that the update occupies."""
    is_applied: bool
    """True from the moment the new values are written until the old ones are back. After Ctrl-C it tells which of them are there."""

    def add(self, state: Any, delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a delta against the part of the state that it changes. Returns the digests before and after. Changes nothing."""
        ...

    def apply(self) -> None:
        """Write the new values."""
        ...

    def revert(self) -> None:
        """Write the old values back."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """An update that leads from the state of the commit `before` to that of `after`, and back."""

    before: Commit
    after: Commit
    update: Update
    version_before: Commit | None = None
    """The version of the state before: `before` itself, or an earlier commit if `before` is a fence."""

    @property
    def nbytes(self) -> int:
        return self.update.nbytes


class MemoryState(Mapping[str, NDArray[Any]]):
    """Arrays by name (bf16 and fp8 as `ml_dtypes`) at a version of the chain. It is empty at first, and read-only as a mapping.

    Only one thread at a time may call its methods. While `apply`, `redo` or `undo` runs, other threads that read the arrays may see a mix
    of two versions. Afterwards they see one version, whether the call succeeded or not.

    Parameters
    ----------
    threads
        Number of threads for decoding and digests. None means one per core.
    """

    def __init__(self, *, threads: int | None = None) -> None:
        self.commit: Commit | None = None
        """The commit whose state this is. It may be a fence."""
        self.version: Commit | None = None
        """The version whose state this is: `commit`, or the version that the fence `commit` carries on. None while the state is empty."""
        self._arrays: Arrays = {}
        self._names: list[str] = []
        self._threads = threads

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
        """The arrays themselves. A caller that writes to them must keep them equal to the state of `commit`."""
        return MappingProxyType(self._arrays)

    @property
    def digest(self) -> Digest | None:
        """The digest that the commit declares for this state. None while the state is empty."""
        return None if self.commit is None else self.commit.digest

    def segment(self, entry: FileEntry) -> Arrays:
        """Return the tensors that a file of a delta covers: a run of tensors in the order of their names."""
        if entry.first is None or entry.count is None or entry.first + entry.count > len(self._names):
            raise ChainBroken(f"{entry.key} is said to cover tensors that this state does not have.")
        return {name: self._arrays[name] for name in self._names[entry.first : entry.first + entry.count]}

    def check(self) -> None:
        """Read the whole state and compare it with its digest.

        Raises `BaseMismatch` if memory is damaged or other code has written to the arrays.
        """
        found = state_digest(self._arrays, threads=self._threads)
        if self.commit is not None and found != self.commit.digest:
            raise BaseMismatch(f"the state in memory has digest {found}; that of {self.commit.describe()} is {self.commit.digest}.")

    def clear(self) -> None:
        """Make the state empty."""
        self.commit = self.version = None
        self._arrays, self._names = {}, []

    def adopt(self, arrays: Arrays, commit: Commit) -> None:
        """Use these arrays, which hold the state of `commit`, from now on. The caller has checked that they do."""
        self._arrays, self._names, self.version = arrays, sorted(arrays), None
        self._label(commit)

    def load_anchor(self, hop: Hop, fetcher: Fetcher, *, collected: WasCollected | None = None, progress: Progress | None = None) -> None:
        """Load a checkpoint from the store. Files are read directly into the memory of which the arrays are views.

        Each file is compared with its BLAKE3 hash, then the whole state with its digest. If a check fails, the old state stays.
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

    def resolve(
        self,
        hop: Hop,
        fetcher: Fetcher,
        *,
        update: Update | None = None,
        resolved: Mapping[FileEntry, tuple[Digest, Digest]] | None = None,
        collected: WasCollected | None = None,
        progress: Progress | None = None,
    ) -> Update:
        """Fetch the files of a delta and decode them against this state. The next file is fetched while one is decoded. Changes nothing.

        Each part is compared with the digests in its file, and their sum with the digests in the commits. Fills and returns `update`, or
        a new `PreparedUpdate`. `resolved` are files of the delta that `update` already holds, decoded against this state, and the
        digests that `Update.add` returned for each. Raises as `Update.add` and `Fetcher.fetch` do.
        """
        base = self.digest
        if base is None or base != hop.base_digest:
            raise BaseMismatch(f"{hop.target.describe()} is relative to commit {hop.base}, which is not the current state.")
        update = PreparedUpdate(threads=self._threads) if update is None else update
        done = resolved or {}
        difference = sum((after - before for before, after in done.values()), Digest())
        for entry, data in fetcher.prefetch([entry for entry in hop.files if entry not in done], collected=collected, progress=progress):
            with fetcher.watch.phase("resolve"):
                before, after = update.add(self.segment(entry), data)
            difference += after - before
        if base + difference != hop.target.digest:
            raise ResultMismatch(f"the files of {hop.target.describe()} do not lead to its digest {hop.target.digest}.")
        return update

    def step(self, update: Update, target: Commit) -> UpdateStep:
        """Return the step from this state to that of `target`, which `update` makes. Changes nothing."""
        if self.commit is None:
            raise BaseMismatch("there is no state that an update could change.")
        return UpdateStep(self.commit, target, update, self.version)

    def apply(self, update: Update, target: Commit) -> UpdateStep:
        """Write what was resolved, so that this is the state of `target`. Returns the step, for `undo`. It cannot fail half-way."""
        step = self.step(update, target)
        self.redo(step)
        return step

    def redo(self, step: UpdateStep) -> None:
        """Write the new values of a step that leads away from this state."""
        try:
            step.update.apply()
        finally:  # if Ctrl-C arrives while values are written, it is raised after they are written
            if step.update.is_applied:
                self._label(step.after)

    def undo(self, step: UpdateStep) -> None:
        """Write the old values of a step back. Raises `BaseMismatch` unless this is the state that the step led to."""
        if self.commit is None or self.commit.seq != step.after.seq:
            raise BaseMismatch(f"this leads back from commit {step.after.seq}, which is not the current state.")
        try:
            step.update.revert()
        finally:
            if not step.update.is_applied:
                self.commit, self.version = step.before, step.version_before

    def relabel(self, target: Commit) -> None:
        """Record another commit that has the same state, such as a fence or a rewind. Raises `BaseMismatch` if its state differs."""
        if self.commit is None or self.commit.digest != target.digest:
            raise BaseMismatch(f"commit {target.seq} does not have the current state.")
        self._label(target)

    def _label(self, commit: Commit) -> None:
        self.commit = commit
        if commit.kind != "fence":
            self.version = commit


def _shard_arrays(entry: FileEntry, data: memoryview, most_tensors: int) -> Arrays:
    """Return the tensors of one safetensors file, as views of its bytes."""
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

"""Finds out what a worker has to write for its next update, while the server still generates.

The workers of a host share one mirror (deltawire/subscribe/mirror). A worker holds the slot of the version that its weights have. An update
brings the mirror to the next version in another slot. The worker then has to write the elements in which the two slots differ. This is
exact for any two versions, whatever route the mirror took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....chain.reader_options import ReaderOptions
from ....errors import MirrorError
from ....format.checkpoints.checkpoint import Checkpoint
from ....format.records.record_parts import CommitRef
from ....subscribe import Mirror, Subscriber
from ....subscribe.mirror.mirror import HeldSlot
from ....tensors.state import thread_count

if TYPE_CHECKING:
    from .element_map import MappedChanges

_COMPARED_AT_ONCE = 4 << 20
"""Number of elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Change:
    """The changed elements of a tensor: flat indices (int32, or int64 for large tensors) and the new values, as bits."""

    indices: NDArray[np.signedinteger[Any]]
    values: NDArray[Any]


class HeldVersion:
    """A version in a mirror. Its files do not change until `release`."""

    def __init__(self, held: HeldSlot) -> None:
        self._held = held
        self._weights: Checkpoint | None = Checkpoint(held.slot.path)
        self.ref: CommitRef = held.record.ref

    @property
    def seq(self) -> int:
        return self.ref.seq

    @property
    def weights(self) -> Checkpoint:
        if self._weights is None:
            raise ValueError(f"commit {self.seq} was released, so its weights cannot be read")
        return self._weights

    def release(self) -> None:
        """Give the slot back to the mirror and unmap its files. Arrays from `weights` must not be used afterwards.

        Unmapping takes about 40 ms per GB that was read. A thread that must not wait leaves it to `Stager.release`.
        """
        self._weights = None
        self._held.release()


@dataclass(slots=True)
class StagedUpdate:
    """A version, and its differences from the version that a worker has."""

    target: HeldVersion
    base: CommitRef | None
    changes: Mapping[str, Change] | None
    """None if the worker's version is unknown or has other tensors."""
    mapped: MappedChanges | None = None
    """The changes by their positions in the model, as far as these are known."""


@dataclass
class Stager:
    """Stages updates on a separate thread.

    With a `url`, it brings the mirror to the requested version itself. Without one, another process (the sidecar) does, and only the
    version that the mirror currently holds can be staged.
    """

    mirror: Path
    url: str | None = None
    options: ReaderOptions | None = None
    threads: int | None = None
    map_changes: Callable[[Mapping[str, Change]], MappedChanges | None] = lambda changes: None
    """Finds the positions of changes in the model. It is called on the staging thread."""
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "deltawire-stage"))
    _subscriber: Subscriber | None = None
    _asked: tuple[int, CommitRef | None] | None = None
    _future: Future[StagedUpdate] | None = None

    def prepare(self, seq: int, live: HeldVersion | None) -> None:
        """Begin to stage the update from the version `live` to version `seq`, unless it is staged or being staged."""
        wanted = seq, None if live is None else live.ref
        if self._asked == wanted and self._future is not None and not (self._future.done() and self._future.exception()):
            return
        self.forget()
        self._asked = wanted
        self._future = self._worker.submit(self._stage, seq, live)

    def take(self, seq: int, live: HeldVersion | None) -> StagedUpdate:
        """Return the staged update, and stage it now if `prepare` was not called. Raises what staging raised.

        The caller must release the version of the update.
        """
        self.prepare(seq, live)
        assert self._future is not None
        future, self._future, self._asked = self._future, None, None
        return future.result()

    def release(self, version: HeldVersion) -> None:
        """Let the staging thread release a version. Returns at once."""
        self._worker.submit(version.release)

    @property
    def staged(self) -> int | None:
        """The version that is staged. None if there is none."""
        ready = self._future is not None and self._future.done() and self._future.exception() is None
        return self._asked[0] if ready and self._asked else None

    @property
    def error(self) -> str | None:
        """Why staging failed. None if it did not."""
        failure = self._future.exception() if self._future is not None and self._future.done() else None
        return None if failure is None else f"{type(failure).__name__}: {failure}"

    def forget(self) -> None:
        """Drop the staged update. If it is being staged, wait for that first."""
        future, self._future, self._asked = self._future, None, None
        if future is not None and future.exception() is None:
            future.result().target.release()

    def close(self) -> None:
        """Drop the staged update, and end the thread and the subscriber."""
        self.forget()
        self._worker.shutdown()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _stage(self, seq: int, live: HeldVersion | None) -> StagedUpdate:
        if self.url is not None:
            if self._subscriber is None:
                self._subscriber = Subscriber(self.url, self.mirror, options=self.options, threads=self.threads)
            self._subscriber.sync(seq=seq)
        held = Mirror(self.mirror, threads=self.threads).open_current()
        if held is None:
            raise MirrorError(f"{self.mirror} holds no sound version. Bring it to commit {seq} first.")
        try:
            if held.record.seq != seq:
                raise MirrorError(f"{self.mirror} is at commit {held.record.seq}, not {seq}.")
            target = HeldVersion(held)
            changes = None if live is None else find_changes(live.weights, target.weights, threads=self.threads)
            mapped = None if changes is None else self.map_changes(changes)
        except BaseException:
            held.release()
            raise
        return StagedUpdate(target, None if live is None else live.ref, changes, mapped)


def find_changes(old: Checkpoint, new: Checkpoint, *, threads: int | None = None) -> dict[str, Change] | None:
    """Return the changed elements of each tensor that differs between two checkpoints, bit for bit.

    Returns None if the checkpoints do not have the same tensors.
    """
    if {name: _type(old, name) for name in old} != {name: _type(new, name) for name in new}:
        return None
    with ThreadPoolExecutor(thread_count(threads), "deltawire-compare") as pool:
        found = pool.map(lambda name: (name, _difference(old[name], new[name])), sorted(new))
        return {name: change for name, change in found if change is not None}


def _type(checkpoint: Checkpoint, name: str) -> tuple[object, object]:
    entry = checkpoint.entry(name)
    return entry.dtype, entry.shape


def _difference(old: NDArray[Any], new: NDArray[Any]) -> Change | None:
    before, after = bits(old), bits(new)
    indices: list[NDArray[np.int64]] = []
    for start in range(0, after.size, _COMPARED_AT_ONCE):
        found = np.flatnonzero(before[start : start + _COMPARED_AT_ONCE] != after[start : start + _COMPARED_AT_ONCE])
        if found.size:
            indices.append(found + start)
    if not indices:
        return None
    where = np.concatenate(indices)
    return Change(where.astype(np.int32) if after.size < 2**31 else where, after[where])


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements as unsigned integers, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")

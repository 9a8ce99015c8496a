"""What a worker needs for its next update, found out while the server still generates.

The workers of a host share one mirror (deltawire/subscribe/mirror.py). A worker holds on to the slot of the version that its weights have;
an update brings the mirror to the next version in another slot. What the worker has to write is where the two differ: exact for any two
versions, however far apart and by whatever way the mirror came there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...chain.reader_options import ReaderOptions
from ...errors import MirrorError
from ...format.checkpoints.checkpoint import Checkpoint
from ...format.records.chain_records import CommitRef
from ...subscribe import Mirror, Subscriber
from ...subscribe.mirror.mirror import HeldSlot
from ...tensors.state import thread_count

if TYPE_CHECKING:
    from .element_map import MappedChanges

_PIECE = 4 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Change:
    """Elements of a tensor that differ: flat indices (int32, or int64 where that is too small) and the new values, as bits."""

    indices: NDArray[np.signedinteger[Any]]
    values: NDArray[Any]


class HeldVersion:
    """A version in a mirror: its files stay as they are until `release`."""

    def __init__(self, held: HeldSlot) -> None:
        self._held = held
        self.ref: CommitRef = held.record.ref
        self.weights = Checkpoint(held.slot.path)

    @property
    def seq(self) -> int:
        return self.ref.seq

    def release(self) -> None:
        """Let the mirror have the slot. Arrays taken from `weights` must not be used any more."""
        self._held.release()


@dataclass(slots=True)
class StagedUpdate:
    """A version, and what differs from the one that a worker has; None if that is unknown, or has other tensors."""

    target: HeldVersion
    base: CommitRef | None
    changes: Mapping[str, Change] | None
    placed: MappedChanges | None = None
    """The changes by their places in the model, as far as these are known."""


@dataclass
class Stager:
    """Stages updates on a thread of its own.

    With a `url` it brings the mirror to the version that is asked for by itself; without, somebody else does (the sidecar), and any other
    version than the one that the mirror serves is refused.
    """

    mirror: Path
    url: str | None = None
    options: ReaderOptions | None = None
    threads: int | None = None
    place: Callable[[Mapping[str, Change]], MappedChanges | None] = lambda changes: None
    """Finds the places of changes; called on that thread."""
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "deltawire-stage"))
    _subscriber: Subscriber | None = None
    _asked: tuple[int, CommitRef | None] | None = None
    _future: Future[StagedUpdate] | None = None

    def prepare(self, seq: int, live: HeldVersion | None) -> None:
        """Begin to stage the update from the version `live` to version `seq`, unless that is done or being done."""
        wanted = seq, None if live is None else live.ref
        if self._asked == wanted and self._future is not None and not (self._future.done() and self._future.exception()):
            return
        self.forget()
        self._asked = wanted
        self._future = self._worker.submit(self._stage, seq, live)

    def take(self, seq: int, live: HeldVersion | None) -> StagedUpdate:
        """The staged update, whose version the caller has to release; stages it now if nobody asked before. Raises what staging raised."""
        self.prepare(seq, live)
        assert self._future is not None
        future, self._future, self._asked = self._future, None, None
        return future.result()

    @property
    def staged(self) -> int | None:
        """The version that is ready to be taken."""
        ready = self._future is not None and self._future.done() and self._future.exception() is None
        return self._asked[0] if ready and self._asked else None

    @property
    def error(self) -> str | None:
        """Why staging failed."""
        failure = self._future.exception() if self._future is not None and self._future.done() else None
        return None if failure is None else f"{type(failure).__name__}: {failure}"

    def forget(self) -> None:
        """Drop what is staged, after waiting for it if it is being staged."""
        future, self._future, self._asked = self._future, None, None
        if future is not None and future.exception() is None:
            future.result().target.release()

    def close(self) -> None:
        """Let go of everything."""
        self.forget()
        self._worker.shutdown()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _stage(self, seq: int, live: HeldVersion | None) -> StagedUpdate:
        if self.url is not None:
            if self._subscriber is None:
                self._subscriber = Subscriber(self.url, self.mirror, options=self.options, threads=self.threads)
            self._subscriber.sync(seq)
        held = Mirror(self.mirror, threads=self.threads).open_current()
        if held is None:
            raise MirrorError(f"{self.mirror} holds no sound version. Bring it to commit {seq} first.")
        try:
            if held.record.seq != seq:
                raise MirrorError(f"{self.mirror} is at commit {held.record.seq}, not {seq}.")
            target = HeldVersion(held)
            changes = None if live is None else find_changes(live.weights, target.weights, threads=self.threads)
            placed = None if changes is None else self.place(changes)
        except BaseException:
            held.release()
            raise
        return StagedUpdate(target, None if live is None else live.ref, changes, placed)


def find_changes(old: Checkpoint, new: Checkpoint, *, threads: int | None = None) -> dict[str, Change] | None:
    """Where two checkpoints differ, bit for bit; tensors without changes are left out. None if their tensors are not the same ones."""
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
    for start in range(0, after.size, _PIECE):
        piece = np.flatnonzero(before[start : start + _PIECE] != after[start : start + _PIECE])
        if piece.size:
            indices.append(piece + start)
    if not indices:
        return None
    where = np.concatenate(indices)
    return Change(where.astype(np.int32) if after.size < 2**31 else where, after[where])


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """The elements as unsigned integers, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")

"""Stages updates of live weights on a separate thread, while the server generates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ....errors import BaseMismatch, EngineRefused, SpoolError
from ....format.delta_file import DeltaBytes
from ....format.records.record_parts import CommitRef, FileEntry
from ....subscribe.spool.fetching_spool import FetchingSpool
from .live_weights import DeltaHop, LiveWeights
from .update_types import StagedUpdate

_SWITCH_SECONDS = 1e-4
"""The time after which the staging thread yields the interpreter to another thread that waits for it."""


class Spool(Protocol):
    """A source of hops. `subscribe.spool.delta_spool.DeltaSpool` is one."""

    def hop(self, base: CommitRef, seq: int) -> DeltaHop | None: ...

    def open(self, entry: FileEntry) -> DeltaBytes: ...

    def peek(self, entry: FileEntry) -> DeltaBytes: ...


class LiveStaging:
    """Stages one update at a time.

    Parameters
    ----------
    weights
        The worker's weights.
    spool
        Where hops are found.
    """

    def __init__(self, weights: LiveWeights, spool: Spool) -> None:
        self._weights = weights
        self._spool = spool
        self._thread = ThreadPoolExecutor(1, "deltawire-stage")
        self._asked: int | None = None
        self._future: Future[StagedUpdate] | None = None

    def prepare(self, seq: int) -> None:
        """Begin to stage the update from the version of the weights to commit `seq`, unless it is staged or being staged.

        When the version of the weights changes, `forget` must be called first.
        """
        if self._asked == seq and self._future is not None and not (self._future.done() and self._future.exception()):
            return
        self.forget()
        self._asked = seq
        self._future = self._thread.submit(self._stage, seq)

    def take(self, seq: int) -> StagedUpdate:
        """Return the staged update, and stage it now if `prepare` was not called. Raises what staging raised."""
        self.prepare(seq)
        assert self._future is not None
        future, self._future, self._asked = self._future, None, None
        return future.result()

    def forget(self) -> None:
        """Drop the staged update. If it is being staged, wait for that first."""
        future, self._future, self._asked = self._future, None, None
        if future is not None and not future.cancel():
            future.exception()

    def run_later(self, work: Callable[[], None]) -> None:
        """Let the staging thread do other work, before it stages anything else."""
        self._thread.submit(work)

    def wait(self) -> None:
        """Return when the staging thread has done all its work."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Drop the staged update, and end the thread."""
        self.forget()
        self._thread.shutdown()

    @property
    def staged(self) -> StagedUpdate | None:
        """The staged update. None if there is none, or it is not complete."""
        future = self._future
        return future.result() if future is not None and future.done() and future.exception() is None else None

    @property
    def error(self) -> str | None:
        """The reason why staging failed. None if it did not."""
        failure = self._future.exception() if self._future is not None and self._future.done() else None
        return None if failure is None else f"{type(failure).__name__}: {failure}"

    def _stage(self, seq: int) -> StagedUpdate:
        """Stage an update, and let the thread that generates take the interpreter back soon.

        Python lets a thread wait 5 ms for the interpreter, which is longer than a step of a small model takes.
        """
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, _SWITCH_SECONDS))
        try:
            return self._decode(seq)
        finally:
            sys.setswitchinterval(usual)

    def _decode(self, seq: int) -> StagedUpdate:
        version = self._weights.version
        if version is None:
            raise BaseMismatch(f"an update to commit {seq} cannot be staged, because the version of the weights is unknown.")
        back = self._weights.undo.back_to(seq)
        if back is not None:
            return back
        hop = self._spool.hop(version.ref, seq)
        if hop is None and isinstance(self._spool, FetchingSpool):
            raise EngineRefused(
                f"commit {seq} cannot be staged: several hops, or a full checkpoint, lead there from commit {version.ref.seq}.",
                hint="Prepare the versions between them first, or update without preparing, which takes longer.",
            )
        if hop is None:
            raise SpoolError(f"the spool has no update from commit {version.ref.seq} to {seq}.")
        return self._weights.stage(hop, self._spool.open, self._spool.peek)

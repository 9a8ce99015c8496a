"""Publishing beside training: `publish` copies the state and returns; a thread does the rest. Training never waits for the store.

At most three copies of the state are held: the baseline, the version that is being published, and the newest one that waits; a fourth
while it is not known what became of a commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..chain.version import Version
from ..errors import PublisherClosed
from ..events import OnEvent, emit
from ..tensors.bits import State
from ..tensors.gpu_handover import Handover
from .at_exit import finish_at_exit, forget, wait_at_exit
from .snapshots import Arrays, SnapshotDevice, copy_tensors, is_kept_like, new_arrays
from .upload.segments import TensorTable

Append = Callable[[Arrays, TensorTable, "int | None", Mapping[str, str], "Mapping[str, bytes] | None"], Version]


class PendingVersion:
    """A state on its way into the chain."""

    def __init__(self, on_raised: Callable[[BaseException], None] = lambda error: None, step: int | None = None) -> None:
        self.name = "a version" if step is None else f"step {step}"
        """What messages call it."""
        self._event = threading.Event()
        self._version: Version | None = None
        self._error: BaseException | None = None
        self._on_raised = on_raised

    def __repr__(self) -> str:
        if not self._event.is_set():
            how = "on its way"
        elif self._error is not None:
            how = f"failed: {type(self._error).__name__}"
        else:
            how = "superseded by a newer state" if self._version is None else f"published as {self._version.describe()}"
        return f"<PendingVersion {self.name}: {how}>"

    def done(self) -> bool:
        """Whether it has landed, failed, or was superseded."""
        return self._event.is_set()

    def result(self, timeout: float | None = None) -> Version | None:
        """Wait for its version; None if a newer state was published in its place. TimeoutError, or the error that it failed with."""
        if not self._event.wait(timeout):
            raise TimeoutError(f"the publication is not done after {timeout} seconds")
        if self._error is not None:
            self._on_raised(self._error)
            raise self._error
        return self._version

    def _resolve(self, version: Version | None = None, error: BaseException | None = None) -> None:
        self._version, self._error = version, error
        self._event.set()


@dataclass(slots=True)
class _Snapshot:
    arrays: Arrays
    table: TensorTable
    step: int | None
    meta: Mapping[str, str]
    attachments: Mapping[str, bytes] | None
    copied: Handover
    """Taken when the copy is complete: a GPU may still be at it."""
    handle: PendingVersion


class BackgroundPublisher:
    """One thread that publishes snapshots, newest first: one that still waits when a newer one comes is superseded.

    An error is raised once by whichever comes first: the handle's `result`, or the next `submit`, `flush` or `close`.
    `append` publishes memory that it may keep, which `keeps` tells; `afterwards` is called when the handle is done.
    """

    def __init__(
        self,
        append: Append,
        keeps: Callable[[Arrays], bool],
        afterwards: Callable[[], None],
        *,
        snapshot: SnapshotDevice = "host",
        on_event: OnEvent | None = None,
    ) -> None:
        self._append = append
        self._keeps = keeps
        self._afterwards = afterwards
        self._place: SnapshotDevice = snapshot
        self.on_event = on_event
        self._changed = threading.Condition()
        self._waiting: _Snapshot | None = None
        self._publishing: _Snapshot | None = None
        self._is_tending = False
        """Whether the thread is at what follows a version, such as skips."""
        self._closing = False
        self._free: list[Arrays] = []
        self._error: BaseException | None = None
        self._failed: PendingVersion | None = None
        """What the error is about."""
        self._thread = threading.Thread(target=self._run, name="deltawire-publish", daemon=True)
        self._thread.start()
        finish_at_exit(self)
        wait_at_exit(self)

    def submit(
        self, state: State, table: TensorTable, step: int | None, meta: Mapping[str, str], attachments: Mapping[str, bytes] | None = None
    ) -> PendingVersion:
        """Copy the state and publish it soon. If an earlier one has failed, raises that error instead, and takes nothing."""
        self._raise_error()
        with self._changed:
            if self._closing:
                raise PublisherClosed("the publisher was closed.")
            superseded, self._waiting = self._waiting, None  # its memory is needed for the newer one
            arrays = superseded.arrays if superseded is not None else self._free.pop() if self._free else {}
        try:
            if not arrays or TensorTable.of(arrays) != table or not is_kept_like(arrays, state, self._place):
                arrays = new_arrays(table, state, self._place)
            if superseded is not None:
                superseded.copied.precede()  # that copy may have been given to another stream
            copy_tensors(state, arrays, wait=False)
            snapshot = _Snapshot(arrays, table, step, meta, attachments, Handover(state), PendingVersion(self._forget_error, step))
            with self._changed:
                if self._closing:  # while the state was copied: nobody would publish it any more
                    raise PublisherClosed("the publisher was closed.")
                overtaken, self._waiting = self._waiting, snapshot  # one that another thread submitted meanwhile
                self._changed.notify_all()
            if overtaken is not None:
                self._supersede(overtaken)
        finally:  # also when the copy was cut off: the older one is overwritten
            if superseded is not None:
                self._supersede(superseded)
        return snapshot.handle

    def recycle(self, arrays: Arrays) -> None:
        """Memory that a later snapshot may use."""
        with self._changed:
            if len(self._free) < 1:
                self._free.append(arrays)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was submitted has landed, failed or been superseded. TimeoutError; else as `submit` for errors."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting is None and self._publishing is None, timeout):
                raise TimeoutError(f"publications are still on their way after {timeout:.3g} seconds.")
        self._raise_error()

    def wait_until_idle(self, seconds: float) -> None:
        """Return when the thread has nothing to do, or after so many seconds. Python may abort if it stops a thread in native code."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and self._publishing is None and not self._is_tending, seconds)

    def on_its_way(self) -> str:
        """Say what was submitted and has not landed, unless its error was raised; for a person. An empty string if nothing."""
        with self._changed:
            handles = [self._failed if self._error is not None else None]
            handles += [snapshot.handle for snapshot in (self._publishing, self._waiting) if snapshot is not None]
        return " and ".join(dict.fromkeys(handle.name for handle in handles if handle is not None))

    def close(self) -> None:
        """Publish what was submitted, and end the thread. Raises as `flush` does, after that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        forget(self)
        self._raise_error()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    return
                self._publishing = snapshot
            self._publish(snapshot)
            with self._changed:
                self._publishing, self._is_tending = None, True
                self._changed.notify_all()
            try:
                with snapshot.copied.taken():  # shortcuts are made of the same copies, and no more on training's stream than these
                    self._afterwards()
            except BaseException as error:  # unforeseen, since upkeep reports what it expects; but the thread must live on
                with self._changed:
                    self._error = error
            with self._changed:
                self._is_tending = False
                self._changed.notify_all()

    def _publish(self, snapshot: _Snapshot) -> None:
        try:
            with snapshot.copied.taken():
                version = self._append(snapshot.arrays, snapshot.table, snapshot.step, snapshot.meta, snapshot.attachments)
        except BaseException as error:  # not swallowed: the next call, or whoever asks for the result, raises it
            with self._changed:
                self._error, self._failed = error, snapshot.handle
            snapshot.handle._resolve(error=error)
        else:
            snapshot.handle._resolve(version)
        finally:
            if not self._keeps(snapshot.arrays):
                self.recycle(snapshot.arrays)

    def _supersede(self, snapshot: _Snapshot) -> None:
        snapshot.handle._resolve()
        emit(self.on_event, "superseded", step=snapshot.step)

    def _forget_error(self, error: BaseException) -> None:
        with self._changed:
            if self._error is error:
                self._error = None

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error, self._failed = self._error, None, None
        if error is not None:
            raise error

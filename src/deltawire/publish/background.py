"""Publishing in the background: `publish` copies the state and returns, and a thread does the rest. Training never waits for the store.

The publisher holds at most three copies of the state: the baseline, the version that is being published, and the newest one that waits.
It holds a fourth while the outcome of a commit is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..chain.version import Version
from ..errors import PublisherClosed, PublishError
from ..events import OnEvent, emit
from ..telemetry.trace_context import traced
from ..tensors.bits import State
from ..tensors.gpu_handover import GpuHandover
from .at_exit import finish_at_exit, forget, wait_at_exit
from .closing import Closing
from .publication import Publication
from .quantising import quantise, refuse_nonfinite_sources
from .snapshots import SnapshotMemory, copy_tensors
from .time_limit import TimeLimit


class PendingVersion:
    """A state that `publish` has accepted, and that becomes a version in the background.

    Parameters
    ----------
    on_raised
        Called with the error when `result` raises it.
    step
        The trainer's step.
    """

    def __init__(self, on_raised: Callable[[BaseException], None] = lambda error: None, step: int | None = None) -> None:
        self.name = "a version" if step is None else f"step {step}"
        """Its name in messages."""
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._version: Version | None = None
        self._error: BaseException | None = None
        self._on_raised = on_raised

    def __repr__(self) -> str:
        if not self._event.is_set():
            how = "being published"
        elif self._error is not None:
            how = f"failed: {type(self._error).__name__}"
        else:
            how = "superseded by a newer state" if self._version is None else f"published as {self._version.describe()}"
        return f"<PendingVersion {self.name}: {how}>"

    def done(self) -> bool:
        """Return whether the state is published, has failed, or was superseded."""
        return self._event.is_set()

    def published(self) -> Version | None:
        """Return the version if it is published; None if it is not published yet, failed or was superseded. Never waits or raises."""
        with self._lock:
            return None if self._error is not None else self._version

    def result(self, timeout: float | None = None) -> Version | None:
        """Wait for the version and return it. Returns None if a newer state was published instead of this one.

        Raises the error that the publication failed with, or TimeoutError. If the publisher was closed before the version was published, it
        raises `CloseTimeout`; a later call returns the version if it is published after all.

        Parameters
        ----------
        timeout
            The longest time to wait, in seconds. None or infinity: wait as long as it takes.
        """
        if not self._event.wait(TimeLimit(timeout).left):
            raise TimeoutError(f"the version is not published after {timeout} seconds.")
        with self._lock:
            version, error = self._version, self._error
        if error is not None:
            self._on_raised(error)
            raise error
        return version

    def _resolve(self, version: Version | None = None, error: BaseException | None = None) -> None:
        with self._lock:
            self._version, self._error = version, error
            self._event.set()

    def _give_up(self, error: BaseException) -> None:
        """Let `result` raise an error unless the outcome is known. The outcome still counts if it comes later."""
        with self._lock:
            if not self._event.is_set():
                self._error = error
                self._event.set()


@dataclass(slots=True)
class _Snapshot:
    publication: Publication
    copied: GpuHandover
    """Says when the copy is complete: a GPU may still be making it."""
    handle: PendingVersion


class BackgroundQueue:
    """Copies states and has one thread write them, the newest first: a state that still waits when a newer one comes is superseded.

    An error is raised once, by the first of these calls: `result` of its handle, or the next `submit`, `flush` or `close`.

    Parameters
    ----------
    write
        Publishes a state that is in memory of `memory`, and returns its version.
    follow_up
        Called after every `write`, when the handle is done already.
    memory
        The memory of the copies.
    previous
        Returns the tensors of the newest version in the chain, for the scales of a state that is quantised.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        write: Callable[[Publication], Version],
        follow_up: Callable[[], None],
        memory: SnapshotMemory,
        *,
        previous: Callable[[], State | None] = lambda: None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._write = write
        self._follow_up = follow_up
        self._memory = memory
        self._previous = previous
        self.on_event = on_event
        self._changed = threading.Condition()
        self._waiting: _Snapshot | None = None
        self._publishing: _Snapshot | None = None
        self._is_following_up = False
        self._closing = self._is_abandoned = False
        self._error: BaseException | None = None
        self._failed: PendingVersion | None = None
        """The publication that failed with the error."""
        self._thread = threading.Thread(target=self._run, name="deltawire-publish", daemon=True)
        self._thread.start()
        finish_at_exit(self)
        wait_at_exit(self)

    def submit(self, publication: Publication) -> PendingVersion:
        """Copy a state, and publish the copy soon. If an earlier one has failed, raise that error instead and accept nothing."""
        self._raise_error()
        if publication.layout is not None and self._waiting is not None:  # find bad weights before it is written over
            refuse_nonfinite_sources(publication.layout, publication.weights)
        with self._changed:
            self._check_open()
            superseded, self._waiting = self._waiting, None  # the newer state is copied into its memory
            before = self._publishing  # it will be the version before this one
        try:
            snapshot = self._copy(publication, superseded, before)
            with self._changed:
                self._check_open()  # it may have been closed while the state was copied
                overtaken, self._waiting = self._waiting, snapshot  # another thread may have submitted one meanwhile
                self._changed.notify_all()
        except BaseException as error:
            if superseded is not None:
                self._lose(superseded, error)
            raise
        for older in (overtaken, superseded):
            if older is not None:
                self._supersede(older)
        return snapshot.handle

    def _copy(self, publication: Publication, superseded: _Snapshot | None, before: _Snapshot | None) -> _Snapshot:
        """Copy or quantise a state, into the memory of the one that it supersedes if that fits. `before` is being published."""
        state, table = publication.weights, publication.table
        arrays = self._memory.take(table, publication.located, None if superseded is None else dict(superseded.publication.weights))
        if superseded is not None:
            superseded.copied.delay_current_streams()  # another stream may still be copying into this memory
        if publication.layout is None:
            copy_tensors(state, arrays, wait=False)
        else:
            previous = None if before is None else before.publication.weights
            if previous is None or any(previous.get(name) is array for name, array in arrays.items()):
                previous = self._previous()  # the one before is in the chain, or it failed, and its memory is used again
            quantise(publication.layout, table.names, state, previous, arrays)
        copy = replace(publication, weights=arrays, is_owned=True, layout=None)
        return _Snapshot(copy, GpuHandover(state), PendingVersion(self._forget_error, publication.step))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every submitted state is published, failed or superseded. Raises TimeoutError, and errors as `submit` does."""
        with self._changed:
            if not self._changed.wait_for(self._is_idle, timeout):
                raise TimeoutError(f"versions are still being published after {timeout:.3g} seconds.")
        self._raise_error()

    def wait_until_idle(self, seconds: float) -> None:
        """Return when the thread has nothing to do, or after this time. Python may abort if it stops a thread in native code."""
        with self._changed:
            self._changed.wait_for(self._is_idle, seconds)

    def _is_idle(self) -> bool:
        return self._is_abandoned or (self._waiting is None and self._publishing is None and not self._is_following_up)

    def unpublished(self) -> str:
        """Name the submitted states that are not published and whose error was not raised. Returns an empty string if there is none."""
        with self._changed:
            handles = [self._failed if self._error is not None else None]
            handles += [snapshot.handle for snapshot in (self._publishing, self._waiting) if snapshot is not None]
        return " and ".join(dict.fromkeys(handle.name for handle in handles if handle is not None))

    def close(self, closing: Closing | None = None) -> None:
        """Publish what was submitted, and end the thread. Then raise errors as `submit` does.

        Raises `CloseTimeout` if that takes longer than `closing` allows. Nothing waits for the thread then.
        """
        closing = closing or Closing(None)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(closing.left)
        forget(self)
        if self._thread.is_alive() and (what := self.unpublished()):
            with self._changed:
                self._is_abandoned = True
                error = self._error
                handles = [snapshot.handle for snapshot in (self._publishing, self._waiting) if snapshot is not None]
            late = closing.timeout(what)
            for handle in handles:
                handle._give_up(late)
            raise late from error
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
                self._publishing, self._is_following_up = None, True
                self._changed.notify_all()
            try:
                with snapshot.copied.on_side_stream():  # shortcuts read the same copies, so they must wait for training's stream, too
                    self._follow_up()
            except BaseException as error:  # not expected, because upkeep reports its errors; but the thread must survive
                with self._changed:
                    self._error = error
            with self._changed:
                self._is_following_up = False
                self._changed.notify_all()

    def _publish(self, snapshot: _Snapshot) -> None:
        try:
            with snapshot.copied.on_side_stream():
                version = self._write(snapshot.publication)
        except BaseException as error:  # the next call raises it, or `result` of the handle
            with self._changed:
                self._error, self._failed = error, snapshot.handle
            snapshot.handle._resolve(error=error)
        else:
            snapshot.handle._resolve(version)

    def _supersede(self, snapshot: _Snapshot) -> None:
        snapshot.handle._resolve()
        emit(self.on_event, "superseded", step=snapshot.publication.step, **traced(snapshot.publication.meta))

    def _lose(self, snapshot: _Snapshot, cause: BaseException) -> None:
        """Note that an accepted state is lost: a newer one was being copied into its memory, and was cut off. Later calls raise it."""
        error = PublishError(f"{snapshot.handle.name} is lost: {type(cause).__name__} stopped the copy of a newer state into its memory.")
        error.__cause__ = cause
        with self._changed:
            self._error, self._failed = error, snapshot.handle
        snapshot.handle._resolve(error=error)

    def _forget_error(self, error: BaseException) -> None:
        with self._changed:
            if self._error is error:
                self._error = None

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error, self._failed = self._error, None, None
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if self._closing:
            raise PublisherClosed("the publisher was closed.")

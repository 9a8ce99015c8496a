"""The work after a version is published: skips and anchors, so that readers need not replay the whole chain, and garbage collection."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...errors import DeltawireError
from ...events import OnEvent, emit
from ...format.records.record_parts import CommitRef
from ..append import Appender
from ..at_exit import wait_at_exit
from ..baseline import Baseline, Composed, ComposingAt
from ..history import HistoryDropped
from ..upload.segments import Segment, TensorTable
from ..writer_options import WriterOptions
from .cadence import anchor_due
from .shortcut_writer import ShortcutWriter

Job = Callable[[], None]


class Upkeep:
    """Makes the shortcuts that are due at the newest version, on a thread, while newer versions are published.

    So no call of `publish` waits for a shortcut. A failure costs readers time, and is only reported. The thread reads versions that the
    baseline holds; if deltas back to them take more memory than the history may use, the shortcuts are not made.

    Parameters
    ----------
    appender
        Has the newest version and its baseline.
    shortcuts
        Uploads and records the shortcuts.
    options
        The options of the writer.
    thread
        Makes the shortcuts.
    collect
        Collects garbage. It is called after every anchor.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        appender: Appender,
        shortcuts: ShortcutWriter,
        options: WriterOptions,
        *,
        thread: JobThread,
        collect: Job | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._appender = appender
        self._shortcuts = shortcuts
        self._options = options
        self._on_event = on_event
        self._thread = thread
        self._collect = collect
        self._made: queue.SimpleQueue[_Counted] = queue.SimpleQueue()
        """Shortcuts that the thread has made, and that are not counted yet."""
        self._anchoring = threading.Event()
        """Set while an anchor is being made, or waits to be. There is one at a time."""
        self._not_before = 0
        self.last_error: BaseException | None = None

    def after_append(self) -> None:
        """Begin the shortcuts that are due. Call it after every version, on the thread that appends."""
        version, baseline = self._appender.version, self._appender.baseline
        if version is None or baseline is None or not baseline.intact or baseline.at.seq != version.seq:
            return
        self._count(version.updates)
        if self._options.skips and (due := baseline.begin_composing()) is not None:
            self._thread.do(partial(self._make_skips, baseline, due, version.updates))
        is_due = anchor_due(self._options.anchor_policy, self._appender.cost, version.state_bytes, self._appender.speed)
        if is_due and version.updates >= self._not_before and not self._anchoring.is_set():
            self._anchoring.set()
            baseline.hold()
            self._thread.do(partial(self._make_anchor, baseline, _Version(baseline.at, baseline.table, baseline.segments, version.updates)))

    # On the thread

    def _make_skips(self, baseline: Baseline, due: ComposingAt, updates: int) -> None:
        try:
            for composed in baseline.compose(due):
                if composed.forward is not None:
                    self._make_skip(composed, due, updates)
        except (DeltawireError, HistoryDropped) as error:
            self._failed("skip", due.at.seq, error)

    def _make_skip(self, composed: Composed, due: ComposingAt, updates: int) -> None:
        assert composed.forward is not None
        try:
            made = self._shortcuts.skip(composed.base, composed.target, composed.forward, due.table, due.segments)
        except DeltawireError as error:
            self._failed("skip", composed.target.seq, error)
            return
        self._made.put(_Counted(updates, made.size, made.seconds, composed.versions))
        base, target = composed.base.seq, composed.target.seq
        emit(self._on_event, "skip-made", seq=target, base=base, versions=composed.versions, bytes=made.size)

    def _make_anchor(self, baseline: Baseline, target: _Version) -> None:
        seq = target.at.seq
        try:
            made = self._shortcuts.anchor(target.at, target.table, target.segments, lambda index: baseline.segment_at(seq, index))
            self._made.put(_Counted(target.updates, made.size, made.seconds, None))
            emit(self._on_event, "anchored", seq=seq, bytes=made.size, upload_seconds=made.seconds)
        except (DeltawireError, HistoryDropped) as error:
            self._not_before = target.updates + self._options.anchor_policy.min_versions
            self._failed("anchor", seq, error)
            return
        finally:
            baseline.release(seq)
            self._anchoring.clear()
        if self._collect is not None:
            try:
                self._collect()
            except DeltawireError as error:
                self._failed("collection", seq, error)

    # On the thread that appends

    def _count(self, updates: int) -> None:
        """Take the shortcuts into account that the thread has made."""
        while True:
            try:
                made = self._made.get_nowait()
            except queue.Empty:
                return
            behind = updates - made.updates
            if behind < self._appender.cost.versions:  # otherwise a newer full checkpoint was committed meanwhile
                if made.skipped is None:
                    self._appender.cost.anchored(behind)
                else:
                    self._appender.cost.add_skip(made.skipped, made.size, behind)
            if made.skipped is None:
                self._appender.speed = self._appender.speed.observe(sent=made.size, send_seconds=made.seconds)

    def _failed(self, what: str, seq: int, error: BaseException) -> None:
        self.last_error = error
        emit(self._on_event, "shortcut-failed", kind=what, seq=seq, reason=str(error))


@dataclass(frozen=True, slots=True)
class _Version:
    """The version that an anchor is made of."""

    at: CommitRef
    table: TensorTable
    segments: tuple[Segment, ...]
    updates: int


@dataclass(frozen=True, slots=True)
class _Counted:
    """A shortcut to the version with the number `updates`. `skipped` is the number of versions of a skip; None for an anchor."""

    updates: int
    size: int
    seconds: float
    skipped: int | None


class JobThread:
    """A thread that does one job after the other. It logs the error of a job that fails, and continues with the next.

    The thread starts with the first job. It does not keep the process from ending, but the end of the process waits for jobs that run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._is_working = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        wait_at_exit(self)

    def do(self, job: Job) -> None:
        """Add a job to the queue."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all jobs are done. Raises TimeoutError. Raises what ended the thread, if that was no `Exception`."""
        with self._changed:
            if not self._changed.wait_for(self._is_idle, timeout):
                raise TimeoutError(f"skips and anchors are still being made after {timeout:.3g} seconds.")
            if self._broken is not None:
                raise self._broken

    def wait_until_idle(self, seconds: float) -> None:
        """Return when all jobs are done, or after this many seconds."""
        with self._changed:
            self._changed.wait_for(self._is_idle, seconds)

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _is_idle(self) -> bool:
        return self._broken is not None or not (self._jobs or self._is_working)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_working = True
            try:
                job()
            except Exception:
                logging.getLogger("deltawire").exception("a job of %s failed", self._name)
            except BaseException as error:
                with self._changed:
                    self._broken = error
                    self._changed.notify_all()
                return
            del job  # it holds the baseline

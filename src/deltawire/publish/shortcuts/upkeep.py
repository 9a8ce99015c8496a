"""What happens after a version is published: skips and anchors, so that readers need not replay the whole chain, and garbage collection."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ...errors import DeltawireError
from ...events import OnEvent, emit
from ..append import Appender
from ..baseline import Baseline
from ..history import HistoryDropped
from ..writer_options import WriterOptions
from .cadence import anchor_due
from .shortcut_writer import ShortcutWriter

Job = Callable[[], None]


class Upkeep:
    """Makes the shortcuts that are due at the newest version. A failure costs readers time, and is only reported.

    Parameters
    ----------
    appender
        Has the newest version and its baseline.
    shortcuts
        Uploads and records the shortcuts.
    options
        The options of the writer.
    thread
        Makes anchors while newer versions are published. None: `after_append` makes them before it returns.
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
        thread: JobThread | None = None,
        collect: Job | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._appender = appender
        self._shortcuts = shortcuts
        self._options = options
        self._on_event = on_event
        self._thread = thread
        self._collect = collect
        self._anchored: queue.SimpleQueue[tuple[int, int, float]] = queue.SimpleQueue()
        """Anchors that are not counted yet: the number of their version, bytes, and seconds of upload."""
        self._anchoring = threading.Event()
        """Set while the thread is making an anchor. It makes one at a time."""
        self._not_before = 0
        self.last_error: BaseException | None = None

    def after_append(self) -> None:
        """Make the shortcuts that are due. Call it after every version, on the thread that appends."""
        version, baseline = self._appender.version, self._appender.baseline
        if version is None or baseline is None or not baseline.intact or baseline.at.seq != version.seq:
            return
        if self._options.skips:
            self._make_skips(baseline)
        self._count_anchors(version.updates)
        due = anchor_due(self._options.anchor_policy, self._appender.cost, version.state_bytes, self._appender.speed)
        if due and version.updates >= self._not_before and not self._anchoring.is_set():
            self._begin_anchor(baseline, version.updates)
            self._count_anchors(version.updates)

    def _make_skips(self, baseline: Baseline) -> None:
        for composed in baseline.compose():
            if composed.forward is None:
                continue
            try:
                made = self._shortcuts.skip(composed.base, composed.target, composed.forward, baseline.table, baseline.segments)
            except DeltawireError as error:
                self._failed("skip", composed.target.seq, error)
                continue
            self._appender.cost.add_skip(composed.versions, made.size)
            base, target = composed.base.seq, composed.target.seq
            emit(self._on_event, "skip-made", seq=target, base=base, versions=composed.versions, bytes=made.size)

    def _begin_anchor(self, baseline: Baseline, updates: int) -> None:
        target, table, segments = baseline.at, baseline.table, baseline.segments
        # With a thread, newer versions may be published while this one is read, so it is held.
        source = baseline.part if self._thread is None else lambda index: baseline.segment_at(target.seq, index)

        def make() -> None:
            try:
                made = self._shortcuts.anchor(target, table, segments, source)
                self._anchored.put((updates, made.size, made.seconds))
                emit(self._on_event, "anchored", seq=target.seq, bytes=made.size, upload_seconds=made.seconds)
            except (DeltawireError, HistoryDropped) as error:
                self._not_before = updates + self._options.anchor_policy.min_versions
                self._failed("anchor", target.seq, error)
                return
            if self._collect is not None:
                try:
                    self._collect()
                except DeltawireError as error:
                    self._failed("collection", target.seq, error)

        def make_and_release() -> None:
            try:
                make()
            finally:
                baseline.release(target.seq)
                self._anchoring.clear()

        if self._thread is None:
            make()
        else:
            self._anchoring.set()
            baseline.hold()
            self._thread.do(make_and_release)

    def _count_anchors(self, updates: int) -> None:
        while True:
            try:
                anchored, size, seconds = self._anchored.get_nowait()
            except queue.Empty:
                return
            behind = updates - anchored
            if behind < self._appender.cost.versions:  # otherwise a newer full checkpoint was committed meanwhile
                self._appender.cost.anchored(behind)
            self._appender.speed = self._appender.speed.observe(sent=size, send_seconds=seconds)

    def _failed(self, what: str, seq: int, error: BaseException) -> None:
        self.last_error = error
        emit(self._on_event, "shortcut-failed", kind=what, seq=seq, reason=str(error))


class JobThread:
    """A thread that does one job after the other. It logs the error of a job that fails, and continues with the next."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Job) -> None:
        """Add a job to the queue."""
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logging.getLogger("deltawire").exception("a job of %s failed", self._thread.name)

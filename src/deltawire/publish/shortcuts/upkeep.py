"""The work after a version is published: skips and anchors, so that readers need not replay the whole chain, and garbage collection."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

from ...errors import DeltawireError
from ...events import OnEvent, emit
from ...format.records.record_parts import CommitRef
from ..append import Appender
from ..baseline import Baseline, Composed, ComposingAt
from ..history import HistoryDropped
from ..upload.segments import Segment, TensorTable
from ..writer_options import WriterOptions
from .cadence import anchor_due
from .job_thread import Job, JobThread
from .made_shortcuts import MadeShortcuts
from .shortcut_writer import ShortcutWriter


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
        self._made = MadeShortcuts()
        self._anchoring = threading.Event()
        """Set while an anchor is being made, or waits to be. There is one at a time."""
        self._not_before = 0
        self.last_error: BaseException | None = None

    def after_append(self) -> None:
        """Begin the shortcuts that are due. Call it after every version, on the thread that appends."""
        version, baseline = self._appender.version, self._appender.baseline
        if version is None or baseline is None or not baseline.intact or baseline.at.seq != version.seq:
            return
        self._appender.speed = self._made.count(version.updates, self._appender.cost, self._appender.speed)
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
        self._made.add_skip(updates, made.size, composed.versions)
        base, target = composed.base.seq, composed.target.seq
        emit(self._on_event, "skip-made", seq=target, base=base, versions=composed.versions, bytes=made.size)

    def _make_anchor(self, baseline: Baseline, target: _Version) -> None:
        seq = target.at.seq
        try:
            made = self._shortcuts.anchor(target.at, target.table, target.segments, lambda index: baseline.segment_at(seq, index))
            self._made.add_anchor(target.updates, made.size, made.seconds)
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

"""Skips and anchors, which all processes make together on a thread after a version. Failures cost readers time, and are only reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from ...errors import DeltawireError
from ...format.records.record_parts import CommitRef, FileEntry
from ...format.records.version_records import Commit
from ...store import Store
from ...tensors.bits import TensorPart
from ..baseline import ComposingAt
from ..history import HistoryDropped
from ..shortcuts.compose import Composition
from ..shortcuts.job_thread import JobThread
from ..upload.data_objects import DataLocation, Uploads
from ..upload.segments import Segment
from ..writer_options import WriterOptions
from .checkpoint import files_at_first, upload_together
from .division import Division, Parts
from .first_rank import FirstRank, ask_first_rank
from .parts_baseline import PartsBaseline
from .ranks import Ranks, together


@dataclass(frozen=True, slots=True)
class _AnchorOf:
    """The version that an anchor is made of, in one process."""

    at: CommitRef
    updates: int
    division: Division
    segments: tuple[Segment, ...]
    is_held: bool
    """Whether the baseline of this process holds the version."""


class SharedShortcuts:
    """Makes skips and anchors with all processes, on a thread of each. So no call of `publish` waits for a shortcut.

    The threads read versions that the baselines hold, and have their own channel between the processes.

    Parameters
    ----------
    ranks
        The processes. No other thread may use this channel.
    first
        The first process's part, in the first process.
    store
        The location of the chain.
    pool
        Uploads data objects.
    epoch
        The epoch of the publisher.
    thread
        Makes the shortcuts.
    options
        The options of the writer.
    makes_skips
        Whether skips are made. All processes have the same.
    """

    def __init__(
        self,
        ranks: Ranks,
        first: FirstRank | None,
        store: Store,
        pool: Executor,
        epoch: int,
        thread: JobThread,
        options: WriterOptions,
        *,
        makes_skips: bool,
    ) -> None:
        self._ranks = ranks
        self._first = first
        self._by_first = partial(ask_first_rank, ranks, first)
        self._store = store
        self._pool = pool
        self._epoch = epoch
        self._thread = thread
        self._options = options
        self._makes_skips = makes_skips

    def begin(self, baseline: PartsBaseline, commit: Commit, at: CommitRef, *, makes_anchor: bool) -> None:
        """Begin the shortcuts that are due at a version that was just committed.

        All processes call it after every version, so that their threads do the same jobs in the same order. A process whose baseline is
        not at that version takes part, so that the others notice.

        Parameters
        ----------
        baseline
            The baseline of this process.
        commit, at
            The version, and a reference to it.
        makes_anchor
            Whether an anchor is made, which the first process has decided.
        """
        is_there = baseline.intact and baseline.at.seq == commit.seq
        if self._makes_skips:
            due = baseline.begin_composing() if is_there else None
            self._thread.do(partial(self._make_skips, baseline, due, commit))
        if makes_anchor:
            if is_there:
                baseline.hold()
            target = _AnchorOf(at, commit.updates, baseline.division, baseline.segments, is_there)
            self._thread.do(partial(self._make_anchor, baseline, target))

    # On the thread

    def _make_skips(self, baseline: PartsBaseline, due: ComposingAt | None, commit: Commit) -> None:
        table = baseline.division.table
        try:
            for skip, segments in skips_due(self._ranks, baseline, due):
                try:
                    files = upload_skip(self._ranks, self._location(commit.seq), skip, segments)
                    self._by_first(lambda first: first.record_skip(skip, commit.updates, table, files))  # noqa: B023
                except DeltawireError as error:
                    self._skip_failed(commit.seq, error)
        except (DeltawireError, HistoryDropped) as error:
            self._skip_failed(commit.seq, error)

    def _skip_failed(self, seq: int, error: BaseException) -> None:
        if self._first is not None:
            self._first.skip_failed(seq, error)

    def _make_anchor(self, baseline: PartsBaseline, target: _AnchorOf) -> None:
        assert target.at.digest is not None
        seq = target.at.seq
        try:
            done = upload_together(
                self._ranks,
                self._location(seq),
                target.division,
                _HeldParts(baseline, target),
                target.at.digest,
                shard_bytes=self._options.shard_bytes,
                threads=self._options.threads,
            )
            self._by_first(lambda first: first.record_anchor(target.at, target.updates, target.division.table, done))
        except (DeltawireError, HistoryDropped) as error:
            if self._first is not None:
                self._first.anchor_failed(seq, target.updates, error)
            return
        finally:
            if target.is_held:
                baseline.release(seq)
            if self._first is not None:
                self._first.anchor_ended()
        if self._first is not None:
            self._first.collect_garbage(seq)

    def _location(self, seq: int) -> DataLocation:
        return DataLocation(self._store, self._pool, self._epoch, seq)


class _HeldParts:
    """The parts of a held version, by name. It makes one segment at a time, so ask for the tensors in order."""

    def __init__(self, baseline: PartsBaseline, target: _AnchorOf) -> None:
        self._baseline = baseline
        self._target = target
        self._segment_of = {
            name: index for index, segment in enumerate(target.segments) for name in target.division.table.names_of(segment)
        }
        self._index = -1
        self._parts: Parts = {}

    def __getitem__(self, name: str) -> TensorPart:
        index = self._segment_of[name]
        if index != self._index:
            if not self._target.is_held:
                raise HistoryDropped(f"this process does not have commit {self._target.at.seq}")
            self._parts = {}
            self._parts, self._index = self._baseline.parts_at(self._target.at.seq, index), index
        return self._parts[name]


def skips_due(ranks: Ranks, baseline: PartsBaseline, due: ComposingAt | None) -> Iterator[tuple[Composition, tuple[Segment, ...]]]:
    """Yield this process's part of each skip that is due at a version, the shortest first, and the segments that it covers.

    All processes yield the same skips. If one process had to drop deltas that a skip needs, because it had no room, there is no such skip.
    Exhaust it. Another thread may move the baseline meanwhile.
    """
    level = 1
    try:
        while True:
            own: list[Composition] = []

            def compose(level: int = level, own: list[Composition] = own) -> list[int] | None:
                found = None if due is None else baseline.compose_level(due, level, break_off=False)
                if found is None:
                    return None
                own.append(found)
                return [found.base.seq, found.forward_bytes, found.replaced_bytes]

            answers = together(ranks, compose)
            if any(answer is None or answer[0] != answers[0][0] for answer in answers):
                return
            assert due is not None
            worth_it = sum(answer[1] for answer in answers) < sum(answer[2] for answer in answers)
            baseline.keep_composed(due, own[0].reverse(has_skip=worth_it))
            if worth_it:
                yield own[0], due.segments
            level += 1
    finally:
        if due is not None:
            baseline.end_composing(due)


def upload_skip(ranks: Ranks, location: DataLocation, skip: Composition, segments: tuple[Segment, ...]) -> tuple[FileEntry, ...]:
    """Upload this process's part of a skip. Returns the files of all processes, in the order that records need, in the first process."""
    own: list[FileEntry] = []

    def upload() -> None:
        uploads = Uploads(location.pool)
        try:
            for index, delta in sorted(skip.forward.items()):
                uploads.start_delta(location, delta, segments[index])
            own.extend(uploads.finish()[0])
        except BaseException:
            uploads.abandon()
            raise

    together(ranks, upload)
    return in_order(files_at_first(ranks, own))


def in_order(files: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Return files, which are given by rank, ordered by their tensors, then by rank."""
    return tuple(sorted(files, key=lambda entry: entry.first or 0))

"""Skips and anchors, which all processes make together after a version. Failures cost readers time, and are only reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...errors import DeltawireError
from ...format.digest import Digest
from ...format.records.record_parts import FileEntry
from ...format.records.version_records import Commit
from ..shortcuts.compose import Composition
from ..upload.data_objects import DataLocation, Uploads
from ..upload.segments import Segment
from .checkpoint import SharedCheckpoint, files_at_first
from .division import Division, Parts
from .first_rank import FirstRank, ask_first_rank
from .parts_baseline import PartsBaseline
from .ranks import Ranks, together


class SharedShortcuts:
    """Makes skips and anchors with all processes, and reports those that fail.

    Parameters
    ----------
    ranks
        The processes.
    first
        The first process's part, in the first process.
    location
        Returns the location of data objects that belong to a version, by its seq.
    upload_checkpoint
        Uploads a full checkpoint of a division and its parts, with a digest, for a version given by its seq.
    """

    def __init__(
        self,
        ranks: Ranks,
        first: FirstRank | None,
        location: Callable[[int], DataLocation],
        upload_checkpoint: Callable[[Division, Parts, Digest, int], SharedCheckpoint],
    ) -> None:
        self._ranks = ranks
        self._first = first
        self._by_first = partial(ask_first_rank, ranks, first)
        self._location = location
        self._upload_checkpoint = upload_checkpoint

    def make_skips(self, baseline: PartsBaseline, *, anchor_due: bool) -> bool:
        """Make the skips that are due at the newest version. Returns whether an anchor is still due."""
        table = baseline.division.table
        for skip in skips_due(self._ranks, baseline):
            try:
                files = upload_skip(self._ranks, self._location(skip.target.seq), skip, baseline.segments)
                anchor_due = self._by_first(lambda first: first.record_skip(skip, table, files))  # noqa: B023
            except DeltawireError as error:
                if self._first is not None:
                    self._first.skip_failed(error)
        return anchor_due

    def make_anchor(self, baseline: PartsBaseline, commit: Commit) -> None:
        """Make a full checkpoint of the newest version from the baselines."""
        assert commit.digest is not None
        try:
            done = self._upload_checkpoint(baseline.division, baseline.parts, commit.digest, commit.seq)
            self._by_first(lambda first: first.record_anchor(baseline.division.table, done.files))
        except DeltawireError as error:
            if self._first is not None:
                self._first.anchor_failed(error)


def skips_due(ranks: Ranks, baseline: PartsBaseline) -> Iterator[Composition]:
    """Yield this process's part of each skip that is due at the version of the baselines, the shortest first.

    All processes yield the same skips. If one process had to drop deltas that a skip needs, because it had no room, there is no such skip.
    Exhaust it after every version: it also drops deltas that are not needed any more.
    """
    level = 1
    due = baseline.begin_composing()
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
            worth_it = sum(answer[1] for answer in answers) < sum(answer[2] for answer in answers)
            assert due is not None
            baseline.keep_composed(due, own[0].reverse(has_skip=worth_it))
            if worth_it:
                yield own[0]
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

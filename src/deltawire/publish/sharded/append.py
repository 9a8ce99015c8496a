"""Append a version together: each process encodes and uploads its parts, the first one commits, and then all move their baselines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...chain.fetch import Fetcher
from ...chain.version import Version
from ...errors import DeltaError, PublishError, StateError
from ...events import OnEvent
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, Limits, record_hash
from ...format.records.version_records import Commit
from ...store import Store
from ...tensors.bits import State
from ...tensors.state import state_digest
from ..batches import batches_of_parts
from ..publish_warnings import continues
from ..snapshots import SnapshotDevice
from ..upload.data_objects import DataLocation, Update, upload_update
from ..upload.segments import Segment
from ..writer_options import WriterOptions
from .announcing import SharedAnnouncer
from .checkpoint import SharedCheckpoint, files_at_first, upload_together
from .division import Division, Parts
from .first_rank import FirstRank, PartsPublication, ask_first_rank
from .parts_baseline import PartsBaseline
from .parts_source import PartsSource, copy_from
from .ranks import Ranks, together
from .resume import PartsReader
from .shortcuts import SharedShortcuts, in_order


@dataclass(slots=True)
class _Pending:
    """The values that are needed to move this process's baseline when the commit in progress lands, perhaps only at the next call."""

    division: Division
    digest: Digest
    deltas: Mapping[int, bytes] | None
    """The deltas by segment. None for a full checkpoint."""
    parts: Parts | None
    """The new parts. Those of a delta are the caller's memory, so they are dropped when the call ends."""
    reverse: Mapping[int, bytes] | None = None
    """The deltas back by segment, if they are known already."""


class PartsAppender:
    """Appends versions to the chain with all processes, and begins the skips and anchors that are due then.

    All processes have one, and call each method at the same time. Every step may fail. The next call then first finds out what the chain
    holds.

    Parameters
    ----------
    ranks
        The processes.
    store
        The location of the chain.
    pool
        Uploads data objects.
    shortcuts
        Makes skips and anchors.
    first
        The first process's part, in the first process.
    opening
        The chain as the first process found it (`FirstRank.opening`), the same in all processes.
    options
        The options of the writer.
    device
        Where copies of parts on a GPU are kept.
    announcing
        Announces files before their commit. None if files are not announced.
    on_event
        Receives the events of this process.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        pool: Executor,
        shortcuts: SharedShortcuts,
        first: FirstRank | None,
        opening: Mapping[str, Any],
        options: WriterOptions,
        *,
        device: SnapshotDevice,
        announcing: SharedAnnouncer | None,
        on_event: OnEvent | None,
    ) -> None:
        self._ranks = ranks
        self._announcing = announcing
        self._device = device
        self._store = store
        self._pool = pool
        self._first = first
        self._options = options
        self._threads = options.threads
        self._epoch: int = opening["epoch"]
        self._commit = None if opening["commit"] is None else Commit.parse(opening["commit"].encode())
        self._must_rewind: bool = opening["rewind"]
        self._starts_full: bool = opening["full"]
        self._has_skips: bool = opening["skips"]
        self._pending: _Pending | None = None
        self._by_first: Callable[[Callable[[FirstRank], Any]], Any] = partial(ask_first_rank, ranks, first)
        limits = Limits(*opening["limits"])
        self._reader = PartsReader(ranks, store, Fetcher(store, limits=limits, on_event=on_event), limits, options.threads)
        self._shortcuts = shortcuts
        self.baseline: PartsBaseline | None = None

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain. None if nothing is published yet."""
        return None if self._commit is None else Version.of(self._commit)

    def append(self, publication: PartsPublication) -> int:
        """Append a version, which is `version` then. Returns the bytes that this process uploaded."""
        division = publication.division
        seq = self.settle(division)
        if self._must_rewind:
            seq = self._rewind(division)
        try:
            before = None if self._commit is None else self._commit.recipe
            is_full = self._must_rewind or self._starts_full or not continues(publication.recipe, before)
            sent = None if is_full else self._append_delta(publication, seq)
            return self._append_checkpoint(publication, seq) if sent is None else sent
        finally:
            if self._announcing is not None:
                self._announcing.end()
            if self._pending is not None and self._pending.deltas is not None:
                self._pending.parts = None

    def settle(self, division: Division | None) -> int:
        """Find out whether the last commit landed. Returns the seq of the next commit."""
        answer = self._by_first(lambda first: first.settle(None if division is None else division.table))
        if answer["landed"] is not None:
            self._move(answer["landed"])
        self._pending = None
        return int(answer["seq"])

    def _rewind(self, division: Division) -> int:
        """Go back to an older version, if its data are not marked for deletion. Returns the seq of the next commit."""
        self._sound_baseline(division)  # raises if the version cannot be rebuilt, before the chain is changed
        record = self._by_first(FirstRank.rewind)
        if record is not None:
            self._move(record)
        return self.settle(division)

    def _append_delta(self, publication: PartsPublication, seq: int) -> int | None:
        """Append a delta. Returns the bytes that this process uploaded, or None if a full checkpoint is needed instead."""
        division = publication.division
        for _ in range(2):
            baseline = self._sound_baseline(division)
            if baseline is None:
                return None
            source = publication.make_parts(baseline.parts)
            together(self._ranks, lambda: baseline.move_to_device(source.located, self._device))  # noqa: B023
            update, reverse, answers = self._upload(baseline, source, seq)
            if any(answer is None for answer in answers):
                return None
            if all(answer["sound"] for answer in answers):
                break
            self._drop_baseline()  # a bit in memory has flipped; the store has the right weights, so read them back
        else:
            raise PublishError("a process's copy of the last version changed in memory, twice. Check the memory of that machine.")
        assert update is not None
        if sum(answer["bytes"] for answer in answers) >= division.table.state_bytes:
            return None
        files = in_order(files_at_first(self._ranks, update.files))
        difference = Digest()
        for answer in answers:
            difference += Digest.from_hex(answer["difference"])
        changed = sum(answer["changed"] for answer in answers)
        self._pending = _Pending(division, update.after, update.deltas, source.whole, reverse)
        answer = self._by_first(lambda first: first.commit_delta(publication, files, difference, changed))
        self._finish(answer)
        return update.size

    def _upload(
        self, baseline: PartsBaseline, source: PartsSource, seq: int
    ) -> tuple[Update | None, Mapping[int, bytes] | None, list[Any]]:
        """Encode and upload this process's parts. Returns the update, its deltas back, and what all processes report."""
        update: Update | None = None
        reverse: Mapping[int, bytes] | None = None

        def make(indices: Sequence[int]) -> State:
            names = [name for index in indices for name in baseline.table.names_of(baseline.segments[index])]
            return source.make(names, may_be_unwritten=True)

        # All processes must decide alike. Several have several files.
        announcing = self._announcing if self._ranks.size > 1 or len(baseline.segments) > 1 else None
        if announcing is not None:
            announcing.begin(None if self._first is None else self._first.aim)

        def encode() -> dict[str, Any] | None:
            try:
                return encode_own()
            finally:
                if announcing is not None:
                    announcing.uploaded()

        def encode_own() -> dict[str, Any] | None:
            nonlocal update, reverse
            update = upload_update(
                self._location(seq),
                baseline,
                source.whole or {},
                self._threads,
                limit=baseline.table.state_bytes,
                segments_of=make if source.whole is None else None,
                batches=batches_of_parts(source.written_bytes, baseline.parts, source.whole, baseline.table, baseline.segments),
                wants_reverse=source.whole is None and baseline.needs_reverse(remember=self._has_skips),
                uploaded=None if announcing is None else announcing.add,
            )
            if update is None:
                return None
            if update.make_reverse is not None:  # now, because the weights may change before the outcome of the commit is known
                reverse = update.make_reverse()
            if self._first is not None:
                scanned = sum(segment.raw for segment in baseline.segments)
                self._first.observe(sent=update.size, seconds=update.upload_seconds, scanned=scanned, scan_seconds=update.encode_seconds)
            return {
                "sound": update.before == baseline.digest,
                "bytes": update.size,
                "difference": (update.after - update.before).hex(),
                "changed": update.changed,
            }

        answers = together(self._ranks, encode)
        return update, reverse, answers

    def _append_checkpoint(self, publication: PartsPublication, seq: int) -> int:
        """Append a full checkpoint. Returns the bytes that this process uploaded."""
        division = publication.division
        source = publication.make_parts(self._previous(publication))
        own: Parts = {}

        def copy() -> str:
            own.update(copy_from(source, division, self._segments_of(division), self._device))
            return state_digest(own, threads=self._threads).hex()

        digest = division.tags
        for found in together(self._ranks, copy):
            digest += Digest.from_hex(found)
        done = self._upload_checkpoint(division, own, digest, seq)
        self._pending = _Pending(division, digest, None, own)
        answer = self._by_first(lambda first: first.commit_checkpoint(publication, done.files, digest))
        self._finish(answer)
        return done.sent

    def _previous(self, publication: PartsPublication) -> Parts | None:
        """Return the parts of the version before, if they are quantised in the same way and every process has them."""
        if publication.recipe is None or self._commit is None or not continues(publication.recipe, self._commit.recipe):
            return None
        baseline = self.baseline
        fits = baseline is not None and baseline.intact and baseline.division is publication.division
        return baseline.parts if all(together(self._ranks, lambda: fits)) and baseline is not None else None

    def _finish(self, answer: Mapping[str, Any]) -> None:
        try:
            self._move(answer["record"])
            self._pending = None
        finally:  # all processes begin the same jobs, even if one of them could not move its baseline
            if self.baseline is not None and self._commit is not None:
                self._shortcuts.begin(self.baseline, self._commit, self._here(), makes_anchor=answer["anchor"])

    def _move(self, record: str) -> None:
        """Move the baseline to a commit that has landed."""
        pending = self._pending
        self._commit = Commit.parse(record.encode())
        self._must_rewind = False
        at = self._here()
        if pending is None:  # a rewind to the version that was rebuilt before
            if self.baseline is not None:
                self.baseline.rename(at)
        elif pending.deltas is None:
            assert pending.parts is not None
            self._starts_full = False
            self._take(pending.division, pending.parts)
        elif self.baseline is not None and self.baseline.intact:
            size = sum(map(len, pending.deltas.values()))
            if pending.parts is not None:
                self.baseline.move_by_copy(pending.parts, pending.deltas, at, pending.digest, size, remember=self._has_skips)
            else:
                with contextlib.suppress(DeltaError, StateError):  # it is not intact then, and is read back before its next use
                    self.baseline.move_by_deltas(pending.deltas, at, pending.digest, pending.reverse, size)

    def _sound_baseline(self, division: Division) -> PartsBaseline | None:
        """Return the baseline, read back from the store unless every process has it. None if the chain has other tensors."""
        baseline = self.baseline
        fits = baseline is not None and baseline.intact and baseline.division is division
        if all(together(self._ranks, lambda: fits)):
            return self.baseline
        self._drop_baseline()
        if self._commit is None or self._commit.digest is None:
            return None
        parts = self._reader.read(self._commit, division, self._by_first)
        return None if parts is None else self._take(division, parts)

    def _take(self, division: Division, parts: Parts) -> PartsBaseline:
        if self.baseline is not None and self.baseline.division is division:
            self.baseline.replace_parts(parts, self._here())
        else:
            self._drop_baseline()
            self.baseline = PartsBaseline(division, parts, self._segments_of(division), self._here(), threads=self._threads)
        return self.baseline

    def _drop_baseline(self) -> None:
        if self.baseline is not None:
            self.baseline.retire()  # a thread may still make shortcuts from it
        self.baseline = None

    def _segments_of(self, division: Division) -> tuple[Segment, ...]:
        return division.segments(self._ranks.rank, self._options.segment_bytes)

    def _here(self) -> CommitRef:
        """Return a reference to the newest version that is known."""
        assert self._commit is not None
        return self._commit.ref(record_hash(self._commit.to_bytes()))

    def _upload_checkpoint(self, division: Division, parts: Parts, digest: Digest, seq: int) -> SharedCheckpoint:
        location = self._location(seq)
        done = upload_together(self._ranks, location, division, parts, digest, shard_bytes=self._options.shard_bytes, threads=self._threads)
        if self._first is not None:
            self._first.observe(sent=done.sent, seconds=done.seconds)
        return done

    def _location(self, seq: int) -> DataLocation:
        return DataLocation(self._store, self._pool, self._epoch, seq)

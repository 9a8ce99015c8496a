"""One version after the other, published by all processes of a training job together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ...chain.fetch import Fetcher
from ...chain.log import ChainLog
from ...chain.version import Version
from ...errors import DataDamaged, DeltawireError, PublisherClosed, PublishError, RunMismatch, VersionGone
from ...events import OnEvent, emit
from ...format.digest import Digest
from ...format.records.chain_records import Commit, CommitRef, FileEntry, Limits, record_hash
from ...store import Store, open_store
from ...tensors.bits import TensorPart
from ...tensors.state import state_digest
from ..advice import Advice
from ..attachments.model_files import TokenizerFiles
from ..attachments.read_files import Attachments, CollectedFiles, read_attachments
from ..commits import check_meta, check_step
from ..upload.data_objects import DataPlace, Update, upload_update
from ..upload.upload_pool import UploadPool
from ..writer_options import WriterOptions
from .anchor import SharedCheckpoint, upload_together
from .chain_lead import ChainLead
from .parts import MOST_FILES, Division, Parts, PartsBaseline, Splitter
from .ranks import Ranks, lead, together
from .resume import HopFailed, restore_parts
from .skips import in_order, skips_due, upload_skip

_STREAMS = 4
_ATTEMPTS = 6


@dataclass(slots=True)
class _Pending:
    """What moves this process's baseline if the commit under way lands, also where that is found out only at the next call."""

    division: Division
    digest: Digest
    deltas: Mapping[int, bytes] | None
    """By segment; None for a whole checkpoint."""
    parts: Parts | None
    """The new parts. Those of a delta are the caller's memory, and so only good while the call lasts."""


class ShardedPublisher:
    """Publishes a model of which each process holds a part: every one encodes and uploads its own, the first one commits.

    All processes open it, call `publish` for the same versions in the same order, and close it. A version is visible once all have uploaded
    theirs and the first one has committed, or not at all; what fails in one process is raised in all of them. Opening one takes the run
    over, as with `Publisher`. Each process holds a copy of its own parts. Where the chain has versions already, the newest is read back at
    the first call of `publish`, whatever number of processes it was published by; with `resume_from` an older one, and once that is rebuilt
    and found sound, those after it are abandoned. With `starts_full` the first version is a full checkpoint, and nothing is read back: that
    also goes on with a chain whose newest version is damaged. Of `options`, each process uses its own `threads`, `segment_bytes`,
    `shard_bytes` and `store`; for the rest, only the first process's count. The first process also collects garbage (`auto_collect`).

    Before the run is taken over, the version to go on from is checked: all its objects by name and size; its attachments, and up to 256 MiB
    of its smallest files of weights, by their hashes too. Other weights are checked when they are read back, after that: if they are
    damaged, the first `publish` raises `DataDamaged`.

    Skips and anchors are made by all together, before `publish` returns. Nothing happens in the background; `deltawire.trainers.fsdp` puts
    a thread around it.
    """

    def __init__(
        self,
        ranks: Ranks,
        url: str | Path | Store,
        run: str | None = None,
        *,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or WriterOptions()
        self._ranks = ranks
        self._options = options
        self._threads = options.threads
        self._attachments = CollectedFiles(attachments if ranks.rank == 0 else None)
        self._has_attachments = attachments is not None and ranks.rank == 0
        self._tokenizer = None if tokenizer is None or ranks.rank > 0 else TokenizerFiles(tokenizer)
        self._on_event = on_event
        self._advice = Advice(on_event, has_dtype=True, refuse_nonfinite=refuse_nonfinite, threads=options.threads)
        self._splitter = Splitter(ranks)
        self._baseline: PartsBaseline | None = None
        self._pending: _Pending | None = None
        self._lead: ChainLead | None = None
        self._closed = False
        with ExitStack() as opened:

            def open_all() -> dict[str, Any] | None:
                if ranks.size > MOST_FILES:
                    raise PublishError(f"{ranks.size} processes cannot publish together; {MOST_FILES} can. Pass a group of fewer.")
                self._store = open_store(url, options=options.store, on_event=on_event)
                if self._store is not url:
                    opened.callback(self._store.close)
                self._pool = opened.enter_context(UploadPool(_STREAMS, "deltawire-upload"))
                if ranks.rank > 0:
                    return None
                self._attachments.of_tokenizer = self.files_of_tokenizer()
                given = read_attachments(self._attachments) or {}  # what is wrong with them should show now, not hours later
                self._lead = ChainLead(
                    self._store,
                    self._pool,
                    run,
                    options,
                    resume_from=resume_from,
                    starts_full=starts_full,
                    has_attachments=attachments is not None,
                    given=given,
                    on_event=on_event,
                )
                return {**self._lead.opening(), "skips": options.skips, "full": starts_full}

            opening = together(ranks, open_all)[0]
            together(ranks, lambda: self._require_run(opening["id"]))
            self._opened = opened.pop_all()
        self.epoch: int = opening["epoch"]
        """The number under which this job writes. Each one that opens the run gets a higher one."""
        self._fetcher = Fetcher(self._store, limits=Limits(*opening["limits"]), on_event=on_event)
        self._commit = None if opening["commit"] is None else Commit.parse(opening["commit"].encode())
        self._is_to_rewind: bool = opening["rewind"]
        self._starts_full: bool = opening["full"]
        self._has_skips: bool = opening["skips"]

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain; None before the first. With `resume_from`, that one at first."""
        return None if self._commit is None else Version.of(self._commit)

    def files_of_tokenizer(self) -> dict[str, bytes]:
        """Read the files of the tokenizer as it is now. Empty without one, and at all ranks but the first."""
        return {} if self._tokenizer is None else self._tokenizer.read()

    def publish(
        self,
        held: Mapping[str, TensorPart],
        *,
        step: int | None = None,
        meta: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        tokenizer_files: Mapping[str, bytes] | None = None,
    ) -> Version:
        """Publish a model by what this process holds of it; of the parts that are passed, `start` may be anything. All names must be there.

        Returns the version, which readers can see by then. Raises what `Publisher.publish` does, in all processes alike; for what went
        wrong elsewhere the message says at which rank. Only the first process's `step`, `meta` and `files` count. `files` are those of the
        model, such as config.json, which `attachments` of the same names replace. `tokenizer_files` are those of the tokenizer, if they
        were read before (`files_of_tokenizer`).
        """
        if self._closed:
            raise PublisherClosed("the publisher was closed.")
        began = time.perf_counter()

        attachments: Mapping[str, bytes] | None = None  # only the first process has any

        def check() -> None:
            nonlocal attachments
            check_step(step)
            check_meta(meta)
            self._advice.check_finite({name: part.elements for name, part in held.items()})
            if self._ranks.rank == 0:
                self._attachments.taken |= files or {}
                self._attachments.of_tokenizer = dict(self.files_of_tokenizer() if tokenizer_files is None else tokenizer_files)
                attachments = read_attachments(self._attachments) if self._attachments or self._has_attachments else None

        together(self._ranks, check)
        division, parts = self._splitter.split(held)
        seq = self._settle(division)
        if self._is_to_rewind:
            seq = self._rewind(division)
        try:
            is_full = self._is_to_rewind or self._starts_full
            sent = None if is_full else self._publish_delta(division, parts, seq, step, meta or {}, attachments)
            if sent is None:
                sent = self._publish_checkpoint(division, parts, seq, step, meta or {}, attachments)
        finally:
            if self._pending is not None and self._pending.deltas is not None:
                self._pending.parts = None
        assert self.version is not None
        if self._ranks.rank == 0:
            self._advice.after(self.version, division.table)
        seconds = time.perf_counter() - began
        emit(self._on_event, "rank-published", rank=self._ranks.rank, seq=self.version.seq, bytes=sent, seconds=seconds)
        return self.version

    def close(self) -> None:
        """Let go of everything, after the outcome of the last commit is known. May be called twice. To be called by all."""
        if self._closed:
            return
        self._closed = True
        with self._opened:
            self._settle(None)

    def __enter__(self) -> ShardedPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # others may be gone, or wait for something else: do not talk to them
            self._closed = True
            self._opened.close()

    def _require_run(self, run_id: str) -> None:
        """Every process must see the store that the first one does: a directory, or `memory://`, need not be the same one everywhere."""
        found = ChainLog(self._store).run.id
        if found != run_id:
            raise RunMismatch(f"{self._store.url} is not the same place for every process: it holds run {found}, not {run_id}.")

    def _leading(self, work: Callable[[ChainLead], Any]) -> Any:
        def do() -> Any:
            assert self._lead is not None
            return work(self._lead)

        return lead(self._ranks, do)

    def _settle(self, division: Division | None) -> int:
        """Know what became of the last commit. Returns the slot that the next one aims at."""
        answer = self._leading(lambda first: first.settle(None if division is None else division.table))
        if answer["landed"] is not None:
            self._move(answer["landed"])
        self._pending = None
        return int(answer["seq"])

    def _rewind(self, division: Division) -> int:
        """Take up an older version; as before where the chain cannot rest on it. Returns the slot that the next commit aims at."""
        self._sound_baseline(division)  # or raise, and leave the chain as it is
        record = self._leading(ChainLead.rewind)
        if record is not None:
            self._move(record)
        return self._settle(division)

    def _publish_delta(
        self,
        division: Division,
        parts: Parts,
        seq: int,
        step: int | None,
        meta: Mapping[str, str],
        attachments: Mapping[str, bytes] | None,
    ) -> int | None:
        """Returns the bytes that this process sent; None where there must be a checkpoint instead."""
        for _ in range(2):
            baseline = self._sound_baseline(division)
            if baseline is None:
                return None
            update, answers = self._upload(baseline, parts, seq)
            if any(answer is None for answer in answers):
                return None
            if all(answer["sound"] for answer in answers):
                break
            self._baseline = None  # a bit of it has flipped since; readers have the right one, so take it from there
        else:
            raise PublishError("a process's own copy of the last version changed in memory, twice. Is that machine's memory sound?")
        assert update is not None
        files = in_order([answer["files"] for answer in answers])
        if sum(entry.size for entry in files) >= division.table.state_bytes:
            return None
        difference = Digest()
        for answer in answers:
            difference += Digest.from_hex(answer["difference"])
        changed = sum(answer["changed"] for answer in answers)
        self._pending = _Pending(division, update.after, update.deltas, parts)
        answer = self._leading(lambda first: first.commit_delta(division.table, files, difference, changed, step, meta, attachments))
        self._finish(answer)
        return update.size

    def _upload(self, baseline: PartsBaseline, parts: Parts, seq: int) -> tuple[Update | None, list[Any]]:
        """Encode and upload what is this process's; what came of it, and what all processes report."""
        update: Update | None = None

        def encode() -> dict[str, Any] | None:
            nonlocal update
            update = upload_update(self._place(seq), baseline, parts, self._threads, limit=baseline.division.table.state_bytes)
            if update is None:
                return None
            if self._lead is not None:
                scanned = sum(segment.raw for segment in baseline.segments)
                self._lead.observe(
                    sent=update.size, seconds=update.upload_seconds, scanned=scanned, scan_seconds=update.encode_seconds
                )  # fmt: skip
            return {
                "sound": update.before == baseline.digest,
                "files": [entry.plain() for entry in update.files],
                "difference": (update.after - update.before).hex(),
                "changed": update.changed,
            }

        answers = together(self._ranks, encode)
        return update, answers

    def _publish_checkpoint(
        self,
        division: Division,
        parts: Parts,
        seq: int,
        step: int | None,
        meta: Mapping[str, str],
        attachments: Mapping[str, bytes] | None,
    ) -> int:
        own: Parts = {}

        def copy() -> str:
            own.update({name: part.copy() for name, part in parts.items()})
            return state_digest(own, threads=self._threads).hex()

        digest = division.tags
        for found in together(self._ranks, copy):
            digest += Digest.from_hex(found)
        done = self._upload_checkpoint(division, own, digest, seq)
        self._pending = _Pending(division, digest, None, own)
        answer = self._leading(lambda first: first.commit_checkpoint(division.table, done.files, digest, step, meta, attachments))
        self._finish(answer)
        return done.sent

    def _finish(self, answer: Mapping[str, Any]) -> None:
        self._move(answer["record"])
        self._pending = None
        if self._make_skips(answer["anchor"]):
            self._anchor()

    def _move(self, record: str) -> None:
        """The commit is in the chain: so is the baseline, from here on."""
        pending = self._pending
        self._commit = Commit.parse(record.encode())
        self._is_to_rewind = False
        at = self._here()
        if pending is None:  # a rewind, to what was rebuilt before
            if self._baseline is not None:
                self._baseline.rename(at)
        elif pending.deltas is None:
            assert pending.parts is not None
            self._starts_full = False
            self._take(pending.division, pending.parts)
        elif self._baseline is not None and self._baseline.intact:
            if pending.parts is not None:
                self._baseline.move_by_copy(pending.parts, pending.deltas, at, pending.digest)
            else:
                self._baseline.move_by_deltas(pending.deltas, at, pending.digest)

    def _sound_baseline(self, division: Division) -> PartsBaseline | None:
        """The baseline of this division; rebuilt from the store unless every process has it. None where the chain has other tensors."""
        baseline = self._baseline
        fits = baseline is not None and baseline.intact and baseline.division is division
        if all(together(self._ranks, lambda: fits)):
            return self._baseline
        self._baseline = None
        if self._commit is None or self._commit.digest is None:
            return None
        failed: HopFailed | None = None
        for _ in range(_ATTEMPTS):
            try:
                hops = self._leading(partial(ChainLead.route, failed=None if failed is None else failed.hop))
            except VersionGone:
                if failed is None:
                    raise
                break  # every way to it has failed
            route = [[FileEntry(**entry) for entry in files] for files in hops]
            found = restore_parts(
                self._ranks,
                self._store,
                self._fetcher,
                division,
                route,
                self._commit.digest,
                check_hashes=self._commit.signature is not None,
                threads=self._threads,
            )
            if found is None:
                return None
            if not isinstance(found, HopFailed):
                return self._take(division, found)
            failed = found
            emit(self._on_event, "rerouting", target=self._commit.seq, reason=failed.reason)
        assert failed is not None
        raise DataDamaged(f"{self._commit.describe()} cannot be taken up: {failed.reason} Open with starts_full=True to go on without it.")

    def _take(self, division: Division, parts: Parts) -> PartsBaseline:
        segments = division.segments(self._ranks.rank, self._options.segment_bytes)
        self._baseline = PartsBaseline(division, parts, segments, self._here(), threads=self._threads, remember=self._has_skips)
        return self._baseline

    def _here(self) -> CommitRef:
        """The version that the chain is known to be at."""
        assert self._commit is not None
        return self._commit.ref(record_hash(self._commit.to_bytes()))

    def _make_skips(self, anchor_due: bool) -> bool:
        """Those that are due at the version at the head. That they fail is only reported. Returns whether an anchor is due then."""
        baseline = self._baseline
        if baseline is None or not self._has_skips:
            return anchor_due
        for skip in skips_due(self._ranks, baseline):
            try:
                files = upload_skip(self._ranks, self._place(skip.target.seq), skip, baseline.segments)
                anchor_due = self._leading(lambda first: first.record_skip(skip, baseline.division.table, files))  # noqa: B023
            except DeltawireError as error:
                if self._lead is not None:
                    self._lead.skip_failed(error)
        return anchor_due

    def _anchor(self) -> None:
        """A checkpoint of the version at the head, from the baselines. That it fails is only reported."""
        baseline, commit = self._baseline, self._commit
        assert baseline is not None
        assert commit is not None
        assert commit.digest is not None
        try:
            done = self._upload_checkpoint(baseline.division, baseline.parts, commit.digest, commit.seq)
            self._leading(lambda first: first.record_anchor(baseline.division.table, done.files))
        except DeltawireError as error:
            if self._lead is not None:
                self._lead.anchor_failed(error)

    def _upload_checkpoint(self, division: Division, parts: Parts, digest: Digest, seq: int) -> SharedCheckpoint:
        place = self._place(seq)
        done = upload_together(self._ranks, place, division, parts, digest, shard_bytes=self._options.shard_bytes, threads=self._threads)
        if self._lead is not None:
            self._lead.observe(sent=done.sent, seconds=done.seconds)
        return done

    def _place(self, seq: int) -> DataPlace:
        return DataPlace(self._store, self._pool, self.epoch, seq)

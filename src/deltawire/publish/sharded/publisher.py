"""The publisher of many processes. They publish one version after the other together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ...chain.fetch import Fetcher
from ...chain.log import ChainLog
from ...chain.version import Version
from ...errors import PublisherClosed, PublishError, RunMismatch
from ...events import OnEvent, emit
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, Limits, record_hash
from ...format.records.version_records import Commit
from ...store import Store, open_store
from ...tensors.bits import TensorPart
from ...tensors.state import state_digest
from ..advice import Advice
from ..attachments.model_files import TokenizerFiles
from ..attachments.read_files import Attachments, CollectedFiles, read_attachments
from ..commits import check_meta, check_step
from ..upload.data_objects import DataLocation, Update, upload_update
from ..upload.upload_pool import UploadPool
from ..writer_options import WriterOptions
from .checkpoint import SharedCheckpoint, upload_together
from .division import MOST_FILES, Division, Parts, Splitter
from .first_rank import FirstRank
from .parts_baseline import PartsBaseline
from .ranks import Ranks, by_first_rank, together
from .resume import PartsReader
from .shortcuts import SharedShortcuts, in_order

_STREAMS = 4
"""Number of objects that each process uploads at the same time."""


@dataclass(slots=True)
class _Pending:
    """What is needed to move this process's baseline when the commit in progress lands, perhaps only at the next call."""

    division: Division
    digest: Digest
    deltas: Mapping[int, bytes] | None
    """The deltas by segment. None for a full checkpoint."""
    parts: Parts | None
    """The new parts. Those of a delta are the caller's memory, so they are dropped when the call ends."""


class ShardedPublisher:
    """Publishes a model of which each process holds a part: every process encodes and uploads its part, and the first one commits.

    All processes open it, call `publish` for the same versions in the same order, and close it. A version becomes visible when all
    processes have uploaded their parts and the first one has committed it. An error in one process is raised in all of them, and then
    nothing is published. Each process keeps a copy of its own parts.

    Opening it takes the run over, as with `Publisher`. Before that, it checks the version that it continues from: the name and size of
    every object, and the hashes of attachments and of the smallest files of weights, up to 256 MiB. If the chain has versions already, the
    first `publish` reads the newest one back, whatever number of processes published it, and raises `DataDamaged` if its weights are
    damaged.

    All processes make skips and anchors together before `publish` returns. It does nothing in the background;
    `deltawire.trainers.FSDPPublisher` does.

    Parameters
    ----------
    ranks
        The processes, and how they communicate.
    url
        The location of the chain: a URL, a directory, or an open `Store`. It must be the same for all processes.
    run
        The name of a new run, or the run that must be at `url`.
    attachments
        Further files of each version, as for `Publisher`. Only those of the first process count.
    tokenizer
        A tokenizer whose files are published with the model. Only that of the first process counts.
    refuse_nonfinite
        Raise `NonFiniteWeights` instead of publishing weights that are NaN or infinite.
    resume_from
        The version to go back to: its commit's number, `Version.seq`, not the number that `deltawire log` shows. Later versions are
        abandoned once this one is rebuilt. None: the newest.
    starts_full
        Publish the first version as a full checkpoint, and do not read the newest one back. Use it if the newest version is damaged.
    options
        How versions are written. Each process uses its own `threads`, `segment_bytes`, `shard_bytes` and `store`; the other fields of the
        first process count for all.
    on_event
        Called with every event of this process.
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
        self._first: FirstRank | None = None
        self._closed = False
        with ExitStack() as opened:

            def open_all() -> dict[str, Any] | None:
                if ranks.size > MOST_FILES:
                    raise PublishError(f"{ranks.size} processes cannot publish together, at most {MOST_FILES} can. Pass a smaller group.")
                self._store = open_store(url, options=options.store, on_event=on_event)
                if self._store is not url:
                    opened.callback(self._store.close)
                self._pool = opened.enter_context(UploadPool(_STREAMS, "deltawire-upload"))
                if ranks.rank > 0:
                    return None
                self._attachments.of_tokenizer = self.files_of_tokenizer()
                given = read_attachments(self._attachments) or {}  # so that errors in them are raised now, not hours later
                self._first = FirstRank(
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
                return {**self._first.opening(), "skips": options.skips, "full": starts_full}

            opening = together(ranks, open_all)[0]
            together(ranks, lambda: self._require_run(opening["id"]))
            self._opened = opened.pop_all()
        self.epoch: int = opening["epoch"]
        """The number of this job's epoch. Each job that opens the run gets a higher one."""
        fetcher = Fetcher(self._store, limits=Limits(*opening["limits"]), on_event=on_event)
        self._reader = PartsReader(ranks, self._store, fetcher, options.threads)
        self._commit = None if opening["commit"] is None else Commit.parse(opening["commit"].encode())
        self._must_rewind: bool = opening["rewind"]
        if resume_from is None and self._commit is not None:
            self._advice.follows(None, self._commit.step)
        self._starts_full: bool = opening["full"]
        self._has_skips: bool = opening["skips"]
        self._shortcuts = SharedShortcuts(ranks, self._first, self._location, self._upload_checkpoint)

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain. None if nothing is published yet. At first, the one of `resume_from`."""
        return None if self._commit is None else Version.of(self._commit)

    def files_of_tokenizer(self) -> dict[str, bytes]:
        """Read the files of the tokenizer as it is now. Returns none if there is no tokenizer, or this is not the first rank."""
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
        """Publish a model of which this process holds some elements, and return the version. Readers can see it by then.

        Raises the same errors as `Publisher.publish`, in all processes. For an error of another process, the message names its rank.

        Parameters
        ----------
        held
            The elements of each tensor that this process holds, by name. All processes pass all names; a part may be empty.
        step
            The trainer's step. Only that of the first process counts.
        meta
            Further strings that are recorded with the version. Only those of the first process count.
        files
            Files of the model, such as config.json. `attachments` of the same names replace them. Only those of the first process count.
        tokenizer_files
            The files of the tokenizer, if the caller has read them already (`files_of_tokenizer`).
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
                self._advice.check_step(step)
                self._attachments.taken |= files or {}
                self._attachments.of_tokenizer = dict(self.files_of_tokenizer() if tokenizer_files is None else tokenizer_files)
                attachments = read_attachments(self._attachments) if self._attachments or self._has_attachments else None

        together(self._ranks, check)
        division, parts = self._splitter.split(held)
        if self._ranks.rank == 0:
            self._advice.check_layout(division.table, may_raise=False)  # the other processes would wait for ever
        seq = self._settle(division)
        if self._must_rewind:
            seq = self._rewind(division)
        try:
            is_full = self._must_rewind or self._starts_full
            sent = None if is_full else self._publish_delta(division, parts, seq, step, meta or {}, attachments)
            if sent is None:
                sent = self._publish_checkpoint(division, parts, seq, step, meta or {}, attachments)
        finally:
            if self._pending is not None and self._pending.deltas is not None:
                self._pending.parts = None
        assert self.version is not None
        if self._ranks.rank == 0:
            self._advice.after(self.version, division.table)
            self._advice.follows(division.table, step)
        seconds = time.perf_counter() - began
        emit(self._on_event, "rank-published", rank=self._ranks.rank, seq=self.version.seq, bytes=sent, seconds=seconds)
        return self.version

    def close(self) -> None:
        """Find out whether the last commit landed, and release all resources. All processes call it. It may be called twice."""
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
        elif not self._closed:  # other processes may have died or wait for something else, so do not talk to them
            self._closed = True
            self._opened.close()

    def _require_run(self, run_id: str) -> None:
        """Raise `RunMismatch` if this process sees another run than the first: directories and `memory://` may differ by machine."""
        found = ChainLog(self._store).run.id
        if found != run_id:
            raise RunMismatch(
                f"{self._store.url} is not the same location for every process: it holds run {found} here, and run {run_id} at rank 0."
            )

    def _by_first(self, work: Callable[[FirstRank], Any]) -> Any:
        """Do something in the first process, and return the result in all."""

        def do() -> Any:
            assert self._first is not None
            return work(self._first)

        return by_first_rank(self._ranks, do)

    def _settle(self, division: Division | None) -> int:
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
        """Publish a delta. Returns the bytes that this process uploaded, or None if a full checkpoint is needed instead."""
        for _ in range(2):
            baseline = self._sound_baseline(division)
            if baseline is None:
                return None
            update, answers = self._upload(baseline, parts, seq)
            if any(answer is None for answer in answers):
                return None
            if all(answer["sound"] for answer in answers):
                break
            self._baseline = None  # a bit in memory has flipped; the store has the right weights, so read them back
        else:
            raise PublishError("a process's copy of the last version changed in memory, twice. Check the memory of that machine.")
        assert update is not None
        files = in_order([answer["files"] for answer in answers])
        if sum(entry.size for entry in files) >= division.table.state_bytes:
            return None
        difference = Digest()
        for answer in answers:
            difference += Digest.from_hex(answer["difference"])
        changed = sum(answer["changed"] for answer in answers)
        self._pending = _Pending(division, update.after, update.deltas, parts)
        answer = self._by_first(lambda first: first.commit_delta(division.table, files, difference, changed, step, meta, attachments))
        self._finish(answer)
        return update.size

    def _upload(self, baseline: PartsBaseline, parts: Parts, seq: int) -> tuple[Update | None, list[Any]]:
        """Encode and upload this process's parts. Returns the update, and what all processes report."""
        update: Update | None = None

        def encode() -> dict[str, Any] | None:
            nonlocal update
            update = upload_update(self._location(seq), baseline, parts, self._threads, limit=baseline.division.table.state_bytes)
            if update is None:
                return None
            if self._first is not None:
                scanned = sum(segment.raw for segment in baseline.segments)
                self._first.observe(sent=update.size, seconds=update.upload_seconds, scanned=scanned, scan_seconds=update.encode_seconds)
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
        answer = self._by_first(lambda first: first.commit_checkpoint(division.table, done.files, digest, step, meta, attachments))
        self._finish(answer)
        return done.sent

    def _finish(self, answer: Mapping[str, Any]) -> None:
        self._move(answer["record"])
        self._pending = None
        if self._baseline is not None:
            due = bool(answer["anchor"])
            if self._has_skips:
                due = self._shortcuts.make_skips(self._baseline, anchor_due=due)
            if due:
                assert self._commit is not None
                self._shortcuts.make_anchor(self._baseline, self._commit)

    def _move(self, record: str) -> None:
        """Move the baseline to a commit that has landed."""
        pending = self._pending
        self._commit = Commit.parse(record.encode())
        self._must_rewind = False
        at = self._here()
        if pending is None:  # a rewind to the version that was rebuilt before
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
        """Return the baseline, read back from the store unless every process has it. None if the chain has other tensors."""
        baseline = self._baseline
        fits = baseline is not None and baseline.intact and baseline.division is division
        if all(together(self._ranks, lambda: fits)):
            return self._baseline
        self._baseline = None
        if self._commit is None or self._commit.digest is None:
            return None
        parts = self._reader.read(self._commit, division, self._by_first)
        return None if parts is None else self._take(division, parts)

    def _take(self, division: Division, parts: Parts) -> PartsBaseline:
        segments = division.segments(self._ranks.rank, self._options.segment_bytes)
        self._baseline = PartsBaseline(division, parts, segments, self._here(), threads=self._threads, remember=self._has_skips)
        return self._baseline

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
        return DataLocation(self._store, self._pool, self.epoch, seq)

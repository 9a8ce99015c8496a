"""The publisher of many processes. They publish one version after the other together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ...chain.log import ChainLog
from ...chain.version import Version
from ...errors import PublisherClosed, PublishError, RunMismatch
from ...events import OnEvent, emit
from ...quantise import Recipe
from ...store import Store, open_store
from ...telemetry.trace_context import with_trace
from ...tensors.bits import TensorPart
from ...tensors.casting import WireDType
from ..attachments.model_files import TokenizerFiles
from ..attachments.quantised_config import CONFIG
from ..attachments.read_files import Attachments, CollectedFiles, read_attachments
from ..closing import Closing
from ..commits import check_meta, check_step
from ..publish_warnings import Advice
from ..quantising import Quantising
from ..shortcuts.job_thread import JobThread
from ..snapshots import SnapshotDevice
from ..time_limit import TimeLimit
from ..upload.segments import TensorTable
from ..upload.upload_pool import UploadPool
from ..writer_options import WriterOptions
from .announcing import SharedAnnouncer
from .append import PartsAppender
from .division import MOST_RANKS, Parts, Splitter
from .first_rank import FirstRank, PartsPublication
from .parts_source import PartsSource, WholeParts
from .quantised_parts import QuantisedParts
from .ranks import Ranks, together
from .shortcuts import SharedShortcuts

_STREAMS = 32
"""Most objects that each process uploads at the same time. The store, which measures its link, often admits fewer."""

_LAST_ROUND = 5.0
"""Seconds to wait at the end for other processes that announce their last files. Nothing depends on it."""


class ShardedPublisher:
    """Publishes a model of which each process holds a part: every process encodes and uploads its part, and the first one commits.

    All processes open it, call `publish` for the same versions in the same order, and close it. A version becomes visible when all
    processes have uploaded their parts and the first one has committed it. An error in one process is raised in all of them, and then
    nothing is published. Each process keeps a copy of its own parts.

    Opening it takes the run over, as with `Publisher`. Before that, it checks the version that it continues from: the name and size of
    every object, and the hashes of attachments and of the smallest files of weights, up to 256 MiB. If the chain has versions already, the
    first `publish` reads the newest one back, whatever number of processes published it, and raises `DataDamaged` if its weights are
    damaged.

    All processes make skips and anchors together, on a thread of each, while newer versions are published. Versions themselves are
    published before `publish` returns; `deltawire.trainers.FSDPPublisher` can do that in the background.

    Parameters
    ----------
    ranks
        The processes, and how they communicate.
    url
        The location of the chain: a URL, a directory, or an open `Store`. It must be the same for all processes.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`).
    attachments
        Further files of each version: a directory, or names with bytes or paths. Only those of the first process count.
    tokenizer
        A tokenizer whose files are published with the model. Only that of the first process counts.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. The
        published bytes are those of a `Publisher`. Each process must hold whole rows of the weights that are quantised.
    dtype
        With `quantise`: the type of floating-point weights that are not quantised. None: bfloat16. Without it, pass weights in the type
        in which they are to be published.
    snapshot
        Where copies of weights on a GPU are kept: "host", in pinned memory of the host, or "device", on the GPU itself.
    refuse_nonfinite
        Raise `NonFiniteWeights` instead of publishing weights that are NaN or infinite. With `quantise`, they always raise.
    resume_from_seq
        The `Version.seq` of the version to go back to. It is not the version number that `deltawire log` shows. Later versions are
        abandoned once this one is rebuilt. None: the newest.
    starts_full
        Publish the first version as a full checkpoint, and do not read the newest one back. Use it if the newest version is damaged.
    options
        How versions are written: signing key, anchors, skips, garbage collection, threads, store. Each process uses its own
        `threads`, `segment_bytes`, `shard_bytes` and `store`; the other fields of the first process count for all.
    on_event
        Called with every event. It is told only the events of this process.
    """

    def __init__(
        self,
        ranks: Ranks,
        url: str | Path | Store,
        run: str | None = None,
        *,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        quantise: str | Recipe | None = None,
        dtype: WireDType | None = None,
        snapshot: SnapshotDevice = "host",
        refuse_nonfinite: bool = False,
        resume_from_seq: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        options = options or WriterOptions()
        self._close_timeout = options.close_timeout
        self._ranks = ranks
        self._attachments = CollectedFiles(attachments if ranks.rank == 0 else None)
        self._has_attachments = attachments is not None and ranks.rank == 0
        self._tokenizer = None if tokenizer is None or ranks.rank > 0 else TokenizerFiles(tokenizer)
        self._on_event = on_event
        self._advice = Advice(on_event, has_dtype=True, refuse_nonfinite=refuse_nonfinite, threads=options.threads)
        if dtype is not None and quantise is None:
            raise ValueError("dtype is the type of the weights that stay. Without quantise, cast the weights before you pass them.")
        self._quantising = None if quantise is None else Quantising(quantise, dtype)
        self._splitter = Splitter(ranks)
        self._quantised = None if self._quantising is None else QuantisedParts(ranks, self._quantising, options.threads)
        self._closed = False
        first: FirstRank | None = None
        with ExitStack() as opened:

            def open_all() -> dict[str, Any] | None:
                nonlocal first
                if ranks.size > MOST_RANKS:
                    raise PublishError(
                        f"{ranks.size:,} processes cannot publish together, at most {MOST_RANKS:,} can. Pass a smaller group."
                    )
                self._store = open_store(url, options=options.store, on_event=on_event)
                if self._store is not url:
                    opened.callback(self._store.close)
                self._pool = opened.enter_context(UploadPool(_STREAMS, "deltawire-upload"))
                if ranks.rank > 0:
                    return None
                self._attachments.of_tokenizer = self.files_of_tokenizer()
                given = read_attachments(self._attachments) or {}  # so that errors in them are raised now, not hours later
                first = FirstRank(
                    self._store,
                    self._pool,
                    run,
                    options,
                    resume_from_seq=resume_from_seq,
                    starts_full=starts_full,
                    has_attachments=attachments is not None,
                    given=given,
                    quantising=self._quantising,
                    on_event=on_event,
                )
                return {**first.opening(), "skips": options.skips, "announces": options.announce, "full": starts_full}

            opening = together(ranks, open_all)[0]
            together(ranks, lambda: self._require_run(opening["id"]))
            self.epoch: int = opening["epoch"]
            """The number of this job's epoch. Each job that opens the run gets a higher one."""
            self._first = first
            # Shortcuts have a channel and a pool of their own, so that they never delay a version.
            shortcut_ranks = ranks.another_channel()
            pool = opened.enter_context(UploadPool(2, "deltawire-shortcut"))
            self._pools = [self._pool, pool]
            self._jobs = JobThread("deltawire-upkeep")
            opened.callback(self._jobs.close)
            shortcuts = SharedShortcuts(
                shortcut_ranks, first, self._store, pool, self.epoch, self._jobs, options, makes_skips=opening["skips"]
            )
            self._announcing: SharedAnnouncer | None = None
            if opening["announces"]:
                sending = JobThread("deltawire-announce")
                self._announcing = SharedAnnouncer(ranks.another_channel(), sending, None if first is None else first.announcer)
            self._opened = opened.pop_all()
        self._appender = PartsAppender(
            ranks,
            self._store,
            self._pool,
            shortcuts,
            first,
            opening,
            options,
            device=snapshot,
            announcing=self._announcing,
            on_event=on_event,
        )
        if first is not None and self.version is not None:
            self._advice.follows(first.table_before, self.version.step if resume_from_seq is None else None)
            self._advice.follows_recipe(first.recipe_before)

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain. None if nothing is published yet. At first, the one of `resume_from_seq`."""
        return self._appender.version

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
            if self._quantising is None:
                self._advice.check_finite({name: part.elements for name, part in held.items()})
            if self._ranks.rank == 0:
                self._advice.check_step(step)
                self._attachments.taken |= files or {}
                self._attachments.of_tokenizer = dict(self.files_of_tokenizer() if tokenizer_files is None else tokenizer_files)
                attachments = read_attachments(self._attachments) if self._attachments or self._has_attachments else None

        def configure(table: TensorTable) -> None:
            """Say in config.json how the weights are quantised, and warn of changes. Only the first process does this."""
            nonlocal attachments
            if self._first is None:
                return
            recipe = None if self._quantising is None else self._quantising.record
            if recipe is not None or self._advice.check_recipe(recipe, may_raise=False):
                layout = None if self._quantised is None else self._quantised.layout
                attachments = self._first.config.written_into(dict(attachments or {}), layout)
                if layout is not None:
                    self._advice.check_quantised(layout, may_raise=False)
            if recipe is not None:
                self._advice.check_recipe(recipe, may_raise=False)
                self._advice.check_quantization_config(is_published=CONFIG in (attachments or {}))
            self._advice.check_layout(table, may_raise=False)  # the other processes would wait for ever

        together(self._ranks, check)
        if self._quantised is None:
            division, parts = self._splitter.split(held)
            make_parts: Callable[[Parts | None], PartsSource] = lambda _: WholeParts(parts)  # noqa: E731
        else:
            division = self._quantised.divide(held)
            make_parts = partial(self._quantised.quantise, held, division)
        together(self._ranks, lambda: configure(division.table))
        recipe = None if self._quantising is None else self._quantising.record
        strings = dict(meta or {})
        if self._ranks.rank == 0:
            strings = with_trace(strings, self._on_event, step)
        sent = self._appender.append(PartsPublication(division, make_parts, step, strings, attachments, recipe))
        assert self.version is not None
        if self._ranks.rank == 0:
            self._advice.after(self.version, division.table)
            self._advice.follows(division.table, step)
            self._advice.follows_recipe(recipe)
        seconds = time.perf_counter() - began
        emit(self._on_event, "rank-published", rank=self._ranks.rank, seq=self.version.seq, bytes=sent, seconds=seconds)
        return self.version

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the skips and anchors that are due are made. Those that fail are only reported.

        Parameters
        ----------
        timeout
            The longest time to wait, in seconds, before it raises TimeoutError. None or infinity: wait as long as it takes.
        """
        if not self._closed:
            self._jobs.wait(TimeLimit(timeout).left)

    def close(self) -> None:
        """Find out whether the last commit landed, finish the skips and anchors that are due, and release all resources.

        All processes call it. It may be called twice. After `WriterOptions.close_timeout` it gives up skips and anchors that are not done,
        and raises `CloseTimeout` if it is not known then whether the last commit landed.
        """
        self.close_within(self.start_closing())

    def close_within(self, closing: Closing) -> None:
        """Do what `close` does, in the time that is left.

        Parameters
        ----------
        closing
            The time that is left.
        """
        if self._closed:
            return
        self._closed = True
        with self._opened:
            try:
                closing.run(lambda: self._appender.settle(None), "the last version")
            finally:
                self._end_announcing(_LAST_ROUND if closing.left is None else min(_LAST_ROUND, closing.left))
                closing.end_threads(self._jobs, self._pools, self.version, self._on_event)

    def start_closing(self) -> Closing:
        """Return the time that closing may take. It begins now."""
        return Closing(self._close_timeout)

    def abandon(self, closing: Closing) -> None:
        """Release all resources, and do not talk to other processes: they may have died, or wait for something else.

        Parameters
        ----------
        closing
            The time that is left to wait for uploads.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.abandon()  # it may be waiting for a process that has died
        self._end_announcing(0.0)
        with self._opened:
            closing.end_threads(self._jobs, self._pools, self.version, self._on_event)

    def _end_announcing(self, seconds: float) -> None:
        if self._announcing is not None:
            self._announcing.close(seconds)

    def __enter__(self) -> ShardedPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abandon(self.start_closing())

    def _require_run(self, run_id: str) -> None:
        """Raise `RunMismatch` if this process sees another run than the first: directories and `memory://` may differ by machine."""
        found = ChainLog(self._store).run.id
        if found != run_id:
            raise RunMismatch(
                f"{self._store.url} is not the same location for every process: it holds run {found} here, and run {run_id} at rank 0."
            )

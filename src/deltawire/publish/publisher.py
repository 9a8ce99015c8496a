"""The publisher of a single process. It runs in the trainer.

A call of `publish` goes one way: accept it (check it, read its attachments), take a snapshot of the weights, put it into the queue, append
the version, make shortcuts. Without `background` the calling thread does all of it; with it, a thread does what comes after the snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..chain.log import ChainLog
from ..chain.maintenance.collect import Collected, collect
from ..chain.version import Version
from ..errors import PublisherClosed, PublishError
from ..events import OnEvent
from ..format.records.record_parts import RecipeRecord
from ..format.records.signing import SigningKey
from ..quantise import Recipe
from ..store import Store, open_store
from ..telemetry.trace_context import with_trace
from ..tensors.bits import State
from ..tensors.casting import Casting, WireDType
from ..tensors.columns import in_columns
from ..tensors.torch_types import is_module
from .append import Appender
from .at_exit import warn_lost
from .attachments.model_files import TokenizerFiles, files_of_model
from .attachments.quantised_config import CONFIG
from .attachments.read_files import Attachments, CollectedFiles, read_attachments
from .background import BackgroundQueue, PendingVersion
from .closing import Closing
from .commits import check_meta, check_step
from .publication import Publication
from .publish_warnings import Advice
from .quantising import QuantisedConfig, Quantising
from .resume import read_state, read_table
from .shortcuts.job_thread import JobThread
from .shortcuts.shortcut_writer import ShortcutWriter
from .shortcuts.upkeep import Upkeep
from .snapshots import SnapshotDevice, SnapshotMemory, copy_tensors
from .take_over import TakeOver
from .time_limit import TimeLimit
from .upload.segments import TensorTable
from .upload.upload_pool import UploadPool
from .version_writer import VersionWriter
from .weight_source import WeightSource
from .writer_options import WriterOptions

if TYPE_CHECKING:
    import torch

    Module: TypeAlias = torch.nn.Module
else:
    Module: TypeAlias = Any

_STREAMS = 32
"""Most objects that are uploaded at the same time. The store, which measures its link, often admits fewer."""


class Publisher:
    """Publishes the states of one model, version by version, as exact deltas to an object store.

    >>> with Publisher("s3://bucket/run-7", dtype=torch.bfloat16) as publisher:  # the type that the engines serve
    ...     for step in range(steps):
    ...         train(model)
    ...         publisher.publish(model, step=step)

    Opening a publisher takes the run over: an earlier publisher of the same run is fenced and raises `Fenced`. If the chain has
    versions already, the publisher first reads the newest one back, so that the next one is a delta over it. If that fails, it raises
    before it fences the earlier publisher.

    Use `with`. On leaving the block, the publisher publishes everything that it accepted, even if the block raises. If that takes longer
    than `WriterOptions.close_timeout`, it raises `CloseTimeout`. A background publisher that is never closed publishes when the process
    ends; after two minutes it gives up and warns (`VersionsLost`). A process that is killed loses the versions that are not published yet.

    The publisher keeps one copy of the state; with `background` two, or three if the store is slower than training. Several threads may use
    a publisher, one at a time. `deltawire.warnings` lists the warnings that a publisher gives.

    Every version is a complete Hugging Face checkpoint, because the files of the model are published with it: config.json and
    generation_config.json of the model that is passed to `publish`, the files of `tokenizer`, and `attachments`. The publisher reads them
    at each `publish`, and uploads a file if it is new or has changed.

    Parameters
    ----------
    url
        The location of the chain: a URL, a directory, or an open `Store`.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`). The default name is made from `url`.
    background
        Copy the weights and continue at once; a thread encodes and uploads them. If training is faster than the store, a newer state
        replaces one that still waits.
    snapshot
        Where copies of weights on a GPU are kept: "host", in pinned memory of the host, or "device", on the GPU itself. With
        "device", changes are found and encoded on the GPU, and only deltas leave it.
    dtype
        The type that the engines serve. Weights of type float16, bfloat16, float32 or float64 are published as this type, for example a
        trainer's float32 rounded to bfloat16. It is a torch or NumPy type, its name, or a function of a tensor's name and the tensor. None:
        nothing is cast.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. See docs/quantise.md.
        `dtype` is the type of the other weights then, bfloat16 by default. The `quantization_config` of the recipe is written into the
        published config.json. None: weights are not quantised.
    refuse_nonfinite
        Raise `NonFiniteWeights` instead of publishing weights that are NaN or infinite. By default they are published with a warning.
        With `quantise`, they always raise.
    attachments
        Further files of each version: a directory, or names with bytes or paths. They replace files of the model and tokenizer that have
        the same names. None: other files of the version before stay. An empty mapping removes them.
    tokenizer
        A tokenizer whose files are published with the model.
    resume_from_seq
        The `Version.seq` of the version to go back to. It is not the version number that `deltawire log` shows. Later versions are
        abandoned. None: the newest.
    starts_full
        Publish the first version as a full checkpoint, and do not read the newest one back. Use it if the newest version is damaged.
    options
        How versions are written: signing key, anchors, skips, garbage collection, threads, store. See `WriterOptions`.
    on_event
        Called with every event. See docs/events.md for the list.
    """

    def __init__(
        self,
        url: str | Path | Store,
        run: str | None = None,
        *,
        background: bool = False,
        snapshot: SnapshotDevice = "host",
        dtype: WireDType | None = None,
        quantise: str | Recipe | None = None,
        refuse_nonfinite: bool = False,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        resume_from_seq: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._options = options = options or WriterOptions()
        self._attachments = CollectedFiles(attachments)
        self._wants_no_attachments = attachments == {}
        self._tokenizer = None if tokenizer is None else TokenizerFiles(tokenizer)
        files = self._read_attachments()  # so that errors in them are raised now, not hours later
        self._on_event = on_event
        self._casting = Casting(dtype)
        self._quantising = None if quantise is None else Quantising(quantise, dtype)
        has_dtype = self._casting.is_given or quantise is not None
        self._advice = Advice(on_event, has_dtype=has_dtype, refuse_nonfinite=refuse_nonfinite, threads=options.threads)
        self._memory = SnapshotMemory(snapshot, keeps_spare=background or (self._casting.is_given and quantise is None))
        self._source: tuple[Module, WeightSource] | None = None
        """The model that was published last, and how its weights are read."""
        self._turn = threading.RLock()
        self._is_publishing = False
        """Whether a publication is in progress. Only a signal handler on the publishing thread can see it set."""
        self._close_afterwards = False
        self._closed = False
        with ExitStack() as opened:  # undone in reverse if anything below fails, and by close()
            self._store = open_store(url, options=options.store, on_event=on_event)
            if self._store is not url:
                opened.callback(self._store.close)
            chain = TakeOver(self._store, run, options, files=files, keeps_others=attachments is None, resume_from_seq=resume_from_seq)
            reads_back = resume_from_seq is not None or not starts_full
            state = None
            if chain.start is not None and reads_back:
                state = read_state(chain.log, chain.start, threads=options.threads, on_event=on_event)
            chain.require_files()
            self._config = QuantisedConfig(self._quantising, chain if attachments is None else None)
            self._writer = chain.fence()
            # Shortcuts have a pool of their own, so that their uploads never delay a version.
            uploads, shortcut_uploads = UploadPool(_STREAMS, "deltawire-upload"), UploadPool(2, "deltawire-shortcut")
            self._pools = [opened.enter_context(pool) for pool in (uploads, shortcut_uploads)]
            attached = chain.attached(self._writer, on_event)
            self._appender = Appender(self._writer, attached, uploads, self._memory, options, starts_full=starts_full, on_event=on_event)
            if reads_back:
                self._appender.resume(resume_from_seq, state)
            del state
            self._follow_newest(chain, has_step=resume_from_seq is None)
            shortcuts = ShortcutWriter(self._store, shortcut_uploads, self._writer.run, self.epoch, options)
            garbage = None if options.auto_collect is None else self._collect_garbage
            self._jobs = JobThread("deltawire-upkeep")
            opened.callback(self._jobs.close)
            upkeep = Upkeep(self._appender, shortcuts, options, thread=self._jobs, collect=garbage, on_event=on_event)
            self._versions = VersionWriter(self._appender, upkeep, self._advice, self._memory, on_event)
            self._background: BackgroundQueue | None = None
            if background:
                self._background = BackgroundQueue(
                    self._versions.write, self._versions.follow_up, self._memory, previous=self._previous, on_event=on_event
                )
            self._opened = opened.pop_all()

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain. None if nothing is published yet."""
        return self._appender.version

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._writer.run.run

    @property
    def epoch(self) -> int:
        """The number of this publisher's epoch. Each publisher that opens the run gets a higher one."""
        return self._writer.epoch

    @property
    def signing_key(self) -> SigningKey | None:
        """The key that versions are signed with. None if they are not signed."""
        return self._options.signing_key

    @property
    def trusted_keys(self) -> frozenset[str]:
        """The public keys that may have signed the chain: the publisher's own and the trusted ones. Empty if versions are not signed."""
        return self._options.accepted_keys

    @property
    def last_error(self) -> BaseException | None:
        """The last error. It includes errors that are only reported, because shortcuts and garbage collection may fail harmlessly."""
        return self._versions.last_error

    def publish(self, state: State | Module, *, step: int | None = None, meta: Mapping[str, str] | None = None) -> Version | PendingVersion:
        """Publish a model or a state. Neither is changed.

        Without `background`, returns the `Version`, which readers can see by then. With it, returns a `PendingVersion` as soon as the state
        is copied; if an earlier publication has failed, it raises that error instead, once, and does not accept the state.

        Raises a `TensorError` if the state cannot be published. Raises a `StoreError` if the store fails; then the same or a later state
        may be published again. Raises `CommitOutcomeUnknown` if the version may be in the chain nevertheless; the next call finds out.
        Raises `Fenced`, from then on at every call, if another publisher has taken over.

        Parameters
        ----------
        state
            A `torch.nn.Module`, or a mapping from names to NumPy arrays or torch tensors. For a module, the tensors of its checkpoint are
            published, tied weights once under their first name, together with its configuration.
        step
            The trainer's step. It is recorded with the version.
        meta
            Further strings that are recorded with the version.
        """
        self._check_open()
        accepted = self._accept(state, step, meta)
        with self._taking_a_turn():
            published = self._publish_now(accepted) if self._background is None else self._background.submit(accepted)
        self._advice.follows(accepted.table, accepted.step)
        self._advice.follows_recipe(accepted.recipe)
        return published

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every state that was passed to `publish` is in the chain, or superseded, and the shortcuts that are due are made.

        Raises errors as `publish` does. Shortcuts that fail are only reported.

        Parameters
        ----------
        timeout
            The longest time to wait, in seconds, before it raises TimeoutError. None or infinity: wait as long as it takes.
        """
        self._check_open()
        limit = TimeLimit(timeout)
        if self._background is not None:
            self._background.flush(limit.left)
        self._jobs.wait(limit.left)

    def collect(self, *, grace: float, dry_run: bool = False) -> Collected:
        """Delete data that readers no longer need. See `deltawire.chain.maintenance.collect`.

        Parameters
        ----------
        grace
            Data are deleted at least this many seconds after they were marked for deletion.
        dry_run
            Only find out what would be deleted.
        """
        self._check_open()
        return collect(self._store, grace=grace, dry_run=dry_run, log=self._new_log(), on_event=self._on_event)

    def close(self) -> None:
        """Publish everything that was accepted, finish the shortcuts that are due, and release all resources. It may be called twice.

        Raises background errors that were not raised yet, after everything is closed. Raises `CloseTimeout` if the store does not finish
        within `WriterOptions.close_timeout`, or if it does not say whether the last commit landed. If a signal handler calls it in the
        middle of `publish`, it returns at once; the publisher closes when that publication ends.
        """
        self._close(settle=True)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close_after(error)

    # Accept

    @contextmanager
    def _taking_a_turn(self) -> Iterator[None]:
        """Let one thread publish at a time. A `close` that interrupts it, from a signal handler, is carried out at the end.

        Such a `close` must not come first: the queue may be copying a state over an older one that it has accepted.
        """
        with self._turn:
            self._check_open()
            if self._is_publishing:
                raise PublishError("publish was called in the middle of another publication, by the same thread.")
            self._is_publishing, error = True, None
            try:
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._is_publishing = False
                if self._close_afterwards:
                    self._close_after(error)

    def _accept(self, state: State | Module, step: int | None, meta: Mapping[str, str] | None) -> Publication:
        """Check everything about a call of `publish` that can be checked at once, and read the attachments."""
        weights: State = self._weights_of(state) if is_module(state) else cast("State", state)
        layout, quantising = None, self._quantising
        if quantising is None:
            if not self._casting.is_given:
                weights = in_columns(weights)
            table = TensorTable.of(weights, self._casting)
        else:
            layout = quantising.layout_of(weights)
            table = quantising.table_of(layout)
            self._advice.check_quantised(layout)
        strings = check_meta(meta)
        check_step(step)
        self._appender.check_limits(table)
        files = self._config.written_into(self._read_attachments(), layout)
        recipe = None if quantising is None else quantising.record
        self._warn(table, step, recipe, files)
        self._writer.check_fenced()
        strings = with_trace(strings, self._on_event, step)
        return Publication(weights, table, step, strings, files, recipe=recipe, layout=layout)

    def _weights_of(self, model: Any) -> State:
        self._attachments.taken |= files_of_model(model, self._casting.dtype)  # with `quantise`, the type is set later
        if self._source is None or self._source[0] is not model:
            self._source = model, WeightSource(model)
        return self._source[1].snapshot()

    def _read_attachments(self) -> dict[str, bytes]:
        if self._tokenizer is not None:
            self._attachments.of_tokenizer = self._tokenizer.read()
        return read_attachments(self._attachments) or {}

    def _follow_newest(self, chain: TakeOver, *, has_step: bool) -> None:
        """Compare the next version with the newest one. With `resume_from_seq`, its step does not count: the user chose to go back."""
        if chain.start is not None:
            baseline = self._appender.baseline
            table = read_table(chain.log, chain.start) if baseline is None else baseline.table
            self._advice.follows(table, chain.start.step if has_step else None)
            self._advice.follows_recipe(chain.start.recipe)

    def _warn(self, table: TensorTable, step: int | None, recipe: RecipeRecord | None, files: Mapping[str, bytes]) -> None:
        """Warn of what the user probably does not want, before anything is published."""
        attachments = None
        if recipe is not None:
            self._advice.check_quantization_config(is_published=CONFIG in files)
        elif self._appender.version is None and not self._wants_no_attachments:
            attachments = self._attachments.keys()
        self._advice.check_recipe(recipe)
        self._advice.before(table, step, attachments)

    def _previous(self) -> State | None:
        return None if self._quantising is None else self._appender.previous(self._quantising.record)

    # Publish in the foreground

    def _publish_now(self, accepted: Publication) -> Version:
        version = self._versions.write(self._cast(accepted))
        self._versions.follow_up()
        return version

    def _cast(self, accepted: Publication) -> Publication:
        """Return the publication with a copy of its weights in the published type, if they have another type."""
        if accepted.layout is not None or not self._casting.is_given or TensorTable.of(accepted.weights) == accepted.table:
            return accepted
        arrays = self._memory.take(accepted.table, accepted.weights)
        copy_tensors(accepted.weights, arrays)
        return replace(accepted, weights=arrays, is_owned=True)

    # Close

    def _close_after(self, error: BaseException | None) -> None:
        """Close everything after a block or a publication, which may have ended by an error. That error is raised by the caller."""
        unpublished = "" if self._background is None else self._background.unpublished()
        try:
            # In the foreground, `publish` has raised if a commit's outcome is unknown. Do not ask again: the store may be down.
            self._close(settle=error is None or self._background is not None)
        except Exception as lost:
            if error is None:
                raise
            if lost is not error:  # the error of the `with` block is raised, so this one would be lost
                warn_lost(unpublished or "a version", str(lost), self._on_event, raised=error)

    def _close(self, *, settle: bool) -> None:
        """Close everything. `settle` finds out first whether the last commit landed, if that is unknown."""
        with self._turn:
            if self._closed:
                return
            if self._is_publishing:
                self._close_afterwards = True
                return
            self._closed = True
        closing = Closing(self._options.close_timeout)
        with self._opened:
            try:
                if self._background is not None:
                    self._background.close(closing)
                if settle and (version := self._appender.in_doubt) is not None:
                    closing.run(self._appender.settle, version)
            finally:
                closing.end_threads(self._jobs, self._pools, self.version, self._on_event)

    def _check_open(self) -> None:
        if self._closed:
            raise PublisherClosed("the publisher was closed.")

    # Collect garbage

    def _collect_garbage(self) -> None:
        assert self._options.auto_collect is not None
        collect(self._store, grace=self._options.auto_collect, log=self._new_log(), on_event=self._on_event)

    def _new_log(self) -> ChainLog:
        """Return the chain for a collector, which may run on another thread and so needs its own."""
        return ChainLog(self._store, run=self._writer.run.run, trusted_keys=self._options.accepted_keys)

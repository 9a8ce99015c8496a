"""The trainer's side of a chain."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..chain.log import ChainLog
from ..chain.maintenance.collect import Collected, collect
from ..chain.version import Version
from ..errors import Fenced, PublisherClosed, PublishError
from ..events import OnEvent, emit
from ..format.records.signing import SigningKey
from ..store import Store, open_store, probe
from ..store.occupancy import refuse_occupied
from ..tensors.bits import State, is_module
from ..tensors.casting import Casting, WireDType
from .advice import Advice
from .append import Appender
from .at_exit import warn_lost
from .attachments.model_files import TokenizerFiles, files_of_model
from .attachments.read_files import Attachments, CollectedFiles, check_sizes, read_attachments
from .attachments.stored_files import AttachedFiles, StoredFiles
from .background import BackgroundPublisher, PendingVersion
from .commits import ChainWriter, check_meta, check_step, open_log, open_run
from .resume import Resumed, find_start, read_state
from .shortcuts.shortcut_writer import ShortcutWriter
from .shortcuts.upkeep import Helper, Upkeep
from .snapshots import Arrays, SnapshotDevice, copy_tensors, is_kept_like, new_arrays
from .upload.segments import TensorTable
from .upload.upload_pool import UploadPool
from .weight_source import WeightSource
from .writer_options import WriterOptions

if TYPE_CHECKING:
    import torch

    Module: TypeAlias = torch.nn.Module
else:
    Module: TypeAlias = Any

_STREAMS = 4
"""Objects uploaded side by side; the store cuts large ones into parallel parts by itself."""


class Publisher:
    """Publishes the states of one model, version by version, as exact deltas to an object store.

    >>> with Publisher("s3://bucket/run-7", dtype=torch.bfloat16) as publisher:  # what the fleet serves
    ...     for step in range(steps):
    ...         train(model)
    ...         publisher.publish(model, step=step)

    Opening one takes the run over: whatever publisher was there before is fenced off and raises `Fenced`. Where the chain has versions
    already, the newest is read back first, so that the next is a delta over it; with `resume_from` an older one, and those after it are
    abandoned. What cannot be read back is raised before anybody is fenced off. With `starts_full` the first version is a full checkpoint,
    and nothing is read back: that also goes on with a chain whose newest version is damaged.

    It holds a copy of the state of its own. With `background`, `publish` takes another copy (a third if the store is slower than training)
    and returns at once. Skips cost some per cent of the state in memory, anchors (see `AnchorPolicy`) nothing. Copies of weights on a GPU
    are kept in pinned memory of the host, or with `snapshot="device"` beside them: then changes are found and encoded on the GPU, and only
    deltas cross the bus. In the background that is done on a stream of its own; training waits for nothing but the copy.

    `dtype` is what the fleet serves: weights of float16, bfloat16, float32 or float64 are published as that type, for example a trainer's
    float32 as the bfloat16 that they round to. It is a torch or NumPy type or its name, or a function of a tensor's name and the tensor.
    Without it nothing is cast. Weights are cast where they are, into the copy that a publisher in the background makes anyway; one in the
    foreground has a second copy for it.

    Weights that are NaN or infinite are reported (`NonFinitePublished`); with `refuse_nonfinite`, they raise `NonFiniteWeights` and are not
    published. In the background that is raised like any other failure, by the next call. The categories of `deltawire.warnings` say what
    else a publisher warns of.

    So that every version is a complete Hugging Face checkpoint, other files belong to it: those of the model that is published
    (config.json, generation_config.json), of its `tokenizer` if it is given, and `attachments` (a directory, or names with bytes or
    paths), which replace others of the same names. They are read at each `publish`, and a file that is new or has changed is uploaded with
    that version. Without `attachments`, other files of the version before stay; an empty mapping removes them.

    `auto_collect` deletes what nobody needs any more after every anchor, with so many seconds of grace.
    `limits` are those of a new run. A publisher may be used from several threads, one at a time.

    With `signing_key` every version is signed, and only a chain that was signed from its beginning is taken over: by this key, or by one of
    the public `trusted_keys` (the earlier ones of one's own, after a change of keys). Else `SignatureInvalid`, before anybody is fenced
    off; so too without a key for a chain that is signed.

    Open it by `with`, which publishes what was accepted before it returns, also if the body raises. A publisher in the background that
    nobody closes publishes what it accepted when the process ends; after two minutes it gives up, and warns (`VersionsLost`). A process
    that is killed loses what was on its way.
    """

    def __init__(
        self,
        url: str | Path | Store,
        run: str | None = None,
        *,
        background: bool = False,
        snapshot: SnapshotDevice = "host",
        dtype: WireDType | None = None,
        refuse_nonfinite: bool = False,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        resume_from: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._options = options = options or WriterOptions()
        self._attachments = CollectedFiles(attachments)
        self._tokenizer = None if tokenizer is None else TokenizerFiles(tokenizer)
        given = self._read_attachments()  # what is wrong with them should show now, not hours later
        self._keeps_attachments = attachments is None
        self._on_event = on_event
        self._place: SnapshotDevice = snapshot
        self._casting = Casting(dtype)
        self._advice = Advice(on_event, has_dtype=self._casting.is_given, refuse_nonfinite=refuse_nonfinite, threads=options.threads)
        self._wants_no_attachments = attachments == {}
        self._source: tuple[Module, WeightSource] | None = None
        """The model that was published last, and how its weights are read."""
        self._spare: Arrays | None = None
        """Memory to cast weights into, where there is no background that has its own."""
        self._turn = threading.RLock()
        self._publishing = False
        """Whether the thread that has the turn is at a publication: seen by nobody else but a signal handler that runs on that thread."""
        self._is_to_close = False
        self._closed = False
        self._background: BackgroundPublisher | None = None
        self._last_error: BaseException | None = None
        with ExitStack() as opened:  # undone in reverse if anything below fails, and by close()
            self._store = open_store(url, options=options.store, on_event=on_event)
            if self._store is not url:
                opened.callback(self._store.close)
            refuse_occupied(self._store)
            probe(self._store)
            open_run(self._store, run, options.limits)
            log = open_log(self._store, run, options)
            check_sizes(given, log.limits)
            stored = StoredFiles(log, given)
            ready = self._read_start(log, stored, given, resume_from, starts_full)  # before anybody is fenced off
            self._writer = ChainWriter(self._store, log, signing_key=options.signing_key, resumed_from=resume_from)
            pool = opened.enter_context(UploadPool(_STREAMS, "deltawire-upload"))
            self._appender = Appender(
                self._store,
                log,
                self._writer,
                pool,
                options,
                keeps_attachments=self._keeps_attachments,
                stored_files=stored,
                starts_full=starts_full,
                on_event=on_event,
                recycle=self._recycle,
                snapshot=snapshot,
            )
            if not starts_full or resume_from is not None:
                self._appender.resume(resume_from, ready)
            del ready
            helper: Helper | None = None
            if background:  # with uploads of its own, so that an anchor never stands in the way of a version
                pool = opened.enter_context(UploadPool(2, "deltawire-anchor"))
                helper = Helper("deltawire-upkeep")
                opened.callback(helper.close)
            shortcuts = ShortcutWriter(self._store, pool, self._writer.run, self.epoch, options)
            self._upkeep = Upkeep(
                self._appender,
                shortcuts,
                policy=options.anchor_policy,
                skips=options.skips,
                on_event=on_event,
                helper=helper,
                collect=None if options.auto_collect is None else self._collect_garbage,
            )
            if background:
                self._background = BackgroundPublisher(
                    self._append, self._appender.keeps, self._upkeep.after_append, snapshot=snapshot, on_event=on_event
                )
            self._opened = opened.pop_all()

    @property
    def version(self) -> Version | None:
        """The newest version that is known to be in the chain; None before the first."""
        return self._appender.version

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._writer.run.run

    @property
    def epoch(self) -> int:
        """The number under which this publisher writes. Each one that opens the run gets a higher one."""
        return self._writer.epoch

    @property
    def signing_key(self) -> SigningKey | None:
        """The key that versions are signed with; None if they are not."""
        return self._options.signing_key

    @property
    def trusted_keys(self) -> frozenset[str]:
        """The public keys that what this publisher builds on is signed with: its own, and those that it was given. Empty without a key."""
        return self._options.accepted_keys

    @property
    def last_error(self) -> BaseException | None:
        """The last thing that went wrong, also where it was only reported: shortcuts and garbage collection fail without consequence."""
        return self._last_error or self._upkeep.last_error

    def publish(self, state: State | Module, *, step: int | None = None, meta: Mapping[str, str] | None = None) -> Version | PendingVersion:
        """Publish a model (a `torch.nn.Module`), or a state: names with NumPy arrays or torch tensors. Nothing of it is changed.

        Of a model, the tensors are published that its checkpoint has; tied weights once, under their first name. Its configuration goes
        with them. `step` and `meta` go with the version.

        In the foreground it returns the `Version`, which readers can see by then. In the background it returns a `PendingVersion` as soon
        as the state is copied; where an earlier publication has failed it raises that error instead, once, and takes nothing.

        Raises a `TensorError` for what cannot be published; a `StoreError` if the store fails, after which the same or a later state may be
        published again; `CommitOutcomeUnknown` if it may have landed all the same (the next call finds out); `Fenced`, and from then on
        always, if another publisher has taken over.
        """
        self._check_open()
        weights: State = self._weights_of(state) if is_module(state) else cast("State", state)
        table = TensorTable.of(weights, self._casting)
        strings = check_meta(meta)
        check_step(step)
        self._appender.check_limits(table)
        self._advise(table)
        self._writer.check_fenced()
        attachments = self._read_attachments()
        if self._background is not None:
            return self._background.submit(weights, table, step, strings, attachments)
        with self._turn:
            self._check_open()
            if self._publishing:
                raise PublishError("publish was called in the middle of another publication, by the same thread.")
            self._publishing, version = True, None
            try:
                made = self._cast(weights, table)
                version = self._append(weights if made is None else made, table, step, strings, attachments, owned=made is not None)
                self._upkeep.after_append()
            finally:
                self._publishing = False
                if self._is_to_close:
                    self._close(settle=version is not None)
            return version

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was given to `publish` is in the chain, or superseded. TimeoutError; errors as in `publish`."""
        self._check_open()
        if self._background is not None:
            self._background.flush(timeout)

    def collect(self, *, grace: float, dry_run: bool = False) -> Collected:
        """Delete data that no reader needs any more, announced at least `grace` seconds before; see `chain.maintenance.collect`."""
        self._check_open()
        return collect(self._store, grace=grace, dry_run=dry_run, log=self._new_log(), on_event=self._on_event)

    def close(self) -> None:
        """Finish what was given to `publish` and the anchor in progress, and let go of everything. May be called twice.

        Raises what went wrong in the background and was not raised yet, after everything is closed. Called by a signal handler in the
        middle of `publish`, it returns at once, and that publication is the last: when it ends, the publisher is closed.
        """
        self._close(settle=True)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        waiting = "" if self._background is None else self._background.on_its_way()
        try:
            # In the foreground, what broke off the body has told of a commit in doubt: do not ask a store again that may be down.
            self._close(settle=error is None or self._background is not None)
        except Exception as lost:
            if error is None:
                raise
            if lost is not error:  # what broke off the body is raised; this one would be seen by nobody
                warn_lost(waiting or "a version", str(lost), self._on_event, raised=error)

    def _close(self, *, settle: bool) -> None:
        with self._turn:
            if self._closed:
                return
            if self._publishing:
                self._is_to_close = True
                return
            self._closed = True
        with self._opened:
            if self._background is not None:
                self._background.close()
            if settle:
                self._appender.settle()

    def _weights_of(self, model: Any) -> State:
        self._attachments.taken |= files_of_model(model, self._casting.dtype)
        if self._source is None or self._source[0] is not model:
            self._source = model, WeightSource(model)
        return self._source[1].snapshot()

    def _read_attachments(self) -> dict[str, bytes]:
        """Read the files beside the weights as they are now."""
        if self._tokenizer is not None:
            self._attachments.of_tokenizer = self._tokenizer.read()
        return read_attachments(self._attachments) or {}

    def _advise(self, table: TensorTable) -> None:
        """Warn of what the user probably does not want, before anything is done."""
        attachments = None
        if self._appender.version is None and not self._wants_no_attachments:
            attachments = self._attachments.keys()
        self._advice.before(table, attachments)

    def _read_start(
        self,
        log: ChainLog,
        stored: StoredFiles,
        given: Mapping[str, bytes],
        resume_from: int | None,
        starts_full: bool,
    ) -> Resumed | None:
        """Read the version that is to be gone on from, and its files. Raises what is wrong with them, while nothing is written yet."""
        start = find_start(log, resume_from)
        if start is None:
            return None
        rewinds = resume_from is not None
        state = None
        if rewinds or not starts_full:
            state = read_state(log, start, threads=self._options.threads, on_event=self._on_event)
        AttachedFiles(log, start, stored, keeps_others=self._keeps_attachments).require(given, rewinds=rewinds)
        return state

    def _cast(self, state: State, table: TensorTable) -> Arrays | None:
        """Return the weights as what is published of them, in memory that may be kept; None if they are of that type already."""
        if not self._casting.is_given or TensorTable.of(state) == table:
            return None
        arrays, self._spare = self._spare, None
        if not arrays or TensorTable.of(arrays) != table or not is_kept_like(arrays, state, self._place):
            arrays = new_arrays(table, state, self._place)
        copy_tensors(state, arrays)
        return arrays

    def _append(
        self,
        state: State,
        table: TensorTable,
        step: int | None,
        meta: Mapping[str, str],
        attachments: Mapping[str, bytes] | None,
        *,
        owned: bool = True,
    ) -> Version:
        try:
            self._advice.check_finite(state)
            version = self._appender.append(state, table, step=step, meta=meta, attachments=attachments, owned=owned)
        except BaseException as error:
            self._last_error = error
            if not isinstance(error, Fenced):
                emit(self._on_event, "publish-failed", step=step, error=type(error).__name__, reason=str(error))
            raise
        self._advice.after(version, table)
        return version

    def _recycle(self, arrays: Arrays) -> None:
        if self._background is not None:
            self._background.recycle(arrays)
        elif self._casting.is_given:
            self._spare = arrays

    def _collect_garbage(self) -> None:
        assert self._options.auto_collect is not None
        collect(self._store, grace=self._options.auto_collect, log=self._new_log(), on_event=self._on_event)

    def _new_log(self) -> ChainLog:
        """The chain as a collector reads it, beside the publisher's own look at it."""
        return ChainLog(self._store, run=self._writer.run.run, trusted_keys=self._options.accepted_keys)

    def _check_open(self) -> None:
        if self._closed:
            raise PublisherClosed("the publisher was closed.")

"""The work that only the first process does: it reads and writes all records. It gives the other processes plain JSON."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from ...chain.log import ChainLog
from ...chain.maintenance.collect import collect
from ...chain.routes.remaining_routes import Routes
from ...chain.routes.restore import Hop
from ...chain.routes.walk_route import HopFailed
from ...errors import ChainBroken, CommitOutcomeUnknown, CorruptRecord, DeltawireError, Fenced
from ...events import OnEvent, emit
from ...format.digest import Digest
from ...format.records.record_parts import CommitRef, FileEntry, RecipeRecord
from ...format.records.version_records import Commit
from ...store import Store
from ..commits import Attempt, emit_published
from ..history import versions_of
from ..quantising import QuantisedConfig, Quantising
from ..resume import cost_of, read_table, require_route, version_commit
from ..shortcuts.cadence import ChainCost, Speed, anchor_due
from ..shortcuts.compose import Composition
from ..shortcuts.made_shortcuts import MadeShortcuts
from ..shortcuts.shortcut_writer import ShortcutWriter
from ..take_over import TakeOver
from ..upload.announcer import Announcer
from ..upload.data_objects import DataLocation, upload_list
from ..upload.segments import TensorTable
from ..writer_options import WriterOptions
from .announcing import Aim
from .checkpoint import SharedCheckpoint
from .division import Division, Parts
from .parts_source import PartsSource
from .ranks import Ranks, by_first_rank
from .resume import plain_hop


@dataclass(frozen=True, slots=True)
class PartsPublication:
    """One call of `publish`, which will become a version: the parts of this process, and everything that goes with them.

    Only the first process's `step`, `meta` and `attachments` count.
    """

    division: Division
    make_parts: Callable[[Parts | None], PartsSource]
    """Returns the parts of this process. It is given those of the version before, if a recipe made them whose scales may stay."""
    step: int | None
    meta: Mapping[str, str]
    attachments: Mapping[str, bytes] | None
    """The files of the version, by name. None: the version keeps the files of the one before."""
    recipe: RecipeRecord | None = None
    """How the weights are quantised. None: they are not."""


class FirstRank:
    """Commits the versions that all processes have uploaded. Opening it takes the chain over, as opening a `Publisher` does.

    Parameters
    ----------
    store
        The location of the chain.
    pool
        Uploads attachments.
    run
        The name of a new run, or the run that must be at the store.
    options
        The options of the writer.
    resume_from_seq
        The seq of the version to go back to. None: the newest.
    starts_full
        The first version is a full checkpoint, so the newest version need not be readable.
    has_attachments
        Whether the publisher was given attachments. If not, the files of the version before stay.
    given
        The attachments, by name.
    quantising
        How the weights are quantised. None: they are not.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        store: Store,
        pool: Executor,
        run: str | None,
        options: WriterOptions,
        *,
        resume_from_seq: int | None,
        starts_full: bool,
        has_attachments: bool,
        given: Mapping[str, bytes],
        quantising: Quantising | None,
        on_event: OnEvent | None,
    ) -> None:
        chain = TakeOver(store, run, options, files=given, keeps_others=not has_attachments, resume_from_seq=resume_from_seq)
        if chain.start is not None and (not starts_full or resume_from_seq is not None):
            require_route(chain.log, chain.start)
        chain.require_files()
        self.table_before = None if chain.start is None else read_table(chain.log, chain.start)
        """The tensors of the version that the first publication follows. None if they are unknown."""
        self.recipe_before = None if chain.start is None else chain.start.recipe
        """How the version that the first publication follows was quantised."""
        self.config = QuantisedConfig(quantising, None if has_attachments else chain)
        self._log = chain.log
        self._writer = chain.fence()
        self._store = store
        self._pool = pool
        self._shortcuts = ShortcutWriter(store, pool, self._writer.run, self._writer.epoch, options)
        self._made = MadeShortcuts()
        self.announcer = Announcer(store, pool, self._writer.run.id, self._writer.epoch, options.signing_key)
        self._anchoring = threading.Event()
        """Set while an anchor is being made, or waits to be. There is one at a time."""
        self._options = options
        self._on_event = on_event
        self._keeps_attachments = not has_attachments
        self._attempt: Attempt | None = None
        self._hops: list[Hop] = []
        self._routes = Routes(self._log, on_event=on_event)
        self._speed = Speed()
        self._cost = ChainCost()
        self._not_before = 0
        self._commit = self._writer.in_force
        self._must_rewind = resume_from_seq is not None and (self._commit is None or self._commit.seq != resume_from_seq)
        """Whether `_commit` is an older version than the newest one, so that a rewind must come first."""
        if self._must_rewind:
            assert resume_from_seq is not None
            self._commit = version_commit(self._log, self._writer.fence, resume_from_seq)
        self._attached = chain.attached(self._writer, on_event)

    def opening(self) -> dict[str, Any]:
        """Return what the other processes need to know from the start."""
        limits = self._writer.run.limits
        return {
            "epoch": self._writer.epoch,
            "id": self._writer.run.id,
            "limits": [limits.state_bytes, limits.tensors, limits.file_bytes],
            "commit": None if self._commit is None else self._commit.to_bytes().decode(),
            "rewind": self._must_rewind,
        }

    @property
    def aim(self) -> Aim:
        """The commit that the next delta builds on, and the number of its own commit."""
        return self._writer.tip, self._writer.next_seq

    def settle(self, table: TensorTable | None) -> dict[str, Any]:
        """Find out whether the last commit landed, if that is unknown. Returns its record if it did, and the seq of the next commit."""
        self._writer.check_fenced()
        if table is not None:
            table.check_limits(self._writer.run.limits)
        landed = None if self._attempt is None else self._land(self._attempt)
        return {"landed": landed, "seq": self._writer.next_seq}

    def rewind(self) -> str | None:
        """Commit a rewind to the requested version, which was rebuilt before. Returns the record.

        Returns None if the data that it was rebuilt from are marked for deletion. A slow collector may be about to delete them, so the next
        version must be a full checkpoint instead.
        """
        assert self._commit is not None
        mark = self._log.mark()
        if mark is not None and min(hop.target.seq for hop in self._hops) <= mark.floor:
            return None
        self._attempt = self._writer.propose(
            "rewind",
            base=self._log.ref(self._commit),
            digest=self._commit.digest,
            state_bytes=self._commit.state_bytes,
            tensors=self._commit.tensors,
            attachments=self._attached.at(self._commit).upload(self._location(), None),
            step=self._commit.step,
            meta=self._commit.meta,
            recipe=self._commit.recipe,
        )
        return self._land(self._attempt)

    def commit_delta(self, publication: PartsPublication, files: Sequence[FileEntry], difference: Digest, changed: int) -> dict[str, Any]:
        """Commit a delta over the newest version. Returns its record, and whether an anchor must be made now."""
        table = publication.division.table
        assert self._commit is not None
        assert self._commit.digest is not None
        assert not self._must_rewind
        self._attempt = self._writer.propose(
            "delta",
            base=self._writer.tip,
            digest=self._commit.digest + difference,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            changed=changed,
            files=files,
            file_list=upload_list(self._store, files),
            attachments=self._attached.upload(self._location(), publication.attachments),
            step=publication.step,
            meta=publication.meta,
            recipe=publication.recipe,
        )
        return self._committed()

    def commit_checkpoint(self, publication: PartsPublication, files: Sequence[FileEntry], digest: Digest) -> dict[str, Any]:
        """Commit a full checkpoint. Returns the same as `commit_delta`."""
        table, attachments = publication.division.table, publication.attachments
        attached = self._attached
        if self._must_rewind:  # it replaces a rewind (see `rewind`), so files of abandoned versions do not stay
            assert self._commit is not None
            attached = self._attached.at(self._commit)
            if self._keeps_attachments:
                attachments = _overlaid(attached.contents(), attachments or {})
        self._attempt = self._writer.propose(
            "anchor",
            base=None,
            digest=digest,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            files=files,
            file_list=upload_list(self._store, files),
            attachments=attached.upload(self._location(), attachments, anew=True),
            step=publication.step,
            meta=publication.meta,
            recipe=publication.recipe,
        )
        return self._committed()

    # On the thread that makes shortcuts

    def record_skip(self, skip: Composition, updates: int, table: TensorTable, files: tuple[FileEntry, ...]) -> None:
        """Write the record of an uploaded skip to the version with the number `updates`."""
        self._shortcuts.record_skip(skip.base, skip.target, table, files)
        size, versions = sum(entry.size for entry in files), versions_of(skip.level)
        self._made.add_skip(updates, size, versions)
        emit(self._on_event, "skip-made", seq=skip.target.seq, base=skip.base.seq, versions=versions, bytes=size)

    def skip_failed(self, seq: int, error: BaseException) -> None:
        """Report that a skip could not be made."""
        emit(self._on_event, "shortcut-failed", kind="skip", seq=seq, reason=str(error))

    def record_anchor(self, target: CommitRef, updates: int, table: TensorTable, done: SharedCheckpoint) -> None:
        """Write the record of an uploaded anchor of the version with the number `updates`."""
        self._shortcuts.record_anchor(target, table, done.files)
        size = sum(entry.size for entry in done.files)
        self._made.add_anchor(updates, done.sent, done.seconds)
        emit(self._on_event, "anchored", seq=target.seq, bytes=size, upload_seconds=done.seconds)

    def anchor_failed(self, seq: int, updates: int, error: BaseException) -> None:
        """Report that an anchor could not be made. It is tried again some versions later."""
        self._not_before = updates + self._options.anchor_policy.min_versions
        emit(self._on_event, "shortcut-failed", kind="anchor", seq=seq, reason=str(error))

    def anchor_ended(self) -> None:
        """Allow the next anchor."""
        self._anchoring.clear()

    def collect_garbage(self, seq: int) -> None:
        """Collect garbage after an anchor of version `seq`, if `auto_collect` is set."""
        if self._options.auto_collect is None:
            return
        log = ChainLog(self._store, run=self._writer.run.run, trusted_keys=self._options.accepted_keys)
        try:
            collect(self._store, grace=self._options.auto_collect, log=log, on_event=self._on_event)
        except DeltawireError as error:
            emit(self._on_event, "shortcut-failed", kind="collection", seq=seq, reason=str(error))

    # On the thread that publishes

    def observe(self, *, sent: int, seconds: float, scanned: int = 0, scan_seconds: float = 0.0) -> None:
        """Note how fast this process was. Anchors are timed by it."""
        self._speed = self._speed.observe(sent=sent, send_seconds=seconds, scanned=scanned, scan_seconds=scan_seconds)

    def forget_failures(self) -> None:
        """Use all hops again: data that were damaged may have been repaired since."""
        self._routes = Routes(self._log, on_event=self._on_event)

    def find_route(self) -> list[dict[str, Any]]:
        """Return the hops, as JSON, that lead from nothing to the newest version. Raises as `Routes.find` does."""
        if self._commit is None:
            raise ChainBroken("there is no version to rebuild.")
        self._hops = [hop for hop in self._routes.find(None, self._commit) if hop.files]
        self._cost = cost_of(self._hops, self._commit)
        return [plain_hop(hop) for hop in self._hops]

    def avoid(self, failure: HopFailed) -> None:
        """Leave this hop out of all later routes."""
        self._routes.avoid(failure)

    def _location(self) -> DataLocation:
        return DataLocation(self._store, self._pool, self._writer.epoch, self._writer.next_seq)

    def _committed(self) -> dict[str, Any]:
        assert self._attempt is not None
        record = self._land(self._attempt)
        commit = self._commit
        assert commit is not None
        self._speed = self._made.count(commit.updates, self._cost, self._speed)
        due = anchor_due(self._options.anchor_policy, self._cost, commit.state_bytes, self._speed)
        begins = due and commit.updates >= self._not_before and not self._anchoring.is_set()
        if begins:
            self._anchoring.set()
        return {"record": record, "anchor": begins}

    def _land(self, attempt: Attempt) -> str:
        start = time.perf_counter()
        try:
            self._writer.land(attempt)
        except (CommitOutcomeUnknown, CorruptRecord):
            raise  # the record that was read may be our own, damaged in transit: ask again
        except Exception as error:
            self._attempt = None
            if isinstance(error, Fenced):
                emit(self._on_event, "fenced", epoch=self._writer.epoch, reason=str(error))
            raise
        self._attempt = None
        self._take(attempt.commit, time.perf_counter() - start)
        self._writer.put_head()
        return attempt.data.decode()

    def _take(self, commit: Commit, seconds: float) -> None:
        self._commit = commit
        self._attached.took(commit)
        self._must_rewind = False
        if commit.kind == "anchor":
            self._cost = ChainCost()
        else:
            self._cost.add_update(commit.stored_bytes)
        emit_published(self._on_event, commit, commit_seconds=seconds)


def ask_first_rank(ranks: Ranks, first: FirstRank | None, work: Callable[[FirstRank], Any]) -> Any:
    """Do something with `first` in the first process, and return the result in all. All processes call it at the same time."""

    def do() -> Any:
        assert first is not None
        return work(first)

    return by_first_rank(ranks, do)


def _overlaid(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of `base`, replaced by those of `files` that have the same name. Upper and lower case do not count."""
    replaced = {name.casefold() for name in files}
    return {**{name: data for name, data in base.items() if name.casefold() not in replaced}, **files}

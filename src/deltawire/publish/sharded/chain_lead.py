"""What only the first process does: it alone reads and writes records. Everything it gives the others is plain JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from ...chain.log import ChainLog
from ...chain.maintenance.collect import collect
from ...chain.restore import Hop, Way, find_route
from ...errors import ChainBroken, CommitOutcomeUnknown, CorruptRecord, DeltawireError, Fenced
from ...events import OnEvent, emit
from ...format.digest import Digest
from ...format.records.chain_records import Commit, FileEntry
from ...store import Store
from ..commits import Attempt, emit_published
from ..history import span_of
from ..resume import cost_of, require_way, version_commit
from ..shortcuts.cadence import ChainCost, Speed, anchor_due
from ..shortcuts.compose import Composition
from ..shortcuts.shortcut_writer import ShortcutWriter
from ..take_over import TakeOver
from ..upload.data_objects import DataPlace
from ..upload.segments import TensorTable
from ..writer_options import WriterOptions


class ChainLead:
    """Commits for all. Opening one takes the chain over, as opening a `Publisher` does."""

    def __init__(
        self,
        store: Store,
        pool: Executor,
        run: str | None,
        options: WriterOptions,
        *,
        resume_from: int | None,
        starts_full: bool,
        has_attachments: bool,
        given: Mapping[str, bytes],
        on_event: OnEvent | None,
    ) -> None:
        chain = TakeOver(store, run, options, files=given, keeps_others=not has_attachments, resume_from=resume_from)
        if chain.start is not None and (not starts_full or resume_from is not None):
            require_way(chain.log, chain.start)
        chain.require_files()
        self._log = chain.log
        self._writer = chain.fence()
        self._store = store
        self._pool = pool
        self._shortcuts = ShortcutWriter(store, pool, self._writer.run, self._writer.epoch, options)
        self._options = options
        self._on_event = on_event
        self._keeps_attachments = not has_attachments
        self._attempt: Attempt | None = None
        self._hops: list[Hop] = []
        self._without: set[Way] = set()
        self._speed = Speed()
        self._cost = ChainCost()
        self._not_before = 0
        self._commit = self._writer.in_force
        self._is_to_rewind = resume_from is not None and (self._commit is None or self._commit.seq != resume_from)
        """Whether `_commit` is not what the chain's head leaves in force, but an older version, which is to be taken up first."""
        if self._is_to_rewind:
            assert resume_from is not None
            self._commit = version_commit(self._log, self._writer.fence, resume_from)
        self._attached = chain.attached(self._writer, on_event)

    def opening(self) -> dict[str, Any]:
        """What the others have to know from the start."""
        limits = self._writer.run.limits
        return {
            "epoch": self._writer.epoch,
            "id": self._writer.run.id,
            "limits": [limits.state_bytes, limits.tensors, limits.file_bytes],
            "commit": None if self._commit is None else self._commit.to_bytes().decode(),
            "rewind": self._is_to_rewind,
        }

    def settle(self, table: TensorTable | None) -> dict[str, Any]:
        """Find out what became of the last commit, if that is open: its record if it landed. And the slot that the next one aims at."""
        self._writer.check_fenced()
        if table is not None:
            table.check_limits(self._writer.run.limits)
        landed = None if self._attempt is None else self._land(self._attempt)
        return {"landed": landed, "seq": self._writer.next_seq}

    def rewind(self) -> str | None:
        """Go back to the version that was asked for, of which it is known by now that it can be rebuilt. Returns the record.

        None where what it was rebuilt from is announced to go: a collector that hung may be about to delete it, so the head cannot rest on
        it, and the next version has to be a checkpoint.
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
            attachments=self._attached.at(self._commit).upload(self._place(), None),
            step=self._commit.step,
            meta=self._commit.meta,
        )
        return self._land(self._attempt)

    def commit_delta(
        self,
        table: TensorTable,
        files: Sequence[FileEntry],
        difference: Digest,
        changed: int,
        step: int | None,
        meta: Mapping[str, str],
        attachments: Mapping[str, bytes] | None,
    ) -> dict[str, Any]:
        """Commit a delta over the version at the head. Returns its record, and whether an anchor is due."""
        assert self._commit is not None
        assert self._commit.digest is not None
        assert not self._is_to_rewind
        self._attempt = self._writer.propose(
            "delta",
            base=self._writer.tip,
            digest=self._commit.digest + difference,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            changed=changed,
            files=files,
            attachments=self._attached.upload(self._place(), attachments),
            step=step,
            meta=meta,
        )
        return self._committed()

    def commit_checkpoint(
        self,
        table: TensorTable,
        files: Sequence[FileEntry],
        digest: Digest,
        step: int | None,
        meta: Mapping[str, str],
        attachments: Mapping[str, bytes] | None,
    ) -> dict[str, Any]:
        """Commit a whole checkpoint. Returns as `commit_delta` does."""
        attached = self._attached
        if self._is_to_rewind:  # it stands in for a rewind to a version whose data are announced to go: others' files do not stay
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
            attachments=attached.upload(self._place(), attachments, anew=True),
            step=step,
            meta=meta,
        )
        return self._committed()

    def record_skip(self, skip: Composition, table: TensorTable, files: tuple[FileEntry, ...]) -> bool:
        """Make an uploaded skip to the version at the head known. Returns whether an anchor is due all the same."""
        self._shortcuts.record_skip(skip.base, skip.target, table, files)
        size, span = sum(entry.size for entry in files), span_of(skip.level)
        self._cost.add_skip(span, size)
        emit(self._on_event, "skip-made", seq=skip.target.seq, base=skip.base.seq, span=span, bytes=size)
        return self._anchor_due()

    def skip_failed(self, error: DeltawireError) -> None:
        """A skip could not be made: that costs readers a detour."""
        assert self._commit is not None
        emit(self._on_event, "shortcut-failed", kind="skip", seq=self._commit.seq, reason=str(error))

    def record_anchor(self, table: TensorTable, files: tuple[FileEntry, ...]) -> None:
        """Make an uploaded checkpoint of the version at the head known, and collect garbage if that is asked for."""
        assert self._commit is not None
        self._shortcuts.record_anchor(self._log.ref(self._commit), table, files)
        self._cost.anchored()
        emit(self._on_event, "anchored", seq=self._commit.seq, bytes=sum(entry.size for entry in files))
        if self._options.auto_collect is not None:
            log = ChainLog(self._store, run=self._writer.run.run, trusted_keys=self._options.accepted_keys)
            try:
                collect(self._store, grace=self._options.auto_collect, log=log, on_event=self._on_event)
            except DeltawireError as error:
                emit(self._on_event, "shortcut-failed", kind="collection", seq=self._commit.seq, reason=str(error))

    def anchor_failed(self, error: DeltawireError) -> None:
        """An anchor could not be made: that costs readers a detour, and is tried again some versions later."""
        assert self._commit is not None
        self._not_before = self._commit.updates + self._options.anchor_policy.min_versions
        emit(self._on_event, "shortcut-failed", kind="anchor", seq=self._commit.seq, reason=str(error))

    def observe(self, *, sent: int, seconds: float, scanned: int = 0, scan_seconds: float = 0.0) -> None:
        """How fast this process was: what anchors are timed by."""
        self._speed = self._speed.observe(sent=sent, send_seconds=seconds, scanned=scanned, scan_seconds=scan_seconds)

    def route(self, failed: int | None) -> list[list[dict[str, Any]]]:
        """The files of each hop to the version at the head, from nothing; without the hop of the last route that has `failed`."""
        if failed is None:
            self._without.clear()
        else:
            self._without.add(self._hops[failed].way)
        if self._commit is None:
            raise ChainBroken("there is no version to take up.")
        self._hops = [hop for hop in find_route(self._log, None, self._commit, without=self._without) if hop.files]
        self._cost = cost_of(self._hops, self._commit)
        return [[entry.plain() for entry in hop.files] for hop in self._hops]

    def _place(self) -> DataPlace:
        return DataPlace(self._store, self._pool, self._writer.epoch, self._writer.next_seq)

    def _committed(self) -> dict[str, Any]:
        assert self._attempt is not None
        record = self._land(self._attempt)
        return {"record": record, "anchor": self._anchor_due()}

    def _anchor_due(self) -> bool:
        assert self._commit is not None
        due = anchor_due(self._options.anchor_policy, self._cost, self._commit.state_bytes, self._speed)
        return due and self._commit.updates >= self._not_before

    def _land(self, attempt: Attempt) -> str:
        start = time.perf_counter()
        try:
            self._writer.land(attempt)
        except (CommitOutcomeUnknown, CorruptRecord):
            raise  # what was read back may be our own commit, damaged on the way: ask again
        except Exception as error:
            self._attempt = None
            if isinstance(error, Fenced):
                emit(self._on_event, "fenced", epoch=self._writer.epoch, reason=str(error))
            raise
        self._attempt = None
        self._take(attempt.commit, time.perf_counter() - start)
        self._writer.announce()
        return attempt.data.decode()

    def _take(self, commit: Commit, seconds: float) -> None:
        self._commit = commit
        self._attached.took(commit)
        self._is_to_rewind = False
        if commit.kind == "anchor":
            self._cost = ChainCost()
        else:
            self._cost.add_update(commit.stored_bytes)
        emit_published(self._on_event, commit, commit_seconds=seconds)


def _overlaid(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of `base`, with those in `files` instead of files that have the same name but for upper and lower case."""
    replaced = {name.casefold() for name in files}
    return {**{name: data for name, data in base.items() if name.casefold() not in replaced}, **files}

"""Append a version: encode it, upload it, commit it, and only then move the baseline (docs/protocol.md §4).

One thread works here at a time. Every step may be interrupted: by an error, by Ctrl-C, or because the store does not answer. The next call
then first finds out what the chain holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from ..chain.version import Version
from ..errors import ChainBroken, CommitOutcomeUnknown, CorruptRecord, DeltaError, Fenced, PublishError, StateError
from ..events import OnEvent, emit
from ..format.digest import Digest
from ..format.records.record_parts import CommitRef, RecipeRecord
from ..format.records.version_records import Commit
from ..quantise import QuantisedLayout
from ..quantise.encode_with_codes import ReusedMemory
from ..tensors.bits import State
from ..tensors.columns import in_columns
from .attachments.stored_files import AttachedFiles
from .baseline import Baseline
from .batches import cut_for_gpu
from .commits import Attempt, ChainWriter, emit_published
from .publication import Publication
from .publish_warnings import continues
from .quantising import SegmentsOf, quantise, quantise_segments
from .resume import Resumed, read_state, version_commit
from .shortcuts.cadence import ChainCost, Speed
from .snapshots import Arrays, SnapshotMemory, copy_tensors, new_arrays
from .upload.announcer import Announcer
from .upload.checkpoint_files import lay_out
from .upload.data_objects import DataLocation, upload_checkpoint, upload_update
from .upload.segments import Segment, TensorTable, cut_segments, part_of_state
from .writer_options import WriterOptions


@dataclass(slots=True)
class Unsettled:
    """A commit whose outcome is not known yet, with everything that is needed to move the baseline if it landed."""

    attempt: Attempt
    digest: Digest
    deltas: Mapping[int, bytes] | None
    """The deltas by segment. None for a full checkpoint."""
    state: State | None
    """The caller's state. It is dropped when the call ends."""
    arrays: Arrays | None
    """The publisher's own copy of the state, if it has one."""
    make_reverse: Callable[[], Mapping[int, bytes]] | None = None
    """Returns the deltas back by segment, if they are wanted. It reads the caller's state, so it is dropped when the call ends."""
    seconds: dict[str, float] = field(default_factory=dict)
    reverse: Mapping[int, bytes] | None = None
    """The deltas back, once they are made."""

    def encode_back(self) -> None:
        """Make the deltas back, if they are wanted and not made yet."""
        if self.make_reverse is not None:
            self.reverse, self.make_reverse = self.make_reverse(), None


class Appender:
    """Appends states to the chain of a `ChainWriter`, and moves the baseline along. One thread uses it at a time.

    Parameters
    ----------
    writer
        The writer that has taken the chain over.
    attached
        The attachments in force, which names those of each further version.
    pool
        Uploads data objects.
    memory
        Receives the memory of states that are no longer needed.
    options
        The options of the writer.
    starts_full
        Make the first version a full checkpoint. The newest version need not be read back then.
    on_event
        Receives the events.
    """

    def __init__(
        self,
        writer: ChainWriter,
        attached: AttachedFiles,
        pool: Executor,
        memory: SnapshotMemory,
        options: WriterOptions,
        *,
        starts_full: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        self._writer = writer
        self._log = writer.log
        self._attached = attached
        self._pool = pool
        self._memory = memory
        self._options = options
        self._threads = options.threads
        self._starts_full = starts_full
        self._on_event = on_event
        self._unsettled: Unsettled | None = None
        self._announcer = Announcer(writer.store, pool, writer.run.id, writer.epoch, options.signing_key)
        self.baseline: Baseline | None = None
        self.version = None if writer.in_force is None else Version.of(writer.in_force)
        self.cost = ChainCost()
        self.speed = Speed()

    def resume(self, seq: int | None = None, ready: Resumed | None = None) -> None:
        """Rebuild the baseline from the store: that of the newest version, or of an older version `seq`, to which the chain is rewound.

        `ready` is a state that was read before the chain was taken over. Only versions after it are read again.
        """
        if seq is not None and (self.version is None or seq != self.version.seq):
            self._rewind(seq, ready)
        elif self.version is not None:
            self._rebuild(self.version.seq, ready)

    def append(self, publication: Publication) -> Version:
        """Append a state to the chain and return its version, which readers can see by then. An owned state may become the baseline.

        If it raises `CommitOutcomeUnknown`, the version may be in the chain; the next call finds out. After any other error it is not.
        """
        began = time.perf_counter()
        self.check_limits(publication.table)
        self.settle()
        try:
            self._unsettled = unsettled = self._delta(publication) or self._checkpoint(publication, self._attached)
            unsettled.seconds["before_commit"] = time.perf_counter() - began
            self.settle()
        except CommitOutcomeUnknown:
            if self._unsettled is not None:
                self._unsettled.encode_back()  # the caller's state may have changed when the outcome is known
            raise
        finally:
            self._announcer.end()
            if self._unsettled is not None:
                self._unsettled.state = self._unsettled.make_reverse = None
        assert self.version is not None
        return self.version

    def check_limits(self, table: TensorTable) -> None:
        """Raise `LimitExceeded` if this run does not allow such a state."""
        table.check_limits(self._writer.run.limits)

    def settle(self) -> None:
        """Find out whether the last commit landed, if that is unknown, and move the baseline then. Raises as `ChainWriter.land` does."""
        unsettled = self._unsettled
        if unsettled is None:
            return
        start = time.perf_counter()
        try:
            self._writer.land(unsettled.attempt)
        except (CommitOutcomeUnknown, CorruptRecord):
            raise  # the record that was read may be our own, damaged in transit: ask again
        except Exception as error:
            self._unsettled = None
            if isinstance(error, Fenced):
                emit(self._on_event, "fenced", epoch=self._writer.epoch, reason=str(error))
            raise
        unsettled.seconds["commit"] = time.perf_counter() - start
        if self.version is None or self.version.seq != unsettled.attempt.commit.seq:
            self._move(unsettled)
        self._unsettled = None
        self._writer.put_head()

    @property
    def in_doubt(self) -> str | None:
        """The name of the version whose commit may or may not have landed. None if there is none."""
        if self._unsettled is None:
            return None
        commit = self._unsettled.attempt.commit
        return f"commit {commit.seq}" if commit.step is None else f"step {commit.step}"

    def needs(self, state: State) -> bool:
        """Tell whether memory of an owned state is still needed: by the baseline, or by a commit whose outcome is unknown."""
        ours = [self._unsettled.arrays if self._unsettled else None, self.baseline.arrays if self.baseline else None]
        return any(kept is not None and kept.keys() == state.keys() and all(kept[n] is state[n] for n in kept) for kept in ours)

    def previous(self, recipe: RecipeRecord | None) -> State | None:
        """Return the tensors of the newest version, whose scales may stay. None if there are none, or another recipe made them.

        A version whose commit is in doubt counts: either it is in the chain, or it is committed before the next one.
        """
        unsettled = self._unsettled
        if recipe is not None and unsettled is not None and unsettled.arrays is not None:
            return unsettled.arrays if continues(recipe, unsettled.attempt.commit.recipe) else None
        baseline, version = self.baseline, self.version
        if recipe is None or baseline is None or not baseline.intact or version is None:
            return None
        return baseline.arrays if continues(recipe, version.recipe) else None

    def _delta(self, publication: Publication) -> Unsettled | None:
        """Encode and upload a delta over the baseline, and propose its commit. Returns None if a full checkpoint is needed instead."""
        state, table, layout = publication.weights, publication.table, publication.layout
        if self._starts_full or self.version is None or not continues(publication.recipe, self.version.recipe):
            return None
        for _ in range(2):
            baseline = self._sound_baseline()
            if baseline is None or baseline.table != table:
                return None
            baseline.move_to_device(publication.located, self._memory.device)
            wants_reverse = layout is not None and baseline.needs_reverse(remember=self._options.skips)
            announces = self._options.announce and len(baseline.segments) > 1
            if announces:
                self._announcer.begin(self._writer.tip, self._writer.next_seq)
            update = upload_update(
                self._location(),
                baseline,
                state,
                self._threads,
                limit=table.state_bytes,
                segments_of=None if layout is None else self._quantised(publication, layout, baseline.segments, keeps_codes=wants_reverse),
                batches=cut_for_gpu(publication, baseline.arrays, baseline.segments),
                wants_reverse=wants_reverse,
                uploaded=self._announcer.add if announces else None,
            )
            if update is None:
                return None
            if update.before == baseline.digest:
                break
            baseline.intact = False  # a bit in memory has flipped; the store has the right weights, so read them back
        else:
            raise PublishError("the publisher's copy of the last version changed in memory, twice. Check the memory of this machine.")
        self.speed = self.speed.observe(
            sent=update.size, send_seconds=update.upload_seconds, scanned=table.state_bytes, scan_seconds=update.encode_seconds
        )
        attempt = self._writer.propose(
            "delta",
            base=self._writer.tip,
            digest=update.after,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            changed=update.changed,
            files=update.files,
            attachments=self._attached.upload(self._location(), publication.attachments),
            step=publication.step,
            meta=publication.meta,
            recipe=publication.recipe,
        )
        seconds = {
            "quantise": update.quantise_seconds,
            "encode": update.encode_seconds,
            "upload": update.upload_seconds,
            "wait": update.wait_seconds,
        }
        as_published = state if layout is None else None
        return Unsettled(attempt, update.after, update.deltas, as_published, _owned(publication), update.make_reverse, seconds)

    def _quantised(
        self, publication: Publication, layout: QuantisedLayout, segments: Sequence[Segment], *, keeps_codes: bool
    ) -> SegmentsOf:
        """Return a function that quantises segments to encode them. Their tensors are valid until the next call.

        `keeps_codes` is for a caller that also reads them afterwards.
        """
        memory = ReusedMemory()

        def make(indices: Sequence[int]) -> State:
            names = [name for index in indices for name in publication.table.names_of(segments[index])]
            previous = self.previous(publication.recipe)
            return quantise_segments(
                layout, names, publication.weights, previous, memory=memory, threads=self._threads, keeps_codes=keeps_codes
            )

        return make

    def _checkpoint(self, publication: Publication, attached: AttachedFiles) -> Unsettled:
        """Upload a full checkpoint, and propose its commit. Its attachments follow those of `attached`."""
        table = publication.table
        segments = cut_segments(table.sizes, segment_bytes=self._options.segment_bytes)
        arrays = _owned(publication)
        start = time.perf_counter()
        if arrays is None:
            arrays = new_arrays(table, publication.located, self._memory.device)
            if publication.layout is None:
                copy_tensors(publication.weights, arrays)
            else:
                previous = self.previous(publication.recipe)
                for part in segments:
                    quantise(publication.layout, table.names_of(part), publication.weights, previous, arrays, threads=self._threads)
        quantising = 0.0 if publication.layout is None else time.perf_counter() - start
        own = in_columns(arrays)
        layout = lay_out(table, segments, shard_bytes=self._options.shard_bytes)

        def segment(index: int) -> State:
            return part_of_state(own, table, segments[index])

        done = upload_checkpoint(self._location(), layout, segment, self._threads)
        self.speed = self.speed.observe(sent=done.size, send_seconds=done.seconds)
        attempt = self._writer.propose(
            "anchor",
            base=None,
            digest=done.digest,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            files=done.files,
            attachments=attached.upload(self._location(), publication.attachments, anew=True),
            step=publication.step,
            meta=publication.meta,
            recipe=publication.recipe,
        )
        seconds = {"quantise": quantising, "encode": 0.0, "upload": done.seconds}
        return Unsettled(attempt, done.digest, None, None, arrays, None, seconds)

    def _move(self, landed: Unsettled) -> None:
        """Move the baseline to a commit that has landed."""
        commit, at = landed.attempt.commit, landed.attempt.ref
        baseline = self.baseline
        if landed.deltas is None:
            assert landed.arrays is not None
            self._starts_full = False
            old = None if baseline is None else baseline.arrays
            self._take(landed.arrays, at, landed.digest)
            self.cost = ChainCost()
            if old is not None:
                self._memory.give_back(old)
        else:
            if baseline is not None and baseline.intact and baseline.at != at:
                self._move_by(landed, baseline, at)
            self.cost.add_update(commit.stored_bytes)
        self.version = Version.of(commit)
        self._attached.took(commit)
        self._report(commit, landed.seconds)

    def _move_by(self, landed: Unsettled, baseline: Baseline, at: CommitRef) -> None:
        assert landed.deltas is not None
        size = landed.attempt.commit.stored_bytes
        if landed.arrays is not None:
            self._memory.give_back(
                baseline.move_by_swap(landed.arrays, landed.deltas, at, landed.digest, size, remember=self._options.skips)
            )
        elif landed.state is not None:
            baseline.move_by_copy(landed.state, landed.deltas, at, landed.digest, size, remember=self._options.skips)
        else:
            landed.encode_back()
            with contextlib.suppress(DeltaError, StateError):  # the baseline is not intact then, and is rebuilt before its next use
                baseline.move_by_deltas(landed.deltas, at, landed.digest, landed.reverse, size)

    def _report(self, commit: Commit, seconds: Mapping[str, float]) -> None:
        phases = {f"{phase}_seconds": seconds.get(phase, 0.0) for phase in ("quantise", "encode", "upload", "wait", "commit")}
        emit_published(self._on_event, commit, **phases, total_seconds=seconds.get("before_commit", 0.0) + seconds.get("commit", 0.0))

    def _sound_baseline(self) -> Baseline | None:
        """Return the baseline, rebuilt from the store if a move was interrupted. None if nothing is published yet."""
        if self.version is not None and (self.baseline is None or not self.baseline.intact):
            self._rebuild(self.version.seq)
        return self.baseline

    def _rebuild(self, seq: int, ready: Resumed | None = None) -> None:
        commit = self._log.read(seq)
        if commit is None or commit.digest is None:
            raise ChainBroken(f"commit {seq} has disappeared from the chain at {self._log.store.url}.")
        resumed = read_state(self._log, commit, start=ready, threads=self._threads, on_event=self._on_event)
        self._take(resumed.arrays, self._log.ref(commit), commit.digest)
        self.cost = resumed.cost

    def _rewind(self, seq: int, ready: Resumed | None) -> None:
        commit = version_commit(self._log, self._writer.fence, seq)
        assert commit.digest is not None  # only the fence of an empty chain has none
        resumed = read_state(self._log, commit, start=ready, threads=self._threads, on_event=self._on_event)
        mark = self._log.mark()
        if mark is not None and resumed.lowest <= mark.floor:
            # Its data are marked for deletion, and a slow collector may be about to delete them. So make a full checkpoint instead.
            attached = self._attached.at(commit)  # files of the versions that are abandoned do not stay
            again = Publication(
                resumed.arrays, TensorTable.of(resumed.arrays), commit.step, commit.meta, attached.contents(), True, commit.recipe
            )
            self._unsettled = self._checkpoint(again, attached)
            self.settle()
            return
        attempt = self._writer.propose(
            "rewind",
            base=self._log.ref(commit),
            digest=commit.digest,
            state_bytes=commit.state_bytes,
            tensors=commit.tensors,
            attachments=self._attached.at(commit).upload(self._location(), None),
            step=commit.step,
            meta=commit.meta,
            recipe=commit.recipe,
        )
        self._writer.land(attempt)
        self._attached.took(attempt.commit)
        self._take(resumed.arrays, attempt.ref, commit.digest)
        self.cost = resumed.cost
        self.cost.add_update(0)
        self.version = Version.of(attempt.commit)
        self._report(attempt.commit, {})
        self._writer.put_head()

    def _take(self, arrays: Arrays, at: CommitRef, digest: Digest) -> None:
        """Make the baseline, or replace its state."""
        if self.baseline is None:
            self.baseline = Baseline(arrays, at, digest, threads=self._threads, segment_bytes=self._options.segment_bytes)
        else:
            self.baseline.replace(arrays, at, digest)

    def _location(self) -> DataLocation:
        return DataLocation(self._writer.store, self._pool, self._writer.epoch, self._writer.next_seq)


def _owned(publication: Publication) -> Arrays | None:
    """Return the weights if they are the publisher's own memory."""
    return dict(publication.weights) if publication.is_owned else None

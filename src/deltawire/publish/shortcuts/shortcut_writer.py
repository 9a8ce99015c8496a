"""Upload and record shortcuts through the chain: skips and anchors (docs/protocol.md §4)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ...errors import Fenced, ObjectMissing, ResultMismatch
from ...format.records.record_parts import CommitRef, FileEntry
from ...format.records.run_records import Run
from ...format.records.version_records import Shortcut
from ...store import keys
from ...store.base import Store
from ...store.create_rule import create_and_look
from ..upload.checkpoint_files import SegmentSource, lay_out
from ..upload.data_objects import DataLocation, Uploads, upload_checkpoint, upload_list
from ..upload.segments import Segment, TensorTable
from ..writer_options import WriterOptions


@dataclass(frozen=True, slots=True)
class Made:
    """A shortcut that readers can use now: its size, and how long its upload took."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ShortcutWriter:
    """Uploads the files of shortcuts and then creates their records. A failure leaves at most data that no record refers to."""

    store: Store
    pool: Executor
    run: Run
    epoch: int
    options: WriterOptions
    clock: Callable[[], float] = time.time

    def skip(
        self, base: CommitRef, target: CommitRef, deltas: Mapping[int, bytes], table: TensorTable, segments: Sequence[Segment]
    ) -> Made:
        """Make a skip: one delta from version `base` to version `target`, with one file for each segment."""
        location = DataLocation(self.store, self.pool, self.epoch, target.seq)
        uploads = Uploads(self.pool)
        try:
            for index, delta in sorted(deltas.items()):
                uploads.start_delta(location, delta, segments[index])
            files, seconds = uploads.finish()
        except BaseException:
            uploads.abandon()
            raise
        self.record_skip(base, target, table, files)
        return Made(sum(entry.size for entry in files), seconds)

    def record_skip(self, base: CommitRef, target: CommitRef, table: TensorTable, files: tuple[FileEntry, ...]) -> None:
        """Create the record of a skip from version `base` to version `target` whose files are uploaded."""
        self._create(keys.skip_key(target.seq, base.seq), self._record(base, target, table, files))

    def anchor(self, target: CommitRef, table: TensorTable, segments: Sequence[Segment], source: SegmentSource) -> Made:
        """Make an anchor: a full checkpoint of version `target`. Raises `ResultMismatch` if the source gives another state."""
        location = DataLocation(self.store, self.pool, self.epoch, target.seq)
        layout = lay_out(table, segments, shard_bytes=self.options.shard_bytes)
        done = upload_checkpoint(location, layout, source, self.options.threads)
        if done.digest != target.digest:
            raise ResultMismatch(f"the checkpoint of commit {target.seq} has the digest {done.digest}, not {target.digest}.")
        self.record_anchor(target, table, done.files)
        return Made(done.size, done.seconds)

    def record_anchor(self, target: CommitRef, table: TensorTable, files: tuple[FileEntry, ...]) -> None:
        """Create the record of an anchor of version `target` whose files are uploaded and checked."""
        self._create(keys.anchor_key(target.seq), self._record(None, target, table, files))

    def _record(self, base: CommitRef | None, target: CommitRef, table: TensorTable, files: tuple[FileEntry, ...]) -> Shortcut:
        listed = upload_list(self.store, files)
        record = Shortcut(
            id=self.run.id,
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            time=int(self.clock() * 1000),
            target=target,
            base=base,
            state_bytes=table.state_bytes,
            tensors=len(table.names),
            files=files if listed is None else (),
            file_list=listed,
        )
        key = self.options.signing_key
        return record if key is None else key.sign(record)

    def _is_claimed(self, epoch: int) -> bool:
        try:
            self.store.head(keys.epoch_key(epoch))
        except ObjectMissing:
            return False
        return True

    def _create(self, key: str, record: Shortcut) -> None:
        """Create the record of a shortcut. An existing record is fine, whichever writer made it.

        Raises `Fenced` if another publisher has taken over, because the uploaded files may have been collected by then. If this publisher
        is suspended after the check, the shortcut may refer to missing files. Readers avoid such a shortcut, and collection removes it.
        """
        if self._is_claimed(self.epoch + 1):
            raise Fenced(f"epoch {self.epoch + 1} has been claimed, so epoch {self.epoch} can make no more shortcuts.")
        create_and_look(self.store, key, record.to_bytes())

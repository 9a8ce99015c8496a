"""A replica in a mirror directory, which other processes may also read and update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...format.checkpoints.checkpoint import Checkpoint
from ...format.records.record_parts import FileEntry
from ...format.records.signing import check_signature
from ...format.records.version_records import Commit
from ..cache.delta_cache import DeltaCache
from ..seen import SeenFile
from ..sync_context import SyncContext
from .locks import FileLock
from .mirror import HeldSlot, Mirror
from .mirror_errors import as_mirror_errors, retryable_error
from .mirror_update import MirrorUpdate

_PAUSE = 0.05


class MirrorReplica:
    """The version that a mirror serves, as memory-mapped arrays. They do not change until the next `move` of this replica.

    Opening needs no store: the mirror's last version is served again if it is sound and, with `trusted_keys`, signed by one of them.
    """

    def __init__(self, path: Path, *, threads: int | None = None, trusted_keys: Collection[str] = ()) -> None:
        self._mirror = Mirror(path, threads=threads)
        self._channel: str | None = None
        self._trusted = frozenset(trusted_keys)
        self._held: HeldSlot | None = None
        self._leading: FileLock | None = None
        """Held by the one process that fetches files ahead of commits for all users of the mirror."""
        self._state: Mapping[str, NDArray[Any]] = {}
        self.seen = SeenFile(path)
        with as_mirror_errors(path):
            if self._mirror.run_id is not None:
                self._open()

    @property
    def run_id(self) -> str | None:
        """The run that is mirrored, or None before the first version."""
        return self._mirror.run_id

    @property
    def commit(self) -> Commit | None:
        return None if self._held is None else self._held.record.commit

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return self._state

    @property
    def slot_path(self) -> Path | None:
        """The directory of the present version: a complete checkpoint."""
        return None if self._held is None else self._held.slot.path

    @property
    def mirror(self) -> MirrorReplica:
        return self

    def hold(self) -> HeldSlot:
        """Hold the slot of the current version once more. Its files stay as they are until the caller releases it, even after `move`.

        There must be a current version.
        """
        assert self._held is not None
        return self._mirror.hold_again(self._held)

    def create(self, run_id: str) -> None:
        """Make the mirror, or check that it has this run."""
        with as_mirror_errors(self._mirror.path):
            self._mirror.create(run_id, self._channel)

    def bind(self, channel: str | None) -> None:
        """Follow a channel, or the newest version. Raises `MirrorError`, and releases the mirror, if it follows another one."""
        try:
            with as_mirror_errors(self._mirror.path):
                self._mirror.refuse_channel(channel)
        except BaseException:
            self.close()
            raise
        self._channel = channel

    def move(self, target: Commit, context: SyncContext) -> None:
        with as_mirror_errors(self._mirror.path):
            writer: FileLock | None = None
            watch = self._mirror.watch_writer()
            while writer is None:
                if self._adopt(target, context):
                    return
                writer = self._mirror.try_writer()
                if writer is None:
                    if context.is_halted():
                        raise retryable_error(f"{self._mirror.path}: stopped while another process updates the mirror.")
                    watch.check()
                    time.sleep(_PAUSE)
            with writer, writer.showing_life():
                if not self._adopt(target, context):
                    had = self._held
                    update = MirrorUpdate(self._mirror, context.routes, context, context.report, on_event=context.on_event)
                    self._switch(update.run(target, replacing=had, check_wanted=context.check_wanted))
                    context.report.resynced &= had is not None

    def wants_ahead(self) -> bool:
        if self._leading is None:
            with contextlib.suppress(OSError):
                self._leading = self._mirror.try_leader()
        return self._leading is not None

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        """Put the files where every process that updates the mirror looks for them."""
        arrived = dict(files)
        with contextlib.suppress(OSError):  # such as a full disk: then they are fetched as usual
            writer = self._mirror.try_writer() if arrived else None
            if writer is not None:
                with writer:
                    deltas = DeltaCache(self._mirror.path / "deltas")
                    deltas.ensure(arrived, lambda missing: [(entry, arrived[entry]) for entry in missing])

    def close(self) -> None:
        """Release the slot. Do not use arrays from `state` afterwards."""
        if self._leading is not None:
            self._leading.release()
            self._leading = None
        if self._held is not None:
            self._held.release()
            self._held = None
        self._state = {}

    def _open(self) -> None:
        held = self._mirror.open_current()
        if held is None:
            writer = self._mirror.try_writer()
            if writer is not None:  # otherwise another process is updating the mirror, and the first sync waits for it
                with writer, writer.showing_life():
                    held = self._mirror.recover()
        if held is not None:
            try:
                check_signature(held.record.commit, self._trusted)
            except BaseException:
                held.release()
                raise
            self._switch(held)

    def _adopt(self, target: Commit, context: SyncContext) -> bool:
        """Use the slot that is served, if another process has already brought it to the target."""
        name = self._mirror.current_name()
        record = None if name is None else self._mirror.slot(name).record()
        if record is None or not (record.seq == target.seq or (context.newest and record.seq > target.seq)):
            return False
        held = self._mirror.open_current()
        if held is None:
            return False
        try:
            context.vouch(held.record.ref)
        except BaseException:
            held.release()
            raise
        if not (held.record.seq == target.seq or (context.newest and held.record.seq > target.seq)):
            held.release()
            return False
        self._switch(held)
        return True

    def _switch(self, held: HeldSlot) -> None:
        try:
            state = Checkpoint(held.slot.path)
        except BaseException:
            held.release()
            raise
        old, self._held, self._state = self._held, held, state
        if old is not None:
            old.release()

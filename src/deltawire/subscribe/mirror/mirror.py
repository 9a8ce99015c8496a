"""A mirror: one version of a model as files in a directory, which any library can load at any time, and several processes can share.

    DIR/mirror.json          layout version, run id, and the channel that the mirror follows, if any
    DIR/current              link to the slot that is served; replaced atomically
    DIR/slots/NAME/          a complete checkpoint, and deltawire.json, which names its version
    DIR/locks/               `flock` files: `writer`, `ahead` (who fetches ahead of commits), and one per slot
    DIR/deltas/              delta files that the next update will need again
    DIR/seen.json            the newest commit seen, to notice a store that was set back
    DIR/FILE                 links to current/FILE, so that DIR itself loads as a checkpoint

**Readers and writers.** Readers of a slot share its lock. A writer holds it exclusively, and also holds `writer`, so there is one writer at
a time. The served slot is never changed: an update brings another slot to the new version and then moves `current`. A reader that keeps a
slot for long keeps exactly that version, and the mirror then has one slot more.

**Crashes.** A killed process loses its locks, but not what it wrote, because the page cache survives. A slot is marked as not clean before
the first byte is changed, and as clean after its digest was checked, so an interrupted slot is recognised and never becomes `current`. A
power failure is different: every update changes pages in all files, and flushing them each time would cost more than the update. So slots
record in which boot they were written (`boot_id`). A slot of an earlier boot, or on a system that cannot tell, is read completely and
compared with its digest before it is served. If it fails, it is dropped and rebuilt from another slot or from the store.

Locks and maps work on one machine only, so put a mirror on a local file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import MirrorError, RunMismatch
from ...format.records.version_records import Commit
from ...store.occupancy import misplaced
from .durable_json import read_json, remove_leftovers, write_json
from .locks import FileLock, LifeWatch
from .slot import RECORD_FILE, Slot, SlotRecord, boot_id

LAYOUT = 1
_OWN_NAMES = frozenset({"mirror.json", "current", "slots", "locks", "deltas", "seen.json"})
_PATIENCE, _PAUSE = 5.0, 0.02


@dataclass(slots=True)
class HeldSlot:
    """A slot whose lock is held, with its record. Its files do not change until `release`, except by the holder of an exclusive lock."""

    slot: Slot
    lock: FileLock
    record: SlotRecord

    def release(self) -> None:
        self.lock.release()


class Mirror:
    """The mirror in the directory `path`. Nothing is written before `create`.

    Parameters
    ----------
    path
        The directory.
    threads
        Number of threads for digests. None means one per core.
    step
        Called with the name of each step of a change when it is done. Tests use it to stop in between.
    """

    def __init__(self, path: Path, *, threads: int | None = None, step: Callable[[str], None] | None = None) -> None:
        self.path = path
        self.threads = threads
        self.step = step or (lambda _: None)

    # State of the mirror

    @property
    def run_id(self) -> str | None:
        """The run that is mirrored, or None if there is no mirror yet. Raises `MirrorError` for a mirror of another layout."""
        document = read_json(self.path / "mirror.json")
        if document is None:
            return None
        run_id = document.get("run")
        if document.get("layout") != LAYOUT or not isinstance(run_id, str):
            raise MirrorError(f"{self.path} is a mirror of another layout. Upgrade deltawire, or use a new directory.")
        return run_id

    @property
    def channel(self) -> str | None:
        """The channel that the mirror follows. None if it follows the newest version, or does not exist yet."""
        channel = (read_json(self.path / "mirror.json") or {}).get("channel")
        return channel if isinstance(channel, str) else None

    def refuse_channel(self, channel: str | None) -> None:
        """Raise `MirrorError` if the mirror exists and follows another channel, because its version is none of this channel.

        Parameters
        ----------
        channel
            The channel to follow. None follows the newest version.
        """
        if self.run_id is None or self.channel == channel:
            return
        has, wanted = (f"the channel {name!r}" if name else "the newest version" for name in (self.channel, channel))
        raise MirrorError(f"{self.path} follows {has}, not {wanted}. Name another directory for the mirror, one for each channel.")

    def refuse_misplaced(self, *, usage: str = "") -> None:
        """Raise `MirrorError` if the directory holds a chain of versions or is a URL. Then the arguments were probably swapped.

        Parameters
        ----------
        usage
            The command whose arguments they are, for the error.
        """
        if why := misplaced(self.path):
            raise MirrorError(f"{self.path} {why}. Name another directory for the mirror{f': `{usage}`' if usage else ''}.")

    def refuse_occupied(self) -> None:
        """Raise `MirrorError` if the path is not a mirror, and none can be made there because it holds something else."""
        if self.run_id is not None:
            return
        self.refuse_misplaced()
        if self.path.exists() and not self.path.is_dir():
            raise MirrorError(f"{self.path} is a file. Name a new or empty directory for the mirror.")
        strangers = [name for name in os.listdir(self.path) if not _is_own(name)] if self.path.is_dir() else []
        if strangers and self.run_id is None:  # unless another process has just made it
            raise MirrorError(f"{self.path} holds other files ({strangers[0]}). Name a new or empty directory for the mirror.")

    def create(self, run_id: str, channel: str | None = None) -> None:
        """Make the mirror if it does not exist. Raises `RunMismatch` if it has another run, and `MirrorError` if the directory is not a
        mirror, or follows another channel.

        Parameters
        ----------
        run_id
            The run to mirror.
        channel
            The channel to follow. None follows the newest version.
        """
        if self.run_id is None:
            self.refuse_occupied()
            for folder in ("slots", "locks", "deltas"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            with FileLock.wait_exclusive(self.path / "locks" / "create"):
                if self.run_id is None:
                    remove_leftovers(self.path / "mirror.json")
                    own = {} if channel is None else {"channel": channel}
                    write_json(self.path / "mirror.json", {"layout": LAYOUT, "run": run_id, **own})
        if self.run_id != run_id:
            raise RunMismatch(f"{self.path} mirrors run {self.run_id}, but the chain is of run {run_id}.")
        self.refuse_channel(channel)

    def current_name(self) -> str | None:
        """Return the name of the slot that is served."""
        try:
            return os.path.basename(os.readlink(self.path / "current"))
        except FileNotFoundError:
            return None

    def slot(self, name: str) -> Slot:
        return Slot(self.path / "slots" / name)

    def slots(self) -> list[Slot]:
        return [self.slot(name) for name in sorted(os.listdir(self.path / "slots"))]

    # Reading

    def hold_current(self) -> HeldSlot | None:
        """Take the shared lock of the slot that is served. The slot may be from an earlier boot: see `open_current`."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            name = self.current_name()
            if name is None:
                return None
            lock = FileLock.try_shared(self._lock_path(name))
            if lock is not None:
                if self.current_name() == name:  # it is still current, and its shared lock now protects it
                    record = self.slot(name).record()
                    if record is not None:
                        return HeldSlot(self.slot(name), lock, record)
                    lock.release()
                    return None
                lock.release()
            if time.monotonic() > deadline:
                raise MirrorError(f"the lock of {self.path / 'slots' / name} cannot be taken. Is the mirror on a local file system?")
            time.sleep(_PAUSE)

    def hold_again(self, held: HeldSlot) -> HeldSlot:
        """Share the lock of a slot that the caller holds already, so that each of the two can be released separately."""
        lock = FileLock.try_shared(self._lock_path(held.slot.name))
        assert lock is not None  # no process can have it exclusively
        return HeldSlot(held.slot, lock, held.record)

    def open_current(self) -> HeldSlot | None:
        """Return the slot that is served, with a shared lock, after the checks that it needs. Return None if it is damaged or there is
        none.
        """
        held = self.hold_current()
        if held is None or self.is_sound(held):
            return held
        held.release()
        return None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Path]:
        """Yield the directory of the version that is served. It does not change while the context lasts, even if updates happen."""
        held = self.open_current()
        if held is None:
            raise MirrorError(f"{self.path} holds no sound version. Sync it first.")
        try:
            yield held.slot.path
        finally:
            held.release()

    # Changing: everything below needs the writer's lock

    def try_writer(self) -> FileLock | None:
        """Take the lock that allows changes, if no other process holds it."""
        return FileLock.try_exclusive(self._writer_path)

    def try_leader(self) -> FileLock | None:
        """Take the lock of the process that fetches files before their commit exists, if no other process holds it."""
        return FileLock.try_exclusive(self.path / "locks" / "ahead")

    def watch_writer(self) -> LifeWatch:
        """Return a watch for the process that changes the mirror."""
        return LifeWatch(self._writer_path)

    def hold_exclusively(self, slot: Slot) -> HeldSlot | None:
        """Take a slot for changes. Return None if a reader uses it or it has no record."""
        lock = FileLock.try_exclusive(self._lock_path(slot.name))
        if lock is None:
            return None
        remove_leftovers(slot.path / RECORD_FILE)
        record = slot.record()
        if record is None:
            lock.release()
            return None
        return HeldSlot(slot, lock, record)

    def new_slot(self, commit: Commit, phase: str) -> HeldSlot:
        """Make an empty slot under a new name, marked as CHANGING or FETCHING, with an exclusive lock.

        Names are never used again: a reader may hold the lock file of a deleted slot, and must not take it for the lock of another.
        """
        name = secrets.token_hex(4)
        lock = FileLock.try_exclusive(self._lock_path(name))
        assert lock is not None
        try:
            slot = self.slot(name)
            slot.path.mkdir()
            record = SlotRecord(commit, phase, boot_id())
            slot.write_record(record)
            self.step("slot-made")
        except BaseException:
            lock.release()
            raise
        return HeldSlot(slot, lock, record)

    def serve(self, held: HeldSlot) -> None:
        """Move `current` to a clean slot. Its lock is shared from then on."""
        assert held.record.clean
        held.lock.share()  # before the link moves, because readers that follow it must get the lock
        self.step("lock-shared")
        link = self.path / f".current.tmp-{secrets.token_hex(4)}"
        os.symlink(os.path.join("slots", held.slot.name), link)
        self.step("link-made")
        os.replace(link, self.path / "current")
        self.step("served")
        self._link_files(held.slot)
        self.step("files-linked")

    def recover(self) -> HeldSlot | None:
        """Serve the newest sound slot, after `open_current` found that the current one is not sound. Return None if there is none.

        The other slot of a mirror that follows a channel may be at a version that the channel never named, so it is not served.
        """
        served = self.open_current()  # another process may have repaired it
        if served is not None:
            return served
        bad = self.current_name()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / "current")
        slots = self.slots() if self.channel is None else []
        usable = [(record.seq, slot) for slot in slots if slot.name != bad and (record := slot.record()) and record.clean]
        for _, slot in sorted(usable, key=lambda item: item[0], reverse=True):
            held = self.hold_exclusively(slot)
            if held is not None:
                if self.is_sound(held):
                    self.serve(held)
                    return held
                held.release()
                self.drop(slot)
        return None

    def drop(self, slot: Slot) -> bool:
        """Delete a slot and its lock, unless a reader uses it."""
        path = self._lock_path(slot.name)
        lock = FileLock.try_exclusive(path)
        if lock is None:
            return False
        with lock:
            slot.delete()
            path.unlink(missing_ok=True)
        return True

    def tidy(self, *, soon_free: str | None = None) -> None:
        """Delete leftovers of crashes, and all slots that no reader uses except the newest, the standby.

        `soon_free` is a slot that the caller will soon stop reading. It may become the standby.
        """
        current = self.current_name()
        spare: list[tuple[int, Slot]] = []
        for slot in self.slots():
            record = slot.record()
            if slot.name == current:
                continue
            if record is None or not record.clean:
                self.drop(slot)
            elif slot.name == soon_free or self._is_free(slot):
                spare.append((record.seq, slot))
        for _, slot in sorted(spare, key=lambda item: item[0])[:-1]:
            self.drop(slot)
        names = {slot.name for slot in self.slots()}
        for path in (self.path / "locks").glob("slot-*"):
            if path.name.removeprefix("slot-") not in names:
                path.unlink(missing_ok=True)
        for path in self.path.glob(".current.tmp-*"):  # of other names there may be some that are in use
            path.unlink(missing_ok=True)
        self.step("tidied")

    def _is_free(self, slot: Slot) -> bool:
        lock = FileLock.try_exclusive(self._lock_path(slot.name))
        if lock is not None:
            lock.release()
        return lock is not None

    def is_sound(self, held: HeldSlot) -> bool:
        """Return whether a slot may be served. Reads all of it if it was last checked in another boot, and then notes that it is sound."""
        boot = boot_id()
        if not held.record.clean:
            return False
        if boot is not None and held.record.boot_id == boot:
            return True
        if not held.slot.is_intact(held.record, threads=self.threads):
            return False
        held.record = replace(held.record, boot_id=boot)
        with contextlib.suppress(PermissionError):  # a reader without the right to write reads all of it again next time
            held.slot.write_record(held.record)
        return True

    def _link_files(self, slot: Slot) -> None:
        """Make the directory itself look like the checkpoint that is served."""
        wanted = {name for name in slot.file_names() if not name.startswith(".")} - _OWN_NAMES
        for entry in list(self.path.iterdir()):
            if entry.is_symlink() and os.readlink(entry).startswith("current" + os.sep):
                if entry.name in wanted:
                    wanted.discard(entry.name)
                else:
                    entry.unlink(missing_ok=True)
        for name in wanted:
            with contextlib.suppress(FileExistsError):  # the user put a file there: leave it
                os.symlink(os.path.join("current", name), self.path / name)

    @property
    def _writer_path(self) -> Path:
        return self.path / "locks" / "writer"

    def _lock_path(self, name: str) -> Path:
        return self.path / "locks" / f"slot-{name}"


def _is_own(name: str) -> bool:
    """Return whether a directory that is about to become a mirror may already hold this name."""
    return name in _OWN_NAMES or name.startswith(".mirror.json.tmp-")

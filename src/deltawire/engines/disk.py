"""Any engine that can load weights from a directory: a mirror is brought up to date, then the engine is told to load it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..chain.version import Version
from ..errors import EngineQuarantined, SwapFailed
from ..format.records.record_parts import FileEntry
from ..format.records.version_records import Commit
from ..subscribe.mirror.mirror import HeldSlot
from ..subscribe.mirror.mirror_replica import MirrorReplica
from ..subscribe.prepared_swap import Swap
from ..subscribe.replica import Replica
from ..subscribe.sync_context import SyncContext
from .base import Engine, KvCache

Reload = Callable[[Path, Version], Any]
"""Loads the checkpoint of a version from a directory into the engine. It must raise if the engine does not have the version afterwards."""


class DiskEngine(Engine):
    """An engine that loads checkpoints from a directory and keeps its own copy of the weights.

    >>> HotSwap("s3://bucket/run", DiskEngine("/dev/shm/policy", reload=lambda path, version: server.load(path))).sync()

    The files in the directory that the engine has loaded do not change until it has loaded another one. deltawire cannot see the engine's
    weights, so the engine itself must not serve a mix of two versions.

    Parameters
    ----------
    mirror
        The directory of the mirror.
    reload
        Loads the checkpoint in a directory into the engine.
    pause
        Called before `reload`, if the engine has to be paused for it.
    resume
        Called after `reload`, if the engine was paused.
    confirm
        Must raise unless the engine reports that it has the version. Without it, a `reload` that returns counts as a success.
    loaded_seq
        The `Version.seq` of the version that the engine was started with, if it was loaded from the mirror. The first sync checks that it
        is a version of the chain (else `RollbackDetected`). Then the engine need not load it again.
    threads
        Number of threads for updating the mirror. None means one per core.
    name
        The name of the engine in messages and events.
    """

    def __init__(
        self,
        mirror: Path | str,
        reload: Reload,
        *,
        pause: Callable[[KvCache], Any] = lambda kv_cache: None,
        resume: Callable[[], Any] = lambda: None,
        confirm: Callable[[Version], Any] = lambda version: None,
        loaded_seq: int | None = None,
        threads: int | None = None,
        name: str = "disk",
    ) -> None:
        self.name = name
        self._mirror = Path(mirror)
        self._reload, self._confirm = reload, confirm
        self._pause, self._resume = pause, resume
        self._loaded_seq = loaded_seq
        self._threads = threads

    def replica(self, swap: Swap) -> Replica:
        mirror = MirrorReplica(self._mirror, threads=self._threads)
        return ReloadingReplica(mirror, self._reload, self._confirm, swap, loaded_seq=self._loaded_seq)

    def pause(self, kv_cache: KvCache) -> None:
        self._pause(kv_cache)

    def resume(self) -> None:
        self._resume()


class ReloadingReplica:
    """A mirror, and an engine that has loaded one of its versions. `commit` is the engine's version. The mirror may be ahead of it.

    Parameters
    ----------
    mirror
        Brings the mirror to new versions.
    reload
        Loads the checkpoint in a directory into the engine.
    confirm
        Raises unless the engine reports that it has the version.
    swap
        Makes each prepared change.
    loaded_seq
        The `Version.seq` of the version that the engine was started with, if it was loaded from the mirror.
    """

    def __init__(
        self, mirror: MirrorReplica, reload: Reload, confirm: Callable[[Version], Any], swap: Swap, *, loaded_seq: int | None
    ) -> None:
        self.mirror = mirror
        self._reload, self._confirm, self._swap = reload, confirm, swap
        self._loaded: HeldSlot | None = None
        """The slot that the engine has loaded. Its lock keeps the files as they are."""
        self._is_vouched = False
        """Whether the loaded slot is known to hold a version of the chain. The mirror's own record could say anything."""
        if mirror.commit is not None and mirror.commit.seq == loaded_seq:
            self._loaded = mirror.hold()

    @property
    def commit(self) -> Commit | None:
        return self._loaded.record.commit if self._loaded is not None and self._is_vouched else None

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        return self.mirror.state

    def move(self, target: Commit, context: SyncContext) -> None:
        self._check_loaded(context)
        if self.commit == target:
            return
        self.mirror.move(target, context)
        new = self.mirror.hold()
        try:
            self._swap(_ReloadSwap(new, self._loaded, self._reload, self._confirm), Version.of(new.record.commit))
        except BaseException as error:
            new.release()
            if isinstance(error, EngineQuarantined):
                self._release_loaded()
            raise
        self._release_loaded()
        self._loaded, self._is_vouched = new, True

    def wants_ahead(self) -> bool:
        return self.mirror.wants_ahead()

    def take_ahead(self, files: Iterable[tuple[FileEntry, memoryview]]) -> None:
        self.mirror.take_ahead(files)

    def close(self) -> None:
        self._release_loaded()
        self.mirror.close()

    def _check_loaded(self, context: SyncContext) -> None:
        """Raise `RollbackDetected` if the slot that the engine was started with does not hold a version of the chain."""
        if self._loaded is not None and not self._is_vouched:
            context.vouch(self._loaded.record.ref)
            self._is_vouched = True

    def _release_loaded(self) -> None:
        if self._loaded is not None:
            self._loaded.release()
        self._loaded = None


class _ReloadSwap:
    """Makes the engine load the checkpoint in another directory."""

    def __init__(self, new: HeldSlot, old: HeldSlot | None, reload: Reload, confirm: Callable[[Version], Any]) -> None:
        self._new, self._old = new, old
        self._reload, self._confirm = reload, confirm

    def apply(self) -> None:
        self._load(self._new)

    def confirm(self, *, full: bool) -> None:
        self._confirm(Version.of(self._new.record.commit))

    def revert(self) -> None:
        if self._old is None:
            raise SwapFailed("the weights that the engine had before did not come from the mirror.")
        self._load(self._old)
        self._confirm(Version.of(self._old.record.commit))

    def _load(self, held: HeldSlot) -> None:
        self._reload(held.slot.path, Version.of(held.record.commit))

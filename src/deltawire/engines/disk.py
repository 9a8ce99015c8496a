"""Any engine that can load weights from a directory: a mirror is brought up to date beside it, then it is told to reload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..chain.version import Version
from ..errors import EngineQuarantined, SwapFailed
from ..format.records.chain_records import Commit
from ..subscribe.mirror.mirror import HeldSlot
from ..subscribe.mirror.mirror_replica import MirrorReplica
from ..subscribe.prepared_swap import Swap
from ..subscribe.replica import Replica
from ..subscribe.sync_context import SyncContext
from .base import Engine, KvCache

Reload = Callable[[Path, Version], Any]
"""Loads the checkpoint in a directory, which is of this version, into an engine. It raises if the engine does not have it then."""


class DiskEngine(Engine):
    """An engine with weights of its own, out of our reach. The directory that it is given stays as it is for as long as it serves from it.

    >>> HotSwap("s3://bucket/run", DiskEngine("/dev/shm/policy", reload=lambda path, version: server.load(path))).sync()

    `pause` and `resume` are called around `reload`, if the engine needs that. `confirm` raises unless the engine says that it has the
    version; without it, that `reload` returned must do. A mix of versions cannot be seen from here: that is the engine's to prevent.
    `loaded` is the version that the engine was started with, if it was from the mirror.
    """

    def __init__(
        self,
        mirror: Path | str,
        reload: Reload,
        *,
        pause: Callable[[KvCache], Any] = lambda kv_cache: None,
        resume: Callable[[], Any] = lambda: None,
        confirm: Callable[[Version], Any] = lambda version: None,
        loaded: int | None = None,
        threads: int | None = None,
        name: str = "disk",
    ) -> None:
        self.name = name
        self._mirror = Path(mirror)
        self._reload, self._confirm = reload, confirm
        self._pause, self._resume = pause, resume
        self._loaded = loaded
        self._threads = threads

    def replica(self, swap: Swap) -> Replica:
        return ReloadingReplica(self._mirror, self._reload, self._confirm, swap, loaded=self._loaded, threads=self._threads)

    def pause(self, kv_cache: KvCache) -> None:
        self._pause(kv_cache)

    def resume(self) -> None:
        self._resume()


class ReloadingReplica(MirrorReplica):
    """A mirror, and an engine that has loaded one of its versions. `commit` is the engine's; the mirror may be ahead of it."""

    def __init__(
        self, path: Path, reload: Reload, confirm: Callable[[Version], Any], swap: Swap, *, loaded: int | None, threads: int | None
    ) -> None:
        self._loaded: HeldSlot | None = None
        super().__init__(path, threads=threads)
        self._reload, self._confirm, self._swap = reload, confirm, swap
        if self._held is not None and self._held.record.seq == loaded:
            self._loaded = self._held

    @property
    def commit(self) -> Commit | None:
        return None if self._loaded is None else self._loaded.record.commit

    def move(self, target: Commit, context: SyncContext) -> None:
        super().move(target, context)
        held = self._held
        assert held is not None
        try:
            self._swap(ReloadSwap(held, self._loaded, self._reload, self._confirm), Version.of(held.record.commit))
        except EngineQuarantined:
            self._let_go()
            raise
        self._let_go()
        self._loaded = held

    def close(self) -> None:
        self._let_go()
        super().close()

    def _switch(self, held: HeldSlot) -> None:
        if self._held is self._loaded:
            self._held = None  # not to be released: the engine has it until the swap
        super()._switch(held)

    def _let_go(self) -> None:
        if self._loaded is not None and self._loaded is not self._held:
            self._loaded.release()
        self._loaded = None


class ReloadSwap:
    """From the checkpoint in one directory to that in another."""

    def __init__(self, new: HeldSlot, old: HeldSlot | None, reload: Reload, confirm: Callable[[Version], Any]) -> None:
        self._new, self._old = new, old
        self._reload, self._confirm = reload, confirm

    def apply(self) -> None:
        self._load(self._new)

    def confirm(self, *, full: bool) -> None:
        self._confirm(Version.of(self._new.record.commit))

    def revert(self) -> None:
        if self._old is None:
            raise SwapFailed("what the engine had before did not come from the mirror.")
        self._load(self._old)
        self._confirm(Version.of(self._old.record.commit))

    def _load(self, held: HeldSlot) -> None:
        self._reload(held.slot.path, Version.of(held.record.commit))

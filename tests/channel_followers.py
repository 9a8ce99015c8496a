"""Followers of a channel, and a store that looks at each of its calls at what a follower serves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from channelled_chain import ChannelledChain

from deltawire import Subscriber, Version, state_digest
from deltawire.engines.base import Engine, KvCache
from deltawire.engines.disk import DiskEngine
from deltawire.engines.hot_swap import HotSwap
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.digest import Digest
from deltawire.store import Store
from deltawire.subscribe.memory_replica import MemoryReplica
from deltawire.subscribe.prepared_swap import Swap
from deltawire.subscribe.replica import Replica
from deltawire.testing.faulty_store import Fault, FaultyStore


class WatchedStore(FaultyStore):
    """Calls `happens` with the number of each call, before the call."""

    def __init__(self, inner: Store, script: list[Fault] | None = None, happens: Callable[[int], object] = lambda number: None) -> None:
        super().__init__(inner, script or [])
        self.happens = happens
        self._numbers = itertools.count()  # several threads may call at once, and each number is given once

    @contextlib.contextmanager
    def _calling(self, op: str, key: str) -> Iterator[Any]:
        self.happens(next(self._numbers))
        with super()._calling(op, key) as found:
            yield found


class Follower(Protocol):
    """A follower that can be synced, and that tells which version it serves."""

    def sync(self) -> Version: ...

    def close(self) -> None: ...

    @property
    def version(self) -> Version | None: ...

    def look(self) -> None:
        """Note the digest of the weights that anybody can see at this moment."""


class InMemory:
    """A plain subscriber. Nobody may read its weights during a sync."""

    def __init__(self, chain: ChannelledChain, store: Store, folder: Path, seen: set[Digest]) -> None:
        self._subscriber = Subscriber(store, options=chain.options())
        self._seen, self._syncs = seen, False

    @property
    def version(self) -> Version | None:
        return self._subscriber.version

    def sync(self) -> Version:
        self._syncs = True
        try:
            return self._subscriber.sync()
        finally:
            self._syncs = False
            self.look()

    def look(self) -> None:
        if not self._syncs and self.version is not None:
            self._seen.add(state_digest(dict(self._subscriber.state)))
            self._seen.add(self.version.digest)

    def close(self) -> None:
        self._subscriber.close()


class MemoryEngine(Engine):
    """An engine in this process whose weights are visible whenever it is not paused."""

    name = "memory"

    def __init__(self, seen: set[Digest]) -> None:
        self._seen = seen
        self._replica: Replica | None = None
        self.is_paused = False

    def replica(self, swap: Swap) -> Replica:
        self._replica = MemoryReplica(swap=swap)
        return self._replica

    def pause(self, kv_cache: KvCache) -> None:
        self.look()
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.look()

    def look(self) -> None:
        if not self.is_paused and self._replica is not None and self._replica.commit is not None:
            self._seen.add(state_digest(dict(self._replica.state)))
            self._seen.add(Version.of(self._replica.commit).digest)


class InEngine:
    """An engine that generates all the time except in pauses."""

    def __init__(self, chain: ChannelledChain, store: Store, folder: Path, seen: set[Digest]) -> None:
        self.engine = MemoryEngine(seen)
        self.swap = HotSwap(store, self.engine, options=chain.options())
        self.look, self.sync, self.close = self.engine.look, self.swap.sync, self.swap.close

    @property
    def version(self) -> Version | None:
        return self.swap.version


class InMirror:
    """A mirror, whose version anybody can load at any time."""

    def __init__(self, chain: ChannelledChain, store: Store, folder: Path, seen: set[Digest]) -> None:
        self._folder, self._seen = folder, seen
        self._subscriber = Subscriber(store, folder, options=chain.options())
        self.close = self._subscriber.close
        self.look()

    @property
    def version(self) -> Version | None:
        return self._subscriber.version

    def sync(self) -> Version:
        try:
            return self._subscriber.sync()
        finally:
            self.look()

    def look(self) -> None:
        if (self._folder / "current").exists():
            self._seen.add(state_digest(Checkpoint(self._folder / "current")))
        if self.version is not None:
            self._seen.add(self.version.digest)


class OnDisk:
    """An engine that loads the directories of a mirror."""

    def __init__(self, chain: ChannelledChain, store: Store, folder: Path, seen: set[Digest]) -> None:
        self._seen = seen
        self.swap = HotSwap(store, DiskEngine(folder, self._reload), options=chain.options())
        self.sync, self.close = self.swap.sync, self.swap.close

    def _reload(self, path: Path, version: Version) -> None:
        self._seen.add(state_digest(Checkpoint(path)))
        self._seen.add(version.digest)

    @property
    def version(self) -> Version | None:
        return self.swap.version

    def look(self) -> None:
        """Do nothing: `_reload` sees everything that the engine gets."""


KINDS: dict[str, Callable[[ChannelledChain, Store, Path, set[Digest]], Follower]] = {
    "memory": InMemory,
    "engine": InEngine,
    "mirror": InMirror,
    "disk": OnDisk,
}

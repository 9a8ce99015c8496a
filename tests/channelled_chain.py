"""A small chain of deltas without shortcuts, and short ways to move channels on it. Version n is commit n."""

from __future__ import annotations

import copy
from typing import Any

from toy_chain import State, ToyChain, first_state

from deltawire import ReaderOptions, SigningKey
from deltawire.chain.channels import ChannelReader
from deltawire.chain.log import ChainLog
from deltawire.format.records.channel_records import ChannelMove
from deltawire.publish.channels import ChannelWriter
from deltawire.store import Store
from deltawire.store.memory import MemoryStore


class ChannelledChain:
    """A chain of which only version 1 is a full checkpoint, so a route leads through every version between.

    Parameters
    ----------
    versions
        How many versions it has.
    key
        Signs everything. None leaves the chain unsigned.
    store
        The store. None means a new one in memory.
    """

    def __init__(self, versions: int = 6, *, key: SigningKey | None = None, store: Store | None = None) -> None:
        self.store = MemoryStore() if store is None else store
        self.key = key
        self.chain = ToyChain(self.store, sign=None if key is None else key.sign)
        self.chain.anchor(first_state())
        self.chain.grow(versions - 1)

    def with_store(self, store: Store) -> ChannelledChain:
        """Return the same chain in another store, which has a copy of all objects. It cannot grow."""
        new = copy.copy(self)
        new.store = store
        return new

    def state(self, version: int) -> State:
        state = self.chain.states[version]
        assert state is not None
        return state

    def log(self, store: Store | None = None) -> ChainLog:
        return ChainLog(self.store if store is None else store, run="toy", trusted_keys=() if self.key is None else [self.key.public])

    def options(self, channel: str | None = "stable", **more: Any) -> ReaderOptions:
        return ReaderOptions(
            "toy", () if self.key is None else [self.key.public], channel=channel, **{"pin": False, "patience": 0.0} | more
        )

    def writer(self, name: str = "stable", store: Store | None = None) -> ChannelWriter:
        return ChannelWriter(self.log(store), name, key=self.key)

    def reader(self, name: str = "stable", store: Store | None = None) -> ChannelReader:
        return ChannelReader(self.log(store), name)

    def promote(self, version: int, name: str = "stable", share: int | None = None) -> ChannelMove:
        return self.writer(name).promote(self.chain.commits[version], share=share)

    def rollback(self, name: str = "stable", to: int | None = None) -> ChannelMove:
        return self.writer(name).rollback(None if to is None else self.chain.commits[to])

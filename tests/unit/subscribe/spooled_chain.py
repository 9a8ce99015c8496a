"""A toy chain, and the syncs that put its hops into a spool."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.routes.remaining_routes import Routes
from deltawire.chain.routes.restore import Hop
from deltawire.store import Store
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.sync_context import SyncContext


def context_of(store: Store) -> SyncContext:
    """Return a new sync, which waits for nothing."""
    log = ReaderOptions().open_log(store)
    return SyncContext(log, Routes(log), patience=0)


def hop_of(context: SyncContext, chain: ToyChain, seq: int, **changed: Any) -> Hop:
    """Return the last hop to a version, perhaps with other fields."""
    return dataclasses.replace(context.routes.find(chain.ref(seq - 1), chain.commits[seq])[-1], **changed)


def grown_chain(store: Store | None = None, versions: int = 4) -> ToyChain:
    """Return a chain with a fence, a full checkpoint, and deltas: commits 0 to `versions`."""
    chain = ToyChain(MemoryStore() if store is None else store)
    chain.anchor(first_state())
    chain.grow(versions - 1)
    return chain


def directory_chain(folder: Path) -> ToyChain:
    return grown_chain(LocalStore(folder))

"""Test that a subscriber avoids bad data where it can, and otherwise keeps the last good version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counting_store import CountingStore, Subscribe, events_of, names_of
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain import fetch
from deltawire.errors import (
    ChainBroken,
    DataDamaged,
    DataMissing,
    DeltawireError,
    RollbackDetected,
    StoreUnavailable,
)
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber


def test_a_failed_sync_leaves_the_last_good_version(subscribe: Subscribe) -> None:
    chain = ToyChain(CountingStore())
    chain.anchor(first_state())
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    version = subscriber.sync()
    good = bits_of(subscriber.state)
    chain.delta()
    chain.store.failure = StoreUnavailable("no answer.")  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable):
        subscriber.sync()
    assert subscriber.version == version
    assert bits_of(subscriber.state) == good
    assert isinstance(subscriber.last_error, StoreUnavailable)
    assert names_of(events)[-1] == "sync-failed"
    chain.store.failure = None  # type: ignore[attr-defined]
    subscriber.sync()
    assert subscriber.last_error is None
    assert bits_of(subscriber.state) == bits_of(chain.state)


@pytest.mark.parametrize("harm", ["damage", "lose"])
def test_a_bad_skip_is_avoided(chain: ToyChain, subscribe: Subscribe, harm: str) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.grow(16)
    getattr(chain, harm)(chain.add_skip(17, 1).files[0])
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


@pytest.mark.parametrize("harm", ["damage", "lose"])
def test_a_bad_delta_is_avoided_by_an_anchor(chain: ToyChain, subscribe: Subscribe, harm: str) -> None:
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    subscriber.sync()
    chain.grow(4)
    getattr(chain, harm)(chain.commits[3].files[1])
    chain.add_anchor(4)
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)
    assert "resynced" in names_of(events)


@pytest.mark.parametrize("harm", ["damage", "lose"])
def test_a_bad_delta_is_avoided_by_a_skip(chain: ToyChain, subscribe: Subscribe, harm: str) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.grow(5)
    getattr(chain, harm)(chain.commits[4].files[0])
    chain.add_skip(5, 1)
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


@pytest.mark.parametrize("harm", ["damage", "lose"])
def test_a_bad_anchor_is_replaced_by_an_older_one(chain: ToyChain, subscribe: Subscribe, harm: str) -> None:
    chain.grow(6)
    getattr(chain, harm)(chain.add_anchor(6).files[0])
    subscriber = subscribe(chain)
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


@pytest.mark.parametrize(("harm", "error"), [("damage", DataDamaged), ("lose", DataMissing)])
def test_when_no_route_is_left_the_error_says_why(chain: ToyChain, subscribe: Subscribe, harm: str, error: type[DeltawireError]) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.grow(3)
    getattr(chain, harm)(chain.commits[3].files[0])
    with pytest.raises(error):
        subscriber.sync()
    version = subscriber.version
    assert version is not None
    assert bits_of(subscriber.state) == bits_of(chain.states[version.seq] or {})


def test_a_skip_with_wrong_weights_is_avoided(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.grow(12)
    wrong = chain.states[13]
    chain.states[13] = chain.states[11]
    chain.add_skip(13, 1)
    chain.states[13] = wrong
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_rot_in_memory_leads_to_a_resync(chain: ToyChain) -> None:
    events: list[Event] = []
    with Subscriber(chain.store, on_event=events.append) as subscriber:
        subscriber.sync()
        subscriber._replica._weights.state.writable["b.weight"][3] = 7  # type: ignore[attr-defined]
        chain.delta()
        subscriber.sync()
        assert bits_of(subscriber.state) == bits_of(chain.state)
        assert "resynced" in names_of(events)


def test_a_store_that_went_back_is_noticed(chain: ToyChain, subscribe: Subscribe) -> None:
    chain.grow(3)
    subscriber = subscribe(chain)
    subscriber.sync()
    good = bits_of(subscriber.state)
    chain.store.delete([keys.commit_key(4)])
    subscriber._chain.log._kept.clear()  # now it reads like another process
    with pytest.raises(RollbackDetected):
        subscriber.sync()
    assert bits_of(subscriber.state) == good


def test_a_rewritten_history_is_noticed(subscribe: Subscribe) -> None:
    store = MemoryStore()
    chain = ToyChain(store)
    chain.anchor(first_state())
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.commits[1] = replace(chain.commits[1], nonce="0" * 32)
    store.delete([keys.commit_key(1)])
    store.put(keys.commit_key(1), chain.commits[1].to_bytes())
    chain.delta()
    subscriber._chain.log._kept.clear()
    with pytest.raises((RollbackDetected, ChainBroken)):
        subscriber.sync()


class CutStore(MemoryStore):
    """A store whose link fails before the byte `cut` of a data object, once. It counts the bytes that were read."""

    cut: int | None = None
    read = 0

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Any = None) -> None:
        if self.cut is not None and key.startswith("data/") and offset + buffer.nbytes > self.cut:
            self.cut = None
            raise StoreUnavailable("cut.")
        super().read_into(key, buffer, offset=offset, progress=progress)
        self.read += buffer.nbytes if key.startswith("data/") else 0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_mirror_continues_a_shard_that_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    monkeypatch.setattr(fetch, "_WINDOW", 100)
    chain = ToyChain(CutStore())
    store = chain.store
    assert isinstance(store, CutStore)
    anchor = chain.anchor(first_state())
    size = max(entry.size for entry in anchor.files)
    store.cut = size // 2
    with Subscriber(store, tmp_path / "mirror") as subscriber:
        with pytest.raises(StoreUnavailable):
            subscriber.sync()
        if not restarts:
            subscriber.sync()
    if restarts:
        with Subscriber(store, tmp_path / "mirror") as subscriber:
            subscriber.sync()
    assert bits_of(Checkpoint(tmp_path / "mirror" / "current")) == bits_of(chain.state)
    assert store.read <= sum(entry.size for entry in anchor.files) + 2 * 100
    assert not list((tmp_path / "mirror").rglob(".part*"))

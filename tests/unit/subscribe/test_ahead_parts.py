"""Test the parts of fetching ahead: the spool that keeps files, and updates that are decoded before their commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spooled_chain import context_of, grown_chain, hop_of
from support import bits_of
from toy_chain import ToyChain, next_state

from deltawire.chain.memory_state import MemoryState
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import resolved_ahead
from deltawire.subscribe.mirror.locks import FileLock
from deltawire.subscribe.replica_weights import ArrayWeights
from deltawire.subscribe.resolved_ahead import ResolvedAhead
from deltawire.subscribe.spool.delta_spool import DeltaSpool


class Counted(WrappedStore):
    """Records which data objects are read."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.read: list[str] = []

    def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
        self.read.append(key)
        super().read_into(key, buffer, **more)


def content(chain: ToyChain, files: tuple[FileEntry, ...]) -> dict[FileEntry, memoryview]:
    return {entry: memoryview(chain.store.get(entry.key, limit=1 << 20)) for entry in files}


def test_a_spool_fetches_only_what_did_not_come_ahead(tmp_path: Path) -> None:
    store = Counted()
    chain = grown_chain(store)
    spool = DeltaSpool(tmp_path / "spool")
    files = chain.commits[2].files
    with spool.hold():
        spool.put_ahead(content(chain, files[:1]))
        assert spool.hop(chain.ref(1), 2) is None
        context = context_of(store)
        hop = spool.put(hop_of(context, chain, 2), context)
    assert store.read == [files[1].key]
    assert [bytes(spool.open(entry)) for entry in hop.files] == [bytes(data) for data in content(chain, files).values()]


def test_a_spool_drops_what_came_ahead_in_vain_and_never_waits_for_a_lock(tmp_path: Path) -> None:
    chain = grown_chain()
    spool = DeltaSpool(tmp_path / "spool")
    spool.put_ahead(content(chain, chain.commits[2].files))  # there is no spool yet
    assert not spool.folder.exists()
    with spool.hold():
        lock = FileLock.try_exclusive(spool.folder / "lock")
        assert lock is not None
        with lock:
            spool.put_ahead(content(chain, chain.commits[2].files))
        assert not (spool.folder / "files").exists()
        spool.put_ahead(content(chain, chain.commits[2].files))
        assert len(list((spool.folder / "files").iterdir())) == 2
        spool.keep_only(1)
        assert not list((spool.folder / "files").iterdir())
        leader = spool.try_leader()
        assert leader is not None
        assert spool.try_leader() is None
        leader.release()


@pytest.fixture
def weights() -> tuple[ToyChain, ArrayWeights]:
    chain = grown_chain(versions=2)
    made = ArrayWeights(1)
    made.state.adopt({name: array.copy() for name, array in chain.state.items()}, chain.commits[2])
    return chain, made


def test_decoding_ahead_ends_when_it_takes_too_much_memory(weights: tuple[ToyChain, ArrayWeights], monkeypatch: pytest.MonkeyPatch) -> None:
    chain, held = weights
    files = chain.delta_files(chain.state, next_state(chain.state, 9))
    for least, expected in ((1 << 20, 2), (0, 1)):  # a quarter of the state is more than the first file, and less than both
        monkeypatch.setattr(resolved_ahead, "_LEAST", least)
        monkeypatch.setattr(resolved_ahead, "_SHARE", 10**6)
        ahead = ResolvedAhead(held)
        ahead.add(content(chain, files).items())
        taken = ahead.take(files)
        assert taken is not None
        assert len(taken[1]) == expected


def test_what_was_decoded_is_taken_once_and_only_for_its_state_and_files(weights: tuple[ToyChain, ArrayWeights]) -> None:
    chain, held = weights
    before = bits_of(held.state)
    files = chain.delta_files(chain.state, next_state(chain.state, 9))
    ahead = ResolvedAhead(held)
    for wanted in (files[:1], ()):  # a commit that does not name all of them
        ahead.add(content(chain, files).items())
        assert ahead.take(wanted) is None
    ahead.add(content(chain, files).items())
    assert ahead.take(files) is not None
    assert ahead.take(files) is None
    ahead.add(content(chain, files).items())
    arrays, held.state = held.state.writable, MemoryState(threads=1)
    assert ahead.take(files) is None
    held.state.adopt(dict(arrays), chain.commits[2])
    ahead.add(content(chain, files).items())
    held.state.relabel(chain.claim(2))  # a fence has the same state
    assert ahead.take(files) is not None
    assert bits_of(held.state) == before

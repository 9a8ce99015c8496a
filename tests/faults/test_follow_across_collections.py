"""The chain of a follower grows and is collected between any two calls of the follower, as if its machine had been suspended.

A collection gives readers a grace period, and pins keep what they need. Neither helps a reader that sleeps longer than both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from publications import Ledger, bits_at, open_publisher, open_subscriber
from support import bits_of

from deltawire.chain.log import ChainLog
from deltawire.chain.maintenance.collect import collect
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.disk import DiskEngine
from deltawire.engines.hot_swap import HotSwap
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import pull
from deltawire.subscribe.model_files import read_model_files
from deltawire.testing import Before, Call, FaultyStore

MOST_CALLS = 2000


@cache
def stages() -> tuple[tuple[MemoryStore, int], ...]:
    """Return one chain at three moments, each with the step of its newest version.

    At each moment, all data of the moment before are collected.
    """
    store, ledger, found, newest = MemoryStore(), Ledger(), [], -1
    for versions in (6, 9, 9):
        with open_publisher(store, attachments={"config.json": b"{}"}) as publisher:
            ledger.publish(publisher, versions)
        collect(store, grace=0)
        assert ChainLog(store).floor() >= newest
        newest = max(ledger.acknowledged)
        moment = MemoryStore()
        for info in store.list(""):
            moment.put(info.key, store.get(info.key, limit=info.size))
        assert ledger.newest is not None
        found.append((moment, ledger.newest))
    return tuple(found)


class Chain(FaultyStore):
    """A store that moves on to the next moment before each of these calls. Calls are counted from `begin` on."""

    def __init__(self, *at: int) -> None:
        self._at = list(at)
        self._stage = 0
        self._begin: int | None = None
        super().__init__(stages()[0][0], [Before(self._go_on, "crash", times=None)])

    def begin(self) -> None:
        self._begin = len(self.calls)

    @property
    def newest(self) -> int:
        return stages()[self._stage][1]

    @property
    def has_gone_on(self) -> bool:
        return not self._at

    def _go_on(self, call: Call) -> bool:
        assert call.index < MOST_CALLS, "the reader never stops"
        if self._begin is not None and self._at and call.index == self._begin + self._at[0]:
            self._at.pop(0)
            self._stage += 1
            self.inner = stages()[self._stage][0]
        return False


def at_every_call(read: Callable[[Chain, int], None], *, apart: int | None = None) -> None:
    """Read a chain that moves on at the first call, then one that moves on at the second call, and so on.

    With `apart`, it moves on again that many calls later.
    """
    index = 0
    while True:
        chain = Chain(index) if apart is None else Chain(index, index + apart)
        read(chain, index)
        if not chain.has_gone_on:
            break
        index += 1
    assert index > 5


def follow_to_the_end(followed: Any, chain: Chain) -> None:
    stop = threading.Event()
    chain.begin()
    for version in followed.follow(poll=1e-4, stop=stop):
        if version.step == chain.newest:
            stop.set()


@pytest.mark.parametrize("apart", [None, 4])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("joins", [True, False])
def test_a_follower_continues_with_the_newest_wherever_a_collection_passes_it(
    joins: bool, mirrored: bool, apart: int | None, tmp_path: Path
) -> None:
    def read(chain: Chain, index: int) -> None:
        with open_subscriber(chain, tmp_path / str(index) if mirrored else None) as reader:
            if not joins:
                reader.sync(seq=2)
            follow_to_the_end(reader, chain)
            assert bits_of(reader.state) == bits_at(chain.newest)
            assert reader.last_error is None

    at_every_call(read, apart=apart)


def test_an_engine_continues_with_the_newest_wherever_a_collection_passes_it(tmp_path: Path) -> None:
    def read(chain: Chain, index: int) -> None:
        loaded: list[Any] = []
        engine = DiskEngine(tmp_path / str(index), reload=lambda path, version: loaded.append(bits_of(Checkpoint(path))))
        with HotSwap(chain, engine, options=ReaderOptions(pin=False, patience=0.0)) as swap:
            follow_to_the_end(swap, chain)
        assert loaded[-1] == bits_at(chain.newest)

    at_every_call(read)


def test_a_pull_of_the_newest_takes_what_is_newest_wherever_a_collection_passes_it(tmp_path: Path) -> None:
    def read(chain: Chain, index: int) -> None:
        out = tmp_path / str(index)
        chain.begin()
        version = pull(chain, out, options=ReaderOptions(pin=False, patience=0.0), threads=1)
        assert version.step is not None
        assert bits_of(Checkpoint(out)) == bits_at(version.step)

    at_every_call(read)


def test_a_member_finds_its_model_wherever_a_collection_passes_it() -> None:
    def read(chain: Chain, index: int) -> None:
        chain.begin()
        files = read_model_files(chain)
        assert files.files == {"config.json": b"{}"}
        assert set(files.dtypes) == set(bits_at(0))

    at_every_call(read)

"""Compare the copy of a chain that a relay made with the chain itself."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from blake3 import blake3

from deltawire.chain.log import ChainLog
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import ObjectMissing
from deltawire.format.records.canonical import MAX_RECORD_BYTES
from deltawire.format.records.channel_records import ChannelMove
from deltawire.format.records.run_records import Run
from deltawire.format.records.version_records import Commit
from deltawire.relay import Relay
from deltawire.relay.region_records import region_floor
from deltawire.store import Store, keys
from deltawire.store.base import Progress
from deltawire.store.memory import MemoryStore
from deltawire.testing import FaultyStore


def open_relay(source: Store, target: Store, **given: Any) -> Relay:
    """Open a relay that never waits. `given` holds its parameters and the fields of `ReaderOptions`."""
    parameters = {name: given.pop(name) for name in ("shortcuts", "mirror", "spool", "on_event", "threads", "progress") if name in given}
    return Relay(source, target, options=ReaderOptions(**({"patience": 0.0} | given)), **({"threads": 1} | parameters))


def relay_once(source: Store, target: Store, **given: Any) -> None:
    with open_relay(source, target, **given) as relay:
        relay.copy()
        relay.copy_shortcuts()


def objects_of(store: Store) -> dict[str, bytes]:
    """Return all objects that belong to the chain itself."""
    others = (keys.PINS, keys.MARKS, keys.PROBES, keys.REPORTS, keys.HEAD, keys.COMING, keys.COPY)
    return {info.key: store.get(info.key, limit=info.size) for info in store.list("") if not info.key.startswith(others)}


def assert_commits_before_moves(source: Store, target: Store, *, at_least: int = 0) -> None:
    """Check that the moves of channels in the region are the chain's own, from the first without gaps, and name commits of the region."""
    found = [keys.parse_channel_key(info.key) for info in target.list(keys.CHANNELS)]
    moves = [each[1] for each in found if each is not None]
    assert moves == list(range(len(moves)))
    assert len(moves) >= at_least
    for info in target.list(keys.CHANNELS):
        data = target.get(info.key, limit=MAX_RECORD_BYTES)
        assert data == source.get(info.key, limit=MAX_RECORD_BYTES)
        assert _exists(target, keys.commit_key(ChannelMove.parse(data).target.seq))


class MeteredStore(FaultyStore):
    """A store without faults. `read` has the bytes that were read of each data object."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: Counter[str] = Counter()
        self._reading = threading.Lock()

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: Progress | None = None) -> None:
        super().read_into(key, buffer, offset=offset, progress=progress)
        with self._reading:
            self.read[key] += buffer.nbytes if key.startswith(keys.DATA) else 0


def reads_of_data(store: FaultyStore) -> Counter[str]:
    """Return how many times each data object was read through a store."""
    return Counter(call.key for call in store.calls if call.op == "read_into" and call.key.startswith(keys.DATA))


def assert_data_before_commits(source: Store, target: Store) -> None:
    """Check that each commit in the region is the chain's own, and has its data unless it is at or below the region's floor."""
    run = Run.parse(source.get(keys.RUN, limit=MAX_RECORD_BYTES))
    log = ChainLog(source)
    floor = region_floor(target, run)
    for info in target.list(keys.COMMITS):
        data = target.get(info.key, limit=MAX_RECORD_BYTES)
        assert data == source.get(info.key, limit=MAX_RECORD_BYTES)
        commit = Commit.parse(data)
        assert _exists(target, keys.epoch_key(commit.epoch))
        if commit.seq > floor and not log.is_void(commit):
            for entry in (*commit.named_objects, *log.files_of(commit)):
                assert blake3(target.get(entry.key, limit=entry.size)).hexdigest() == entry.blake3


def copy_of(store: Store) -> MemoryStore:
    """Return a store with the same objects."""
    copied = MemoryStore("copy")
    for info in store.list(""):
        copied.put(info.key, store.get(info.key, limit=info.size))
    return copied


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectMissing:
        return False
    return True

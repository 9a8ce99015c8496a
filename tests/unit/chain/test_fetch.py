"""A fetcher returns only checked data. It waits for missing objects unless it knows that they are gone."""

import dataclasses
import queue
import threading

import pytest
from blake3 import blake3
from hand_made_chain import ClockedStore

from deltawire.chain import fetch
from deltawire.chain.fetch import Fetcher
from deltawire.errors import CorruptRecord, DataDamaged, DataMissing, LimitExceeded, VersionGone
from deltawire.events import Stopwatch
from deltawire.format.records.record_parts import FileEntry, Limits
from deltawire.store import keys


def put(store, data, seq=1):
    digest = blake3(data).hexdigest()
    key = keys.data_key(1, seq, digest, "safetensors")
    store.put(key, data)
    return FileEntry(key, len(data), len(data), digest, None, 0, 1)


@pytest.fixture
def store():
    return ClockedStore()


class Patience:
    """A clock that moves only when code sleeps."""

    def __init__(self, during=lambda slept: None):
        self.time = 0.0
        self.during = during

    def sleep(self, seconds):
        self.time += seconds
        self.during(self.time)

    def options(self, patience=30.0):
        return {"sleep": self.sleep, "clock": lambda: self.time, "patience": patience}


@pytest.mark.parametrize("size", [0, 1, 1000, 3 << 20])
def test_fetch_gives_the_bytes(store, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert bytes(Fetcher(store).fetch(put(store, data))) == data


def test_fetch_reads_a_damaged_object_once_more(store):
    entry = put(store, b"right")
    store.put(entry.key, b"wrong")
    events = []

    def heal(event):
        events.append(event.name)
        store.put(entry.key, b"right")

    assert bytes(Fetcher(store, on_event=heal).fetch(entry)) == b"right"
    assert events == ["retrying"]


@pytest.mark.parametrize("damage", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], lambda data: b""])
def test_fetch_refuses_what_stays_damaged(store, tmp_path, damage):
    data = bytes(range(200))
    entry = put(store, data)
    store.put(entry.key, damage(data))
    with pytest.raises(DataDamaged):
        Fetcher(store).fetch(entry)
    assert [op for op, _ in store.requests] == ["read", "read"]
    with pytest.raises(DataDamaged):
        Fetcher(store).fetch_to_file(entry, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_fetch_waits_for_what_replication_has_not_delivered_yet(store):
    entry = put(store, b"late")
    store.delete([entry.key])
    patience = Patience(lambda slept: store.put(entry.key, b"late") if slept > 3 else None)
    assert bytes(Fetcher(store, **patience.options()).fetch(entry)) == b"late"


def test_fetch_waits_no_longer_than_it_is_told(store):
    entry = put(store, b"never")
    store.delete([entry.key])
    patience = Patience()
    with pytest.raises(DataMissing):
        Fetcher(store, **patience.options(patience=7.0)).fetch(entry)
    assert 3 < patience.time <= 7


def test_fetch_does_not_wait_for_what_was_collected(store):
    entry = put(store, b"gone")
    store.delete([entry.key])
    patience = Patience()
    with pytest.raises(VersionGone):
        Fetcher(store, **patience.options()).fetch(entry, collected=lambda: True)
    assert patience.time == 0
    with pytest.raises(DataMissing):
        Fetcher(store, **patience.options()).fetch(entry, collected=lambda: False)


def test_fetch_stops_waiting_when_it_is_cancelled(store):
    entry = put(store, b"never")
    store.delete([entry.key])
    stopped = []
    patience = Patience(lambda slept: stopped.append(slept) if slept > 1 else None)
    with pytest.raises(DataMissing):
        Fetcher(store, is_stopped=lambda: bool(stopped), **patience.options()).fetch(entry)
    assert patience.time < 1.5


def test_an_abandoned_prefetch_leaves_no_thread_waiting(store):
    """Otherwise closing the prefetch would take as long as its threads are willing to wait."""
    entries = [put(store, bytes([i]) * 100) for i in range(3)]
    store.delete([entries[1].key])
    events = queue.SimpleQueue()
    fetcher = Fetcher(store, patience=1e9, on_event=events.put)
    reading = fetcher.prefetch(entries)
    next(reading)
    assert events.get().name == "retrying"
    reading.close()
    store.put(entries[1].key, bytes([1]) * 100)
    assert len(list(fetcher.prefetch(entries))) == 3


def test_a_size_for_which_there_is_no_memory_is_beyond_the_limits(store):
    for size in (1 << 60, 2**63 - 1):
        entry = dataclasses.replace(put(store, b"small"), size=size)
        with pytest.raises(LimitExceeded, match="no memory"):
            Fetcher(store, limits=Limits(file_bytes=2**63 - 1)).fetch(entry)


def test_fetch_allocates_nothing_beyond_the_limits(store):
    entry = dataclasses.replace(put(store, b"small"), size=1 << 60)
    for call in (lambda f: f.fetch(entry), lambda f: list(f.prefetch([entry]))):
        with pytest.raises(LimitExceeded):
            call(Fetcher(store, limits=Limits(file_bytes=1000)))
    assert store.requests == []


@pytest.mark.parametrize("key", ["run.json", "../secret", "commit/00000000000000000001.json", "data/1/2/3.safetensors"])
def test_fetch_reads_data_objects_only(store, key):
    with pytest.raises(CorruptRecord):
        Fetcher(store).fetch(FileEntry(key, 1, 1, "0" * 64))
    assert store.requests == []


@pytest.mark.parametrize("budget", [1, 250, 1 << 30])
def test_prefetch_gives_all_in_order(store, budget):
    entries = [put(store, bytes([i]) * 100) for i in range(20)]
    found = list(Fetcher(store, budget=budget, streams=3).prefetch(entries))
    assert [(entry, bytes(data)) for entry, data in found] == [(entry, bytes([i]) * 100) for i, entry in enumerate(entries)]


class WideningStore(ClockedStore):
    """A store whose link turns out to be faster. Reads wait until as many of them run at once as the fetcher should start."""

    streams = 2
    expected = 4

    def __init__(self):
        super().__init__()
        self.together = threading.Condition()
        self.running = self.most = 0

    def read_into(self, key, buffer, **options):
        with self.together:
            self.running += 1
            self.most = max(self.most, self.running)
            self.together.notify_all()
            assert self.together.wait_for(lambda: self.most >= self.expected, 60)
        super().read_into(key, buffer, **options)
        with self.together:
            self.running -= 1


def test_prefetch_follows_the_streams_of_the_store(monkeypatch):
    store = WideningStore()
    entries = [put(store, bytes([i]) * 100) for i in range(60)]
    coming = Fetcher(store).prefetch(entries)
    found = [next(coming)]
    assert store.most == 4
    store.expected = 17  # three of the twenty may have ended already
    monkeypatch.setattr(WideningStore, "streams", 10)
    found += list(coming)
    assert [bytes(data) for _, data in found] == [bytes([i]) * 100 for i in range(60)]
    assert 17 <= store.most <= 20
    monkeypatch.setattr(WideningStore, "streams", 1000)
    assert Fetcher(store)._most_flying() == 64


def test_a_store_learns_of_damage_before_the_object_is_read_again(store, monkeypatch):
    entry = put(store, b"right")
    store.put(entry.key, b"wrong")
    monkeypatch.setattr(store, "doubt", lambda key: store.put(key, b"right"))
    assert bytes(Fetcher(store).fetch(entry)) == b"right"


def test_prefetch_reads_no_further_ahead_than_its_budget(store):
    entries = [put(store, bytes([i]) * 100) for i in range(20)]
    reading = Fetcher(store, budget=350, streams=8).prefetch(entries)
    next(reading)
    reading.close()
    assert len(store.requests) <= 3


def test_prefetch_fails_like_fetch(store):
    entries = [put(store, bytes([i]) * 100) for i in range(6)]
    store.put(entries[3].key, b"?" * 100)
    seen = []
    with pytest.raises(DataDamaged):
        seen.extend(entry for entry, _ in Fetcher(store).prefetch(entries))


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
def test_fetch_to_file_goes_through_windows(store, tmp_path, monkeypatch, size):
    monkeypatch.setattr(fetch, "_WINDOW", 1000)
    data = bytes(i % 251 for i in range(size))
    moved = []
    Fetcher(store).fetch_to_file(put(store, data), tmp_path / "file", progress=moved.append)
    assert (tmp_path / "file").read_bytes() == data
    assert sum(moved) == size


def test_fetch_to_file_keeps_a_file_that_is_there(store, tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        Fetcher(store).fetch_to_file(put(store, b"theirs"), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_fetch_says_where_the_time_went(store, tmp_path):
    watch = Stopwatch()
    fetcher = Fetcher(store, watch=watch)
    fetcher.fetch(put(store, b"data"))
    assert set(watch.seconds) == {"fetch", "verify"}
    fetcher.fetch_to_file(put(store, b"data"), tmp_path / "file")
    assert set(watch.seconds) == {"fetch", "verify", "write"}

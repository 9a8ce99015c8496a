"""Directories and memory are waited for without requests; remote stores compare ETags."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore.store
import pytest

from deltawire.errors import ObjectMissing
from deltawire.store import StoreOptions, local
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.remote import Clients, RemoteStore
from deltawire.store.wrapped import WrappedStore


class FakeTime:
    """A clock that moves only when code sleeps, and calls `during` with the number of the sleep."""

    def __init__(self, during=lambda slept: None):
        self.now = 1000.0
        self.slept = 0
        self.during = during

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        self.during(self.slept)


class CountingStore(LocalStore):
    reads = 0

    def get(self, key: str, *, limit: int) -> bytes:
        self.reads += 1
        return super().get(key, limit=limit)


def test_a_directory_is_looked_at_until_the_object_changes(tmp_path, monkeypatch):
    store = CountingStore(tmp_path)
    store.put("key", b"old")
    _, tag = store.get_if_changed("key", limit=9, tag=None)
    clock = FakeTime(lambda slept: store.put("key", b"new") if slept == 40 else None)
    monkeypatch.setattr(local, "time", clock)
    store.reads = 0
    assert store.wait_for_change("key", limit=9, tag=tag, timeout=60)[0] == b"new"
    assert clock.slept == 40
    assert store.reads == 2  # at the beginning, and after the change


def test_a_directory_is_waited_for_while_the_object_is_missing(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    clock = FakeTime(lambda slept: store.put("key", b"new") if slept == 40 else None)
    monkeypatch.setattr(local, "time", clock)
    assert store.wait_for_change("key", limit=9, tag=None, timeout=60)[0] == b"new"


def test_waiting_for_a_directory_ends_with_the_time(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("key", b"same")
    _, tag = store.get_if_changed("key", limit=9, tag=None)
    clock = FakeTime()
    monkeypatch.setattr(local, "time", clock)
    assert store.wait_for_change("key", limit=9, tag=tag, timeout=7) is None
    assert clock.now == pytest.approx(1007)
    with pytest.raises(ObjectMissing):
        store.wait_for_change("missing", limit=9, tag=tag, timeout=5)
    assert clock.now == pytest.approx(1012)


def test_a_file_with_the_inode_and_time_of_the_old_one_is_noticed(tmp_path, monkeypatch):
    """File systems use inodes again, and their clocks are coarse: two files that follow each other may look the same."""
    store = LocalStore(tmp_path)
    store.put("key", b"old")
    _, tag = store.get_if_changed("key", limit=9, tag=None)
    before = os.stat(tmp_path / "key")

    def replace(slept: int) -> None:
        if slept == 3:
            with Path(tmp_path / "key").open("r+b") as file:
                file.write(b"new")
            os.utime(tmp_path / "key", ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(local, "time", FakeTime(replace))
    assert store.wait_for_change("key", limit=9, tag=tag, timeout=float("inf"))[0] == b"new"


@pytest.mark.parametrize("is_there", [True, False])
def test_memory_wakes_those_who_wait(is_there):
    looked = threading.Event()

    class Watched(MemoryStore):
        def get_if_changed(self, key, *, limit, tag):
            try:
                return super().get_if_changed(key, limit=limit, tag=tag)
            finally:
                looked.set()

    store = Watched()
    tag = None
    if is_there:
        store.put("key", b"old")
        _, tag = store.get_if_changed("key", limit=9, tag=None)
        looked.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait_for_change, "key", limit=9, tag=tag, timeout=float("inf"))
        assert looked.wait(120)
        store.put("other", b"x")
        store.put_if_absent("key", b"new") if not is_there else store.put("key", b"new")
        assert waiting.result(120)[0] == b"new"


@pytest.mark.parametrize("etag", [None, "", '"' + 5000 * "x" + '"'])
def test_a_service_without_usable_etags_is_compared_by_content(etag, monkeypatch):
    memory = obstore.store.MemoryStore()
    store = RemoteStore(Clients(memory, memory, memory, memory), url="test://b", prefix="", options=StoreOptions())
    store.put("key", b"old")
    real = RemoteStore._get

    def without(self, key, limit, unless):
        found = real(self, key, limit, None)
        return found and (found[0], etag)

    monkeypatch.setattr(RemoteStore, "_get", without)
    data, tag = store.get_if_changed("key", limit=9, tag=None)
    assert (data, len(tag)) == (b"old", 64)
    assert store.get_if_changed("key", limit=9, tag=tag) is None
    store.put("key", b"new")
    assert store.get_if_changed("key", limit=9, tag=tag)[0] == b"new"


def test_a_wrapped_store_passes_everything_on():
    calls = []

    class Inner(MemoryStore):
        streams = 17
        link = "link"

        def doubt(self, key):
            calls.append(("doubt", key))

    class Watching(WrappedStore):
        def watch(self, call):
            calls.append((call.operation, call.key))
            return super().watch(call)

    store = Watching(Inner())
    store.inner.put("key", b"x")
    _, tag = store.get_if_changed("key", limit=1, tag=None)
    assert store.wait_for_change("key", limit=1, tag=tag, timeout=0) is None
    store.doubt("key")
    assert (store.streams, store.link) == (17, "link")
    assert calls == [("get_if_changed", "key"), ("wait_for_change", "key"), ("doubt", "key")]

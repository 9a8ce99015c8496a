"""The host cache keeps within its room: files that are no longer used make room for new ones."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shared_host import Host
from toy_chain import ToyChain

from deltawire.chain.fetch import Fetcher
from deltawire.errors import DataMissing
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe.cache import cache_folder
from deltawire.subscribe.cache.cache_folder import CacheFolder
from deltawire.subscribe.cache.host_cache import HostCache
from deltawire.subscribe.mirror.locks import FileLock

ROOMY = 1 << 30


def entry_of(host: Host) -> FileEntry:
    return host.chain.commits[1].files[0]


def cache_of(folder: Path, most_bytes: int, host: Host) -> HostCache:
    return HostCache([CacheFolder(folder, most_bytes, most_bytes)], on_event=host.events.append)


def put(cache: HostCache, chain: ToyChain, entry: FileEntry) -> bytes:
    return bytes(Fetcher(chain.store, shared=cache).fetch(entry))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def named(*entries: FileEntry) -> set[str]:
    return {f"{entry.blake3}-{entry.size}" for entry in entries}


def test_files_that_were_not_used_for_longest_make_room(host: Host, tmp_path: Path) -> None:
    first, second, third = (host.chain.upload(bytes([number]) * 1000, "file", raw=0) for number in range(3))
    cache = cache_of(tmp_path / "small", 2500, host)
    put(cache, host.chain, first)
    put(cache, host.chain, second)
    for age, entry in ((20, second), (10, first)):
        for name in named(entry):
            os.utime(tmp_path / "small" / name, times=(0, time.time() - age))
    put(cache, host.chain, third)
    assert names(tmp_path / "small") == named(first, third)
    large = host.chain.upload(b"x" * 2501, "file", raw=0)
    assert put(cache, host.chain, large) == b"x" * 2501
    assert names(tmp_path / "small") == named(first, third)
    assert host.reasons() == ["it is too large for the host cache."]


def test_files_that_nobody_uses_any_more_are_deleted(host: Host, tmp_path: Path) -> None:
    first, second, third = (host.chain.upload(bytes([number]) * 1000, "file", raw=0) for number in range(3))
    cache = cache_of(tmp_path / "cache", ROOMY, host)
    put(cache, host.chain, first)
    put(cache, host.chain, second)
    for name in named(first):
        left = tmp_path / "cache" / f"{name}.part0"
        left.write_bytes(b"of a killed process")
        for path in (tmp_path / "cache" / name, left):
            os.utime(path, times=(0, time.time() - cache_folder.IDLE_SECONDS - 1))
    put(cache, host.chain, third)
    assert names(tmp_path / "cache") == named(second, third)


def test_a_file_that_is_being_fetched_counts_with_its_full_size_and_stays(host: Host, tmp_path: Path) -> None:
    first, second = (host.chain.upload(bytes([number]) * 1000, "file", raw=0) for number in range(2))
    folder = tmp_path / "cache"
    cache = cache_of(folder, 1500, host)
    folder.mkdir(mode=0o700)
    part = folder / f"{next(iter(named(first)))}.part0"
    lock = FileLock.try_exclusive(part)
    assert lock is not None
    os.utime(part, times=(0, 0))
    with lock:
        assert put(cache, host.chain, second) == bytes([1]) * 1000
        assert names(folder) == {part.name}
        assert len(host.reasons()) == 1
    put(cache, host.chain, second)
    assert names(folder) == named(second)


def test_a_reader_of_a_file_that_is_deleted_meanwhile_reads_on(host: Host, tmp_path: Path) -> None:
    first, second = (host.chain.upload(bytes([number]) * 1000, "file", raw=0) for number in range(2))
    cache = cache_of(tmp_path / "cache", 1500, host)
    put(cache, host.chain, first)
    buffer = bytearray(1000)
    with cache.opened(first, lambda *_: pytest.fail("it is there"), None, lambda: False) as file:
        assert file is not None
        file.read(memoryview(buffer)[:500], 0)
        put(cache, host.chain, second)
        assert names(tmp_path / "cache") == named(second)
        file.read(memoryview(buffer)[500:], 500)
    assert buffer == bytes(1000)


def test_a_process_that_waits_for_a_file_gets_it_even_if_it_is_deleted_at_once(host: Host, tmp_path: Path) -> None:
    """A cache with room for one file is enough for a large checkpoint, because those that wait have its file open."""
    first, second = (host.chain.upload(bytes([number]) * 1000, "file", raw=0) for number in range(2))
    folder = tmp_path / "cache"
    leading, waiting, go_on, look_again = (threading.Event() for _ in range(4))

    class HeldStore(WrappedStore):
        def read_into(self, key: str, buffer: memoryview, **more: Any) -> None:
            leading.set()
            assert go_on.wait(60)
            super().read_into(key, buffer, **more)

    def wait(_: float) -> None:
        waiting.set()
        assert look_again.wait(60)

    with ThreadPoolExecutor(2) as threads:
        leader = threads.submit(Fetcher(HeldStore(host.chain.store), shared=cache_of(folder, 1500, host)).fetch, first)
        assert leading.wait(60)
        other = HostCache([CacheFolder(folder, 1500, 1500)], patience=600, sleep=wait)
        nothing = MemoryStore()
        follower = threads.submit(Fetcher(nothing, shared=other, patience=0).fetch, first)
        assert waiting.wait(60)
        go_on.set()
        leader.result()
        put(cache_of(folder, 1500, host), host.chain, second)
        assert names(folder) == named(second)
        look_again.set()
        assert bytes(follower.result()) == bytes(1000)
    assert other.take_count() == 1000
    assert not host.reasons()


def test_a_file_too_large_for_memory_goes_to_disk_and_one_that_fits_nowhere_is_not_shared(host: Host, tmp_path: Path) -> None:
    memory, disk = CacheFolder(tmp_path / "memory", 1000, 500), CacheFolder(tmp_path / "disk", 1000, 1000)
    cache = HostCache([memory, disk], on_event=host.events.append)
    small, large, larger = (host.chain.upload(bytes([size % 251]) * size, "file", raw=0) for size in (400, 800, 1001))
    for entry in (small, large, larger):
        assert put(cache, host.chain, entry) == bytes([entry.size % 251]) * entry.size
    assert names(memory.path) == named(small)
    assert names(disk.path) == named(large)


def test_a_reader_that_is_closed_waits_no_longer(host: Host, tmp_path: Path) -> None:
    entry = entry_of(host)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    lock = FileLock.try_exclusive(folder / f"{next(iter(named(entry)))}.part0")
    assert lock is not None
    with lock, pytest.raises(DataMissing, match="no longer wanted"):
        Fetcher(host.chain.store, shared=cache_of(folder, ROOMY, host), is_stopped=lambda: True).fetch(entry)


def test_a_missing_object_is_waited_for_without_the_lock(host: Host, tmp_path: Path) -> None:
    entry = entry_of(host)
    host.chain.lose(entry)
    with pytest.raises(DataMissing):
        Fetcher(host.chain.store, shared=cache_of(tmp_path / "cache", ROOMY, host), patience=0).fetch(entry)
    assert names(tmp_path / "cache") == set()

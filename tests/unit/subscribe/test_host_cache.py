"""Test the host cache with real processes: each object is fetched once per host, whoever is killed, and nothing wrong is ever used."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from announced_files import look_and_arrive
from blake3 import blake3
from host_reader import LoggedStore, ReaderProcess, reads, state_hash
from spooled_chain import directory_chain
from support import bits_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.chain import fetch
from deltawire.chain.fetch import Fetcher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DataMissing
from deltawire.events import Event
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.store.wrapped import WrappedStore
from deltawire.subscribe import cache_folder, host_cache, private_folder
from deltawire.subscribe.cache_folder import CacheFolder
from deltawire.subscribe.host_cache import HostCache
from deltawire.subscribe.mirror.locks import FileLock
from deltawire.subscribe.subscriber import Subscriber

ROOMY = 1 << 30


def data_sizes(chain: ToyChain, *, after: int = -1) -> dict[str, int]:
    """Return the size of each data object of the commits above `after`."""
    return {entry.key: entry.size for commit in chain.commits if commit.seq > after for entry in commit.files}


def bytes_read(log: Path) -> dict[str, int]:
    """Return how many bytes of each data object were read from the store, by all processes together."""
    found: dict[str, int] = {}
    for _, key, _, size in reads(log):
        found[key] = found.get(key, 0) + size
    return found


def test_many_processes_fetch_each_object_once_and_have_the_same_bits(tmp_path: Path) -> None:
    chain = directory_chain(tmp_path / "store")
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(ReaderProcess(tmp_path / "store", tmp_path / "cache", log)) for _ in range(4)]
        for reader in readers:
            reader.tell("sync")
        results = [reader.result() for reader in readers]
        route = bytes_read(log)
        sizes = data_sizes(chain)
        assert route == {key: sizes[key] for key in route}
        assert {each["state"] for each in results} == {state_hash(chain.state)}
        assert sum(each["shared"] for each in results) == 3 * sum(route.values())
        assert not any(each["not_shared"] for each in results)
        before = chain.commits[-1].seq
        chain.grow(3)
        for reader in readers:
            reader.tell("sync")
        results = [reader.result() for reader in readers]
    assert {each["state"] for each in results} == {state_hash(chain.state)}
    assert bytes_read(log) == route | data_sizes(chain, after=before)


WINDOW = 256


def chain_of_one_file(folder: Path) -> tuple[ToyChain, FileEntry]:
    """Return a chain with one full checkpoint in one file, of several windows."""
    chain = ToyChain(LocalStore(folder), shards=1)
    entry = chain.anchor(first_state()).files[0]
    assert entry.size > 5 * WINDOW
    return chain, entry


@contextlib.contextmanager
def two_readers(tmp_path: Path, *, patience: float = 600.0) -> Iterator[tuple[ReaderProcess, ReaderProcess]]:
    """Yield two readers of such a chain. The first one is held before its third window, and the other one waits for it."""
    store, cache, log = tmp_path / "store", tmp_path / "cache", tmp_path / "log"
    with (
        ReaderProcess(store, cache, log, window=WINDOW, hold=3) as leader,
        ReaderProcess(store, cache, log, window=WINDOW, patience=patience) as other,
    ):
        leader.tell("sync")
        leader.wait_for("reading")
        other.tell("sync")
        other.wait_for("waiting")
        yield leader, other


def test_when_the_process_that_fetches_is_killed_another_one_continues_its_file(tmp_path: Path) -> None:
    chain, entry = chain_of_one_file(tmp_path / "store")
    with two_readers(tmp_path) as (leader, other):
        leader.process.send_signal(signal.SIGKILL)
        leader.process.wait()
        result = other.result()
    assert result == {"seq": 1, "state": state_hash(chain.state), "shared": 0, "not_shared": []}
    offsets = [offset for process, _, offset, _ in reads(tmp_path / "log") if process == other.process.pid]
    assert WINDOW <= offsets[0] <= 2 * WINDOW  # the last window before the one that was held may not have been written yet
    with ReaderProcess(tmp_path / "store", tmp_path / "cache", tmp_path / "log") as third:
        third.tell("sync")
        assert third.result()["shared"] == entry.size
    assert {process for process, *_ in reads(tmp_path / "log")} == {leader.process.pid, other.process.pid}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{entry.blake3}-{entry.size}"]


def test_a_process_that_is_stopped_while_it_fetches_gets_a_successor(tmp_path: Path) -> None:
    chain, entry = chain_of_one_file(tmp_path / "store")
    with two_readers(tmp_path, patience=0.2) as (leader, other):
        leader.process.send_signal(signal.SIGSTOP)
        with ReaderProcess(tmp_path / "store", tmp_path / "cache", tmp_path / "log", window=WINDOW, patience=0.2) as third:
            third.tell("sync")
            both = [other.result(), third.result()]
        assert {each["state"] for each in both} == {state_hash(chain.state)}
        assert all(reason == host_cache.STALLED for each in both for reason in each["not_shared"])
        assert any(each["not_shared"] for each in both)
        leader.process.send_signal(signal.SIGCONT)
        leader.tell("go on")
        assert leader.result() == {"seq": 1, "state": state_hash(chain.state), "shared": 0, "not_shared": []}
    found = [path for path in (tmp_path / "cache").iterdir() if ".part" not in path.name]
    assert [path.name for path in found] == [f"{entry.blake3}-{entry.size}"]
    assert blake3(found[0].read_bytes()).hexdigest() == entry.blake3


class DyingCalls:
    """Stands for the module `os`. Kills this process before the call number `at` of those that change files or look at them."""

    COUNTED = frozenset({"open", "close", "stat", "fstat", "rename", "unlink", "utime", "write", "ftruncate", "readv", "listdir"})

    def __init__(self, at: int) -> None:
        self._left = at
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in self.COUNTED:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return found(*arguments, **named)

        return call


def test_a_process_that_is_killed_at_any_step_leaves_a_cache_that_the_next_one_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, entry = chain_of_one_file(tmp_path / "store")
    monkeypatch.setattr(fetch, "_WINDOW", WINDOW)
    for at in itertools.count(1):
        host = Host(tmp_path, chain, number=at)
        child = os.fork()
        if child == 0:
            try:
                calls: Any = DyingCalls(at)
                for module in (cache_folder, host_cache, fetch):
                    module.os = calls  # type: ignore[attr-defined]
                host.sync()
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        assert host.sync() <= entry.size
        assert host.sync() == 0
        assert not host.reasons()
        assert [path.name for path in host.files() if ".part" not in path.name] == [f"{entry.blake3}-{entry.size}"]
        if code == 0:
            break
    assert at > 20


@pytest.fixture
def chain(tmp_path: Path) -> ToyChain:
    return directory_chain(tmp_path / "store")


class Host:
    """Readers of a chain in this process that share a cache, and what they did."""

    def __init__(self, tmp_path: Path, chain: ToyChain, number: int = 0) -> None:
        self.chain = chain
        self.folder = tmp_path / f"cache-{number}"
        self.events: list[Event] = []
        self._store = tmp_path / "store"
        self._logs = (tmp_path / f"log-{number}-{count}-of-{os.getpid()}" for count in range(100))

    def sync(self) -> int:
        """Let a new reader reach the newest version. Return how many bytes of data it has read from the store."""
        log = next(self._logs)
        options = ReaderOptions(pin=False, host_cache=self.folder)
        with Subscriber(LoggedStore(self._store, log), options=options, on_event=self.events.append) as reader:
            reader.sync()
            assert bits_of(dict(reader.state)) == bits_of(self.chain.state)
        return sum(bytes_read(log).values())

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir())

    def reasons(self) -> list[object]:
        return [event.fields["reason"] for event in self.events if event.name == "not-shared"]


@pytest.fixture
def host(tmp_path: Path, chain: ToyChain) -> Host:
    return Host(tmp_path, chain)


def test_the_second_reader_reads_nothing_from_the_store(host: Host) -> None:
    first = host.sync()
    assert first > 0
    assert host.sync() == 0
    shared = [event.fields["shared_bytes"] for event in host.events if event.name == "synced"]
    assert shared == [0, first]
    assert stat.S_IMODE(host.folder.stat().st_mode) == 0o700


def test_announced_files_are_fetched_once_per_host_and_count_as_shared_in_the_next_sync(
    chain: ToyChain, host: Host, tmp_path: Path
) -> None:
    options = ReaderOptions(pin=False, host_cache=host.folder)
    log = tmp_path / "log"
    events: tuple[list[Event], list[Event]] = ([], [])
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(Subscriber(LoggedStore(tmp_path / "store", log), options=options, on_event=each.append)) for each in events
        ]
        for reader in readers:
            reader.sync()
        before = len(reads(log))
        new = next_state(chain.state, 1)
        files = chain.delta_files(chain.state, new)
        chain.announce(files)
        for reader in readers:
            look_and_arrive(reader)
        chain.delta(new, files)
        for reader in readers:
            reader.sync()
            assert bits_of(dict(reader.state)) == bits_of(new)
    synced = [[event.fields for event in each if event.name == "synced"][-1] for each in events]
    size = sum(entry.size for entry in files)
    assert sorted(key for _, key, _, _ in reads(log)[before:]) == sorted(entry.key for entry in files)
    assert [each["ahead_bytes"] for each in synced] == [size, size]
    assert [each["shared_bytes"] for each in synced] == [0, size]


def flip_a_bit(path: Path, precious: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path, precious: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def make_longer(path: Path, precious: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace_by_link(path: Path, precious: Path) -> None:
    path.unlink()
    path.symlink_to(precious)


def replace_by_second_name(path: Path, precious: Path) -> None:
    path.unlink()
    path.hardlink_to(precious)


def replace_by_pipe(path: Path, precious: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_socket(path: Path, precious: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.getcwd()
        os.chdir(path.parent)  # the whole path would be too long
        try:
            bound.bind(path.name)
        finally:
            os.chdir(folder)


def give_away(path: Path, precious: Path) -> None:
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    else:  # only root can give files away
        path.unlink()


DAMAGES = [give_away, flip_a_bit, cut_short, make_longer, replace_by_link, replace_by_second_name, replace_by_pipe, replace_by_socket]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_with_wrong_content_costs_one_fetch_and_nothing_else(
    host: Host, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"not of the cache")
    everything = host.sync()
    for path in host.files():
        damage(path, precious)
    assert host.sync() == everything
    assert host.sync() == 0
    assert precious.read_bytes() == b"not of the cache"
    assert not host.reasons()


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unfinished_file_that_holds_something_else_is_never_used(
    host: Host, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"not of the cache")
    everything = host.sync()
    for path in host.files():
        damage(path, precious)
        path.rename(f"{path}.part0")
    assert host.sync() <= 2 * everything  # the end of a file of almost the right size is fetched before it proves to be wrong
    assert host.sync() == 0
    assert precious.read_bytes() == b"not of the cache"
    assert not host.reasons()


def test_a_directory_with_the_name_of_a_file_only_keeps_this_file_from_being_shared(host: Host) -> None:
    everything = host.sync()
    path = host.files()[0]
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    assert host.sync() == size
    assert host.sync() == size
    assert len(host.reasons()) == 2
    assert everything > size


def test_a_directory_that_other_users_can_write_to_is_not_used(host: Host) -> None:
    host.folder.mkdir()
    host.folder.chmod(0o770)
    everything = host.sync()
    assert everything == host.sync()
    assert host.files() == []
    assert len(host.reasons()) == 2
    assert all("only this user can write to" in str(reason) for reason in host.reasons())


def test_the_directory_of_another_user_is_not_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = host.sync()
    user = os.getuid() + 1
    if os.getuid() == 0:
        os.chown(host.folder, user, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user)
    assert host.sync() == everything
    assert len(host.reasons()) == 1


def test_a_link_to_a_directory_is_not_used(host: Host, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    host.folder.symlink_to(tmp_path / "elsewhere")
    assert host.sync() == host.sync() > 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_disk_that_is_full_stops_no_reader(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    full: list[int] = []

    def fail(descriptor: int, data: bytes) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(host.folder)):
            full.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(fetch.os, "write", fail)
        host.sync()
    assert full
    assert host.files() == []
    assert any("No space left" in str(reason) for reason in host.reasons())
    assert host.sync() > 0
    assert host.sync() == 0


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


def test_the_usual_directories_vanish_with_the_last_process_that_uses_them(tmp_path: Path, chain: ToyChain) -> None:
    """One process ends and another one is killed. The third one finds what they left, and deletes it when it ends."""
    environment = {"TMPDIR": str(tmp_path)}
    usual = tmp_path / f"deltawire-{os.getuid()}" / "host-cache"
    log = tmp_path / "log"
    with ReaderProcess(tmp_path / "store", "auto", log, environment=environment, memory=str(tmp_path)) as first:
        first.tell("sync")
        first.result()
        assert usual.is_dir()
        with ReaderProcess(tmp_path / "store", "auto", log, environment=environment, memory=str(tmp_path)) as second:
            second.tell("sync")
            assert second.result()["shared"] == sum(bytes_read(log).values())
            assert second.end() == 0
        assert usual.is_dir()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    assert usual.is_dir()
    with ReaderProcess(tmp_path / "store", "auto", log, environment=environment, memory=str(tmp_path)) as third:
        third.tell("sync")
        assert third.result()["shared"] == 0  # what killed processes left was deleted first
        assert third.end() == 0
    assert not usual.exists()


def test_usual_directories_that_others_have_made_are_not_used_and_the_reason_is_told(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cache, "MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = tmp_path / f"deltawire-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    events: list[Event] = []
    with Subscriber(host.chain.store, options=ReaderOptions(pin=False, host_cache="auto"), on_event=events.append) as reader:
        reader.sync()
        assert bits_of(dict(reader.state)) == bits_of(host.chain.state)
    reasons = [event.fields["reason"] for event in events if event.name == "not-shared"]
    assert reasons == [f"{taken} is not a directory that only this user can write to."]
    assert not list(taken.iterdir())


def test_a_process_that_stops_while_it_deletes_the_usual_directories_holds_up_nobody_for_long(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cache, "MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private_folder, "_PATIENCE", 0.0)
    folder = tmp_path / f"deltawire-{os.getuid()}" / "host-cache"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    deleting = FileLock.try_exclusive(folder / private_folder.ALIVE)
    assert deleting is not None
    events: list[Event] = []
    with deleting, Subscriber(host.chain.store, options=ReaderOptions(pin=False, host_cache="auto"), on_event=events.append) as reader:
        reader.sync()
        assert bits_of(dict(reader.state)) == bits_of(host.chain.state)
    (told,) = [str(event.fields["reason"]) for event in events if event.name == "not-shared"]
    assert "is being deleted by another process" in told


def test_a_lock_of_a_deleted_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / private_folder.ALIVE
    path.touch()
    lock = FileLock.try_shared(path)
    assert lock is not None
    with lock:
        assert lock.is_on(path)
        path.unlink()
        assert not lock.is_on(path)
        path.touch()
        assert not lock.is_on(path)

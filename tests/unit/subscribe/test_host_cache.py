"""Test the host cache with real processes: each object is fetched once per host, whoever is killed, and nothing wrong is ever used."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from announced_files import look_and_arrive
from blake3 import blake3
from host_reader import LoggedStore, ReaderProcess, reads, state_hash
from shared_host import Host, bytes_read
from spooled_chain import directory_chain
from support import bits_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.chain import fetch
from deltawire.chain.reader_options import ReaderOptions
from deltawire.events import Event
from deltawire.format.records.record_parts import FileEntry
from deltawire.store.local import LocalStore
from deltawire.subscribe.cache import cache_folder, host_cache, private_folder
from deltawire.subscribe.mirror.locks import FileLock
from deltawire.subscribe.subscriber import Subscriber


def data_sizes(chain: ToyChain, *, after: int = -1) -> dict[str, int]:
    """Return the size of each data object of the commits above `after`."""
    return {entry.key: entry.size for commit in chain.commits if commit.seq > after for entry in commit.files}


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
    """Takes the place of the module `os`. Kills this process before the call number `at` of those that change files or look at them."""

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


def test_the_second_reader_reads_nothing_from_the_store(host: Host) -> None:
    first = host.sync()
    assert first > 0
    assert host.sync() == 0
    shared = [event.fields["shared_bytes"] for event in host.events if event.name == "synced"]
    assert shared == [0, first]
    assert stat.S_IMODE(host.folder.stat().st_mode) == 0o700


def test_announced_files_are_fetched_once_per_host_and_count_as_shared_in_the_next_sync(host: Host, tmp_path: Path) -> None:
    chain = host.chain
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


def test_the_usual_directories_vanish_with_the_last_process_that_uses_them(tmp_path: Path) -> None:
    """One process ends and another one is killed. The third one finds what they left, and deletes it when it ends."""
    directory_chain(tmp_path / "store")
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

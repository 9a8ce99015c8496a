"""Readers always hold one whole version, even if the store fails or lies at any call, or if they are killed at any step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from publications import Listener, bits_at, open_publisher, open_subscriber, published
from support import PACKAGE, bits_of

from deltawire.errors import CorruptRecord, DataMissing, MirrorError, NoChain, RollbackDetected, StoreUnavailable
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber, reading_mirror
from deltawire.subscribe.mirror import mirror
from deltawire.testing import After, Before, FaultyStore, ProcessDied, Reading
from deltawire.testing.faulty_store import Fault

Open = Callable[[FaultyStore], Subscriber]


def assert_whole(reader: Subscriber) -> None:
    """Check that the reader holds exactly the weights of its version, or no version yet."""
    if reader.version is not None:
        assert reader.version.step is not None
        assert bits_of(reader.state) == bits_at(reader.version.step)


def assert_faults_heal(fault: Callable[[int], Fault], expected: type[Exception] | tuple[type[Exception], ...], opened: Open) -> None:
    """Let a reader join and later catch up. Each call fails in one run. The next sync after the fault must succeed."""
    index = 0
    while True:
        inner, ledger = published(4)
        store = FaultyStore(inner, [fault(index)])
        store.remember()
        with opened(store) as reader:
            for more in (0, 3):
                if more:
                    with open_publisher(inner) as publisher:
                        ledger.publish(publisher, more)
                for _ in range(3):  # the fault happens once, perhaps only in a sync that finds nothing new
                    with contextlib.suppress(expected):
                        reader.sync()
                    assert_whole(reader)
                assert reader.version is not None
                assert reader.version.step == ledger.newest
        if index >= len(store.calls):
            assert index > 15
            return
        print(store.calls[index])
        index += 1


@pytest.fixture(params=["memory", "mirror", "host cache"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open readers, each with its own mirror, or its own host cache, or neither."""
    folders = (tmp_path / str(number) for number in range(10**6))

    def opened(store: FaultyStore) -> Subscriber:
        if request.param == "host cache":
            return open_subscriber(store, pin=True, host_cache=next(folders))
        return open_subscriber(store, None if request.param == "memory" else next(folders), pin=True)

    return opened


def test_a_reader_whose_store_is_unavailable_at_any_call_keeps_its_version_and_continues(opened: Open) -> None:
    assert_faults_heal(lambda index: Before(index, "unavailable"), StoreUnavailable, opened)


def test_a_reader_that_is_told_at_any_call_that_an_object_is_missing_keeps_its_version_and_continues(opened: Open) -> None:
    assert_faults_heal(lambda index: Reading(index, "missing"), (NoChain, DataMissing, RollbackDetected), opened)


def test_a_reader_that_is_given_a_flipped_bit_at_any_call_keeps_its_version_and_continues(opened: Open) -> None:
    assert_faults_heal(lambda index: Reading(index, "flip"), CorruptRecord, opened)


def test_a_reader_that_is_given_half_an_object_at_any_call_keeps_its_version_and_continues(opened: Open) -> None:
    assert_faults_heal(lambda index: Reading(index, "truncate"), CorruptRecord, opened)


def test_a_reader_that_is_shown_the_past_at_any_call_keeps_its_version_and_continues(opened: Open) -> None:
    assert_faults_heal(lambda index: Reading(index, "stale"), DataMissing, opened)


def test_a_memory_reader_cut_off_at_any_call_holds_a_whole_version() -> None:
    """The reader is interrupted as by Ctrl-C. The process continues with what its reader holds."""
    for fault in (Before, After):
        index, died = 0, True
        while died:
            inner, ledger = published(2)
            due = [10**6]
            store = FaultyStore(inner, [fault(lambda call, due=due: call.index == due[0], "crash")])
            reader = open_subscriber(store)
            reader.sync()
            with open_publisher(inner) as publisher:
                ledger.publish(publisher, 2)
            due[0] = len(store.calls) + index
            with contextlib.suppress(ProcessDied):
                reader.sync()
            died, store.died, due[0] = store.died, False, -1
            assert_whole(reader)
            assert reader.sync().step == ledger.newest
            assert_whole(reader)
            index += 1
        assert index > 5


KILLER = """
import json, os, shutil, signal, sys, threading
from collections import Counter
from pathlib import Path
from publications import bits_at
from support import bits_of
from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import MirrorError
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store.local import LocalStore
from deltawire.subscribe import Subscriber, reading_mirror
from deltawire.testing import Before, FaultyStore

os.fsync = lambda file: None  # processes die here, not machines
store, prepared, work, newest = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

def in_child(job):
    "Fork before any thread exists: what a child does, and dies of, is its own."
    pid = os.fork()
    if not pid:
        try:
            job()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def stopping_at(point, mirror):
    "A sync that is killed at its point, the name of a call or step and which one of that name; threads may pass points in any order."
    def job():
        passed, one_at_a_time = Counter(), threading.Lock()
        def passing(what):
            with one_at_a_time:
                passed[str(what)] += 1
                if point == (str(what), passed[str(what)]):
                    os.kill(os.getpid(), signal.SIGKILL)
        calls = Before(lambda call: passing(call.op + " " + call.key.split("/")[0]), "crash", times=None)
        faulty = FaultyStore(LocalStore(store), [calls])
        with Subscriber(faulty, mirror, options=ReaderOptions(patience=0.0, pin=False), threads=1) as subscriber:
            subscriber._mirrored._mirror.step = passing
            subscriber.sync()
        (work / "passed").write_text(json.dumps(passed))
    return job

def sound(mirror, must_serve):
    def job():
        try:
            with reading_mirror(mirror) as path:
                step = json.loads(json.loads((path / "deltawire.json").read_text())["record"])["step"]
                assert bits_of(Checkpoint(path)) == bits_at(step)
        except MirrorError:
            assert not must_serve
        with Subscriber(LocalStore(store), mirror, options=ReaderOptions(patience=0.0, pin=False), threads=1) as subscriber:
            assert subscriber.version is not None or not must_serve
            assert subscriber.sync().step == newest
            assert bits_of(subscriber.state) == bits_at(newest)
        assert len(os.listdir(mirror / "slots")) <= 2
    return job

def sync_and_check(point):
    "Whether the process reached the point, and was killed there."
    mirror = work / "mirror"
    if prepared.exists():
        shutil.copytree(prepared, mirror, symlinks=True)
    code = in_child(stopping_at(point, mirror))
    assert code in (0, -signal.SIGKILL), code
    assert in_child(sound(mirror, prepared.exists())) == 0, point
    shutil.rmtree(mirror)
    return code != 0

work.mkdir(exist_ok=True)
assert not sync_and_check(None)
for what, times in json.loads((work / "passed").read_text()).items():
    for time in range(1, times + 1):
        if sync_and_check((what, time)):
            print(json.dumps(what), flush=True)
"""


def kill_everywhere(store: LocalStore, prepared: Path, work: Path, newest: int) -> list[str]:
    """Kill a reader at every call and step of a sync, and check what the next reader finds. Return the names of these points."""
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGE), str(tests), str(tests.parent)]))
    command = [sys.executable, "-W", "error", "-c", KILLER, str(store.root), str(prepared), str(work), str(newest)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def copied_to(folder: Path, store: MemoryStore) -> LocalStore:
    local = LocalStore(folder)
    for info in store.list(""):
        local.put(info.key, store.get(info.key, limit=info.size))
    return local


def test_a_mirror_whose_first_sync_is_killed_at_any_call_or_step_is_finished_by_the_next_process(tmp_path: Path) -> None:
    store, ledger = published(3)
    local = copied_to(tmp_path / "store", store)
    points = kill_everywhere(local, tmp_path / "none", tmp_path / "work", ledger.newest or 0)
    every_step = {
        "route-chosen",
        "slot-made",
        "anchor-file-fetched",
        "hop-fetched",
        "marked-dirty",
        "file-applied",
        "marked-clean",
        "served",
    }
    assert set(points) >= every_step | {"tidied", "read_into data", "get commit", "list anchor"}


def test_a_mirror_killed_at_any_call_or_step_of_an_update_serves_a_whole_version_and_is_finished_by_the_next_process(
    tmp_path: Path,
) -> None:
    """The reader is killed once while it copies the slot that it serves, and once while it changes its standby slot."""
    store, ledger = published(2)
    local = copied_to(tmp_path / "store", store)
    points: list[str] = []
    for _ in range(2):
        with open_subscriber(local, tmp_path / "mirror") as reader:
            reader.sync()
        with open_publisher(local) as publisher:
            ledger.publish(publisher, 1)
        points += kill_everywhere(local, tmp_path / "mirror", tmp_path / "work", ledger.newest or 0)
    every_step = {"route-chosen", "slot-made", "slot-copied", "hop-fetched", "marked-dirty", "file-applied", "digest-checked", "hop-done"}
    every_step |= {"marked-clean", "lock-shared", "link-made", "served", "files-linked", "tidied"}
    assert set(points) >= every_step


def test_a_slot_that_a_power_failure_tore_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ledger = published(2)
    with open_subscriber(store, tmp_path / "mirror") as reader:
        reader.sync()
    served = tmp_path / "mirror" / "current" / "model.safetensors"
    torn = bytearray(served.read_bytes())
    torn[-64:] = bytes(64)
    served.write_bytes(torn)
    monkeypatch.setattr(mirror, "boot_id", lambda: "another boot")
    with pytest.raises(MirrorError), reading_mirror(tmp_path / "mirror"):
        pass
    with open_subscriber(store, tmp_path / "mirror") as reader:
        assert reader.version is None
        assert reader.sync().step == ledger.newest
    with reading_mirror(tmp_path / "mirror") as path:
        assert bits_of(Checkpoint(path)) == bits_at(ledger.newest or 0)


def test_weights_that_rot_in_a_readers_memory_are_found_and_fetched_again() -> None:
    store, ledger = published(2)
    events = Listener()
    with open_subscriber(store, on_event=events) as reader:
        reader.sync()
        reader._replica._weights.state.writable["c.bias"][0] += 1
        with open_publisher(store) as publisher:
            ledger.publish(publisher)
        assert reader.sync().step == ledger.newest
        assert_whole(reader)
    assert events.names().count("state-refused") == 1
    assert "resynced" in events.names()

"""Test locks between processes that fork."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.errors import DeltawireError, MirrorBusy, MirrorError
from deltawire.events import Event
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.mirror import locks
from deltawire.subscribe.mirror.locks import FileLock, LifeWatch


def forked() -> int:
    """Fork a child that keeps all open files and does nothing."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_exclusive_lock_is_free_after_release_though_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
    lock = FileLock.try_exclusive(tmp_path / "writer")
    assert lock is not None
    child = forked()
    try:
        lock.release()
        again = FileLock.try_exclusive(tmp_path / "writer")
        assert again is not None
        again.release()
    finally:
        end(child)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_shared_lock_stays_shared_for_a_child_that_may_read(tmp_path: Path) -> None:
    lock = FileLock.try_exclusive(tmp_path / "slot")
    assert lock is not None
    lock.share()
    child = forked()
    try:
        lock.release()
        assert FileLock.try_exclusive(tmp_path / "slot") is None
    finally:
        end(child)
    free = FileLock.try_exclusive(tmp_path / "slot")
    assert free is not None
    free.release()


@contextmanager
def stopped_holder(path: Path) -> Iterator[int]:
    """Run a process that takes a lock and is then stopped (SIGSTOP). It is ended at the end of the context."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with FileLock.wait_exclusive(path) as lock, lock.showing_life():
                os.write(tell, b"held")
                time.sleep(600)
        finally:
            os._exit(1)
    try:
        assert os.read(told, 4) == b"held"
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)  # wait until the child is stopped
        yield child
    finally:
        end(child)
        os.close(told)
        os.close(tell)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["writer", "seen", "create"])
def test_a_stopped_process_that_holds_a_lock_of_the_mirror_is_reported_and_does_not_block_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    chain, mirror = ToyChain(MemoryStore()), tmp_path / "mirror"
    chain.anchor(first_state())
    events: list[Event] = []
    with Subscriber(chain.store, mirror, on_event=events.append) as subscriber:
        if name != "create":
            subscriber.sync()
            chain.grow(1)
        (mirror / "locks").mkdir(parents=True, exist_ok=True)
        before = subscriber.version
        with stopped_holder(mirror / "locks" / name) as process:
            with pytest.raises(MirrorBusy, match=f"process {process} ") as caught:
                subscriber.sync()
            assert caught.value.retryable
            assert subscriber.last_error is caught.value
            assert subscriber.version == before
            assert [event.fields["error"] for event in events if event.name == "sync-failed"] == ["MirrorBusy"]
        assert subscriber.sync().seq == chain.commits[-1].seq
        assert subscriber.last_error is None


def test_a_holder_that_shows_life_is_waited_for(tmp_path: Path) -> None:
    now = [0.0]
    lock = FileLock.try_exclusive(tmp_path / "writer")
    assert lock is not None
    watch = LifeWatch(tmp_path / "writer", 30.0, clock=lambda: now[0])
    for beat in range(100):
        now[0] += 29.0
        os.utime(tmp_path / "writer", ns=(beat, beat))
        watch.check()
    now[0] += 31.0
    with pytest.raises(MirrorBusy):
        watch.check()
    lock.release()


def test_a_process_that_changes_a_mirror_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_BEAT", 0.001)
    path = tmp_path / "writer"
    lock = FileLock.try_exclusive(path)
    assert lock is not None
    with lock, lock.showing_life():
        for _ in range(3):
            os.utime(path, ns=(0, 0))
            while os.stat(path).st_mtime_ns == 0:
                time.sleep(0.001)
        assert int(path.read_text()) == os.getpid()


def test_a_subscriber_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    with Subscriber(chain.store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeltawireError):
        Subscriber("nowhere://x", tmp_path / "mirror")
    with pytest.raises(ValueError, match="reader"):
        Subscriber(chain.store, tmp_path / "mirror", options=ReaderOptions(reader=".."))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_note_of_what_was_seen_that_cannot_be_read_is_an_error_of_the_mirror(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    with Subscriber(chain.store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
        (tmp_path / "mirror" / "seen.json").unlink()
        (tmp_path / "mirror" / "seen.json").mkdir()
        with pytest.raises(MirrorError):
            subscriber.sync()

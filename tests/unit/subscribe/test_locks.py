"""Locks between processes, where processes fork."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from toy_chain import ToyChain, first_state

from deltawire.errors import DeltawireError, MirrorError
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.subscribe.locks import FileLock


def forked() -> int:
    """A child that holds whatever files are open now, and does nothing."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_was_held_alone_is_free_after_release_though_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
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
def test_what_was_shared_stays_so_for_a_child_that_may_read_there(tmp_path: Path) -> None:
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


def test_a_subscriber_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    with Subscriber(chain.store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeltawireError):
        Subscriber("nowhere://x", tmp_path / "mirror")
    with pytest.raises(ValueError, match="reader"):
        Subscriber(chain.store, tmp_path / "mirror", reader="..")
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

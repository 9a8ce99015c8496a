"""A publisher publishes in the background."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from plain_reader import apply_files, read_commits, read_json
from small_training import Training, assert_chain_holds, publisher
from support import bits_of, copied, finished_python

from deltawire.errors import Fenced, PublisherClosed, PublishError, StoreFull
from deltawire.publish import PendingVersion
from deltawire.publish.background import BackgroundQueue
from deltawire.publish.publication import Publication
from deltawire.publish.snapshots import SnapshotMemory, copy_tensors
from deltawire.publish.upload.segments import TensorTable
from deltawire.store import keys, open_store
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, call
from deltawire.warnings import VersionsLost


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)


PATIENCE = 120
"""The number of seconds for which a test waits for another thread. No test passes or fails because of the speed of a thread."""


class Gate(FaultyStore):
    """A store in which commits of the background thread wait until `open` is set. Shortcuts do not wait."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.open = threading.Event()
        self.reached = threading.Event()

    def put_if_absent(self, key, data):
        if key.startswith(keys.COMMITS) and threading.current_thread().name == "deltawire-publish":
            self.reached.set()
            assert self.open.wait(PATIENCE)
        super().put_if_absent(key, data)


def test_in_the_background_the_newest_state_supersedes_one_that_waits():
    store = Gate()
    training = Training()
    events = []
    with publisher(store, background=True, on_event=events.append) as chain:
        first = chain.publish(training.step(), step=0)
        one = copied(training.state)
        assert store.reached.wait(PATIENCE)
        waiting = [chain.publish(training.step(), step=step) for step in range(1, 5)]
        last = copied(training.state)
        training.step()  # training continues in place, because the snapshot has its own memory
        assert not first.done()
        with pytest.raises(TimeoutError):
            chain.flush(timeout=0.01)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.01)
        assert [handle.done() for handle in waiting] == [True, True, True, False]
        store.open.set()
        chain.flush(PATIENCE)
        assert [handle.result(0) for handle in waiting[:3]] == [None, None, None]
        assert (first.result(0).step, waiting[3].result(0).step) == (0, 4)
        assert chain.version.step == 4
    assert_chain_holds(store, {1: one, 2: last})
    assert [event.fields["step"] for event in events if event.name == "superseded"] == [1, 2, 3]


def test_background_versions_are_bit_for_bit_whatever_the_buffers():
    """In each group of seven states, the first is published at once.

    The second is being published while five others supersede each other.
    """
    store = Gate()
    training = Training()
    states = {}
    with publisher(store, background=True) as chain:
        handles = []
        for step in range(60):
            state = training.step()
            handles.append((chain.publish(training.state), state))  # the next step changes the state in place
            if step % 7 == 0:
                store.open.set()
                chain.flush(PATIENCE)
                store.open.clear()
                store.reached.clear()
            elif step % 7 == 1:
                assert store.reached.wait(PATIENCE)
            if step == 30:
                training.state["later"] = np.zeros(9, np.float32)
        store.open.set()
        chain.flush(PATIENCE)
        versions = [handle.result(0) for handle, _ in handles]
        states = {version.seq: state for version, (_, state) in zip(versions, handles, strict=True) if version is not None}
    landed = [step for step, version in enumerate(versions) if version is not None]
    assert landed == [step for step in range(60) if step % 7 < 2 or step == 59]
    assert_chain_holds(store, states)
    for info in store.list("skip/"):
        skip = read_json(store, info.key)
        found = apply_files(store, states[skip["base"]["seq"]], skip["files"])
        assert bits_of(found) == bits_of(states[skip["target"]["seq"]])


def test_background_errors_are_raised_once_by_the_next_call():
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "full", times=2)])
    training = Training()
    with publisher(store, background=True) as chain:
        failed = chain.publish(training.step())
        with pytest.raises(StoreFull):
            chain.flush(PATIENCE)
        assert failed.done()
        chain.flush()
        again = chain.publish(training.step())
        with pytest.raises(StoreFull):
            again.result(PATIENCE)
        final = training.step()
        assert chain.publish(final).result(PATIENCE).seq == 1, "what result() raised is not raised again"
    assert_chain_holds(store, {1: final})


def test_closing_raises_errors_that_were_not_raised_before():
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "full")])
    chain = publisher(store, background=True)
    chain.publish(Training().state)
    with pytest.raises(StoreFull):
        chain.close()
    chain.close()
    with pytest.raises(PublisherClosed):
        chain.publish(Training().state)
    with pytest.raises(PublisherClosed):
        chain.flush()


def test_closing_finishes_what_was_given():
    store = Gate()
    chain = publisher(store, background=True)
    training = Training()
    chain.publish(training.step())
    assert store.reached.wait(PATIENCE)
    last = chain.publish(training.step())
    threading.Timer(0.05, store.open.set).start()
    chain.close()
    assert last.result(0).seq == 2
    assert_chain_holds(store, {2: training.state})


def test_leaving_by_an_error_publishes_what_was_accepted_and_does_not_hide_the_error():
    store = Gate()
    handles = []
    training = Training()

    def train():
        with publisher(store, background=True) as chain:
            handles.append(chain.publish(training.step()))
            assert store.reached.wait(PATIENCE)
            handles.append(chain.publish(training.step()))
            threading.Timer(0.05, store.open.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [handle.result(0).seq for handle in handles] == [1, 2]
    assert_chain_holds(store, {2: training.state})


def during_the_next_copy(monkeypatch, act):
    """Call `act` while the background queue copies the next state: half of it is written."""

    def interrupted(source, target, **options):
        names = list(source)
        copy_tensors({name: source[name] for name in names[: len(names) // 2]}, target, **options)
        act()
        copy_tensors(source, target, **options)

    monkeypatch.setattr("deltawire.publish.background.copy_tensors", interrupted)


def test_a_signal_handler_that_closes_during_publish_loses_no_version(monkeypatch):
    store, training = Gate(), Training()
    chain = publisher(store, background=True)
    usual = signal.signal(signal.SIGUSR1, lambda *_: chain.close())
    try:
        states = {1: copied(training.step())}
        chain.publish(training.state, step=0)
        assert store.reached.wait(PATIENCE)
        older = chain.publish(training.step(), step=1)  # accepted, and waits
        during_the_next_copy(monkeypatch, lambda: (store.open.set(), signal.raise_signal(signal.SIGUSR1)))
        newer = chain.publish(training.step(), step=2)  # is copied over the older one
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert (older.result(0), newer.result(0).step) == (None, 2)
    assert_chain_holds(store, {**states, 2: training.state})
    with pytest.raises(PublisherClosed):
        chain.publish(training.state)


def test_a_version_whose_memory_a_cut_off_copy_has_overwritten_counts_as_lost(monkeypatch):
    store, training = Gate(), Training()

    def interrupt():
        raise KeyboardInterrupt

    chain = publisher(store, background=True)
    states = {1: copied(training.step())}
    chain.publish(training.state, step=0)
    assert store.reached.wait(PATIENCE)
    older = chain.publish(training.step(), step=1)
    during_the_next_copy(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        chain.publish(training.step(), step=2)
    store.open.set()
    with pytest.raises(PublishError, match="step 1 is lost: KeyboardInterrupt stopped the copy"):
        chain.close()
    with pytest.raises(PublishError, match="step 1 is lost"):
        older.result(0)
    assert_chain_holds(store, states)


def test_a_pending_version_says_how_it_stands():
    handle = PendingVersion(step=7)
    assert repr(handle) == "<PendingVersion step 7: being published>"
    handle._resolve(error=StoreFull("no space."))
    assert repr(handle) == "<PendingVersion step 7: failed: StoreFull>"
    handle._resolve()
    assert repr(handle) == "<PendingVersion step 7: superseded by a newer state>"
    with publisher(MemoryStore(), background=True) as chain:
        landed = chain.publish(Training().state, step=3)
    assert repr(landed) == "<PendingVersion step 3: published as version 1 (commit 1)>"


def test_leaving_by_an_error_warns_of_what_could_not_be_published():
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/"), "full")])
    events = []

    def train():
        with publisher(store, background=True, on_event=events.append) as chain:
            chain.publish(Training().state, step=7)
            raise ZeroDivisionError

    with pytest.warns(VersionsLost, match="is not published: .*space") as warned, pytest.raises(ZeroDivisionError):
        train()
    (told,) = [str(each.message) for each in warned if each.category is VersionsLost]
    assert "because of ZeroDivisionError" in told
    assert "with Publisher(...)" not in told  # the program already used it
    assert [event.name for event in events][-1] == "versions-lost"


AT_EXIT = """
import os, sys, threading
from small_training import Training, publisher
from deltawire.errors import StoreFull
from deltawire.publish import at_exit
from deltawire.store.local import LocalStore

how = sys.argv[2]
ending, hanging = threading.Event(), threading.Event()

class AtExit(LocalStore):
    def put(self, *arguments, **options):  # nothing is uploaded before the end has begun
        if how == "hang":
            hanging.set()
            threading.Event().wait()
        assert ending.wait(300)
        if how.endswith("full"):
            raise StoreFull("no space is left.")
        super().put(*arguments, **options)

chain = publisher(AtExit(sys.argv[1]), background=True)
threading._register_atexit(ending.set)

def train():
    if how.startswith("late"):
        threading.main_thread().join()  # after the main thread has run its hooks, so that pools take no more work
    chain.publish(Training().step(), step=3)

if how.startswith("late"):
    threading.Thread(target=train).start()
else:
    train()
if how == "hang":
    assert hanging.wait(300)
    at_exit.EXIT_SECONDS = 0.0
if how == "raise":
    if os.fork() == 0:  # a child does not have the thread: it must neither wait nor warn
        sys.exit()
    os.wait()
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("how", ["return", "raise", "full", "hang", "late", "late full"])
def test_accepted_versions_are_published_when_the_process_ends(tmp_path, how):
    """If the publication fails, the process reports it.

    The process also ends if an upload never ends. Threads may publish after the main thread has ended.
    """
    done = finished_python(AT_EXIT, str(tmp_path), how)
    assert done.returncode == {"return": 0, "late": 0, "raise": 1}.get(how, 120), done.stderr
    assert "Exception ignored" not in done.stderr
    if how in ("full", "late full", "hang"):
        reason = "versions are still being published" if how == "hang" else "no space is left."
        assert done.stderr.count("VersionsLost") == 1
        assert f"VersionsLost: step 3 was accepted by publish(), but is not published: {reason}" in done.stderr
        assert [commit["kind"] for commit in read_commits(open_store(tmp_path))] == ["fence"]
    else:
        assert "VersionsLost" not in done.stderr
        assert_chain_holds(open_store(tmp_path), {1: Training().step()})


def test_the_end_of_a_process_waits_for_what_follows_a_version():
    """Without this wait, Python would stop a thread that makes skips in native code, which may abort the process."""
    begun, go, tended = threading.Event(), threading.Event(), []

    def tend():
        begun.set()
        assert go.wait(PATIENCE)
        tended.append(True)

    background = BackgroundQueue(lambda _: None, tend, SnapshotMemory("host", keeps_spare=True))
    state = Training().state
    background.submit(Publication(state, TensorTable.of(state), None, {}, None)).result(PATIENCE)
    assert begun.wait(PATIENCE)
    threading.Timer(0.01, go.set).start()
    background.wait_until_idle(PATIENCE)
    assert tended
    background.close()


def test_a_background_publisher_that_is_fenced_says_so_at_every_later_call():
    store = MemoryStore()
    chain = publisher(store, background=True)
    chain.publish(Training().state).result(PATIENCE)
    publisher(store).close()
    with pytest.raises(Fenced):
        chain.publish(Training().state).result(PATIENCE)
    for _ in range(2):
        with pytest.raises(Fenced):
            chain.publish(Training().state)
    chain.close()


def test_a_background_publisher_resumes_too():
    store = MemoryStore()
    training = Training()
    states = {}
    for _ in range(3):
        with publisher(store, background=True) as chain:
            for _ in range(3):
                state = training.step()
                states[chain.publish(state).result(PATIENCE).seq] = state
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)].count("anchor") == 1

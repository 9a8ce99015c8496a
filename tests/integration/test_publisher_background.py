"""Publishing in the background."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from plain_reader import apply_files, read_commits, read_json
from small_training import Training, assert_chain_holds, publisher
from support import bits_of, copied

from deltawire.errors import (
    Fenced,
    PublisherClosed,
    StoreFull,
)
from deltawire.publish import create
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, call


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(create, "_FIRST_PAUSE", 0.0)


class Gate(FaultyStore):
    """Commits wait until the gate is opened."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.open = threading.Event()
        self.reached = threading.Event()

    def put_if_absent(self, key, data):
        if threading.current_thread().name == "deltawire-publish":
            self.reached.set()
            assert self.open.wait(20)
        super().put_if_absent(key, data)


def test_in_the_background_the_newest_state_supersedes_one_that_waits():
    store = Gate()
    training = Training()
    events = []
    with publisher(store, background=True, on_event=events.append) as chain:
        first = chain.publish(training.step(), step=0)
        one = copied(training.state)
        assert store.reached.wait(20)
        waiting = [chain.publish(training.step(), step=step) for step in range(1, 5)]
        last = copied(training.state)
        training.step()  # goes on in place: the snapshot is another memory
        assert not first.done()
        with pytest.raises(TimeoutError):
            chain.flush(timeout=0.01)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.01)
        assert [handle.done() for handle in waiting] == [True, True, True, False]
        store.open.set()
        chain.flush(timeout=20)
        assert [handle.result(0) for handle in waiting[:3]] == [None, None, None]
        assert (first.result(0).step, waiting[3].result(0).step) == (0, 4)
        assert chain.version.step == 4
    assert_chain_holds(store, {1: one, 2: last})
    assert [event.fields["step"] for event in events if event.name == "superseded"] == [1, 2, 3]


def test_background_versions_are_bit_for_bit_whatever_the_buffers():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store, background=True) as chain:
        handles = []
        for step in range(60):
            state = training.step()
            handles.append((chain.publish(training.state), state))
            if step == 30:
                training.state["later"] = np.zeros(9, np.float32)
        chain.flush(timeout=30)
        for handle, state in handles:
            version = handle.result(0)
            if version is not None:
                states[version.seq] = state
    assert len(states) >= 2
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
            chain.flush(timeout=20)
        assert failed.done()
        chain.flush()
        again = chain.publish(training.step())
        with pytest.raises(StoreFull):
            again.result(20)
        final = training.step()
        assert chain.publish(final).result(20).seq == 1, "what result() raised is not raised again"
    assert_chain_holds(store, {1: final})


def test_closing_raises_what_nobody_has_heard_of_yet():
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
    assert store.reached.wait(20)
    last = chain.publish(training.step())
    threading.Timer(0.05, store.open.set).start()
    chain.close()
    assert last.result(0).seq == 2
    assert_chain_holds(store, {2: training.state})


def test_leaving_by_an_error_drops_what_has_not_begun_and_does_not_hide_the_error():
    store = Gate()
    handles = []

    def train():
        with publisher(store, background=True) as chain:
            handles.append(chain.publish(Training().state))
            assert store.reached.wait(20)
            handles.append(chain.publish(Training().state))
            threading.Timer(0.05, store.open.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert handles[0].result(0).seq == 1
    with pytest.raises(PublisherClosed):
        handles[1].result(0)


def test_a_background_publisher_that_is_fenced_says_so_at_every_later_call():
    store = MemoryStore()
    chain = publisher(store, background=True)
    chain.publish(Training().state).result(20)
    publisher(store).close()
    with pytest.raises(Fenced):
        chain.publish(Training().state).result(20)
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
                states[chain.publish(state).result(20).seq] = state
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)].count("anchor") == 1

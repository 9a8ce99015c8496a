"""A publisher can be closed although a call of the store never returns."""

from __future__ import annotations

import math
import threading

import pytest
from plain_reader import read_commits
from small_training import Training, assert_chain_holds, publisher
from support import copied
from test_sharded_publisher import states
from threads_as_ranks import run_ranks, shards_of

from deltawire.errors import CloseTimeout, Fenced, PublisherClosed
from deltawire.publish import WriterOptions
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.store.memory import MemoryStore
from deltawire.warnings import VersionsLost

PATIENCE = 120
"""The number of seconds for which a test waits for another thread. No test passes or fails because of the speed of a thread."""

ALWAYS = AnchorPolicy(min_versions=1, max_versions=1)
FOREVER = float("inf")
"""Waiting for so long raises `OverflowError` at once, so that a call with this limit passes only if it does not wait."""


class Stuck(MemoryStore):
    """A user's own store. Uploads from threads with some names do not return before `free` is set."""

    def __init__(self, threads: str) -> None:
        super().__init__()
        self.free, self.reached = threading.Event(), threading.Event()
        self._names = threads

    def put(self, key, data, **options):
        if threading.current_thread().name.startswith(self._names):
            self.reached.set()
            assert self.free.wait(PATIENCE)
        super().put(key, data, **options)


@pytest.fixture
def stuck():
    made = []

    def make(threads):
        made.append(Stuck(threads))
        return made[-1]

    yield make
    for store in made:
        store.free.set()


def test_close_names_the_version_that_is_not_published_if_the_store_never_answers(stuck):
    store = stuck("deltawire-upload")
    chain = publisher(store, background=True, close_timeout=0.01)
    pending = chain.publish(Training().step(), step=3)
    assert store.reached.wait(PATIENCE)
    with pytest.raises(CloseTimeout, match=r"^the store did not finish within 0\.01 seconds, so step 3 is not published"):
        chain.close()
    chain.close()  # it is closed
    with pytest.raises(PublisherClosed):
        chain.publish(Training().step())
    assert not pending.done()
    # The end of the process does not wait for it again.
    chain._background.wait_until_idle(FOREVER)
    for pool in chain._pools:
        pool.wait_until_idle(FOREVER)
    assert [commit["kind"] for commit in read_commits(store)] == ["fence"]
    # Others can continue the chain, and a late answer of the store does no harm.
    store._names = "none"
    training, expected = Training(), {}
    with publisher(store) as again:
        store.free.set()
        with pytest.raises(Fenced):
            pending.result(PATIENCE)
        for _ in range(2):
            version = again.publish(training.step())
            expected[version.seq] = copied(training.state)
    assert_chain_holds(store, expected)


def test_the_error_of_a_with_block_is_raised_and_the_version_that_is_lost_is_named(stuck):
    store = stuck("deltawire-upload")

    def train():
        with publisher(store, background=True, close_timeout=0.01) as chain:
            chain.publish(Training().step(), step=3)
            assert store.reached.wait(PATIENCE)
            raise ZeroDivisionError

    with (
        pytest.warns(VersionsLost, match="step 3 was accepted by publish.*the store did not finish within 0.01 seconds"),
        pytest.raises(ZeroDivisionError),
    ):
        train()


def test_anchors_that_the_store_never_accepts_are_given_up_with_an_event(stuck):
    store, training, events, expected = stuck("deltawire-shortcut"), Training(), [], {}
    with publisher(store, anchor_policy=ALWAYS, close_timeout=0.01, on_event=events.append) as chain:
        for _ in range(3):
            version = chain.publish(training.step())
            expected[version.seq] = copied(training.state)
        assert store.reached.wait(PATIENCE)
    (failed,) = [event for event in events if event.name == "shortcut-failed"]
    assert failed.fields == {
        "kind": "skips and anchors",
        "seq": chain.version.seq,
        "reason": "the store did not finish within 0.01 seconds, and the publisher was closed.",
    }
    chain._jobs.wait_until_idle(FOREVER)
    for pool in chain._pools:
        pool.wait_until_idle(FOREVER)
    assert_chain_holds(store, expected)


@pytest.mark.parametrize("raises", [False, True])
def test_many_processes_give_up_shortcuts_that_the_store_never_accepts(stuck, raises):
    store, versions, events = stuck("deltawire-shortcut"), states(2), []
    options = WriterOptions(anchor_policy=ALWAYS, close_timeout=0.01)

    def work(rank):
        with ShardedPublisher(rank, store, options=options, on_event=events.append if rank.rank == 0 else None) as chain:
            for state in versions:
                chain.publish(shards_of(state, rank.rank, rank.size))
            assert store.reached.wait(PATIENCE)
            if raises:
                raise ZeroDivisionError

    (error,) = run_ranks(1, work)
    assert isinstance(error, ZeroDivisionError) if raises else error is None
    if not raises:
        assert [event.fields["kind"] for event in events if event.name == "shortcut-failed"] == ["skips and anchors"]
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "delta"]


@pytest.mark.parametrize("seconds", [None, math.inf, 1e10])
def test_there_need_not_be_a_limit(seconds):
    training = Training()
    with publisher(MemoryStore(), background=True, close_timeout=seconds, anchor_policy=ALWAYS) as chain:
        chain.publish(training.step())
    assert chain.version is not None


def test_a_limit_is_a_positive_number():
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="close_timeout is a positive number"):
            WriterOptions(close_timeout=seconds)

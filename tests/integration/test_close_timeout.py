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

from deltawire import start_delta
from deltawire.errors import CloseTimeout, CommitOutcomeUnknown, Fenced, OutcomeUnknown, PublisherClosed
from deltawire.publish import WriterOptions
from deltawire.publish.sharded import ShardedPublisher
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.publish.time_limit import TimeLimit
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


class InDoubt(MemoryStore):
    """A user's own store. It loses the answers about commits (`is_lost`), or never answers before `free` is set (`is_silent`)."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.reached = threading.Event(), threading.Event()
        self.is_lost = self.is_silent = False

    def put_if_absent(self, key, data):
        self._ask(key)
        super().put_if_absent(key, data)

    def get(self, key, **options):
        self._ask(key)
        return super().get(key, **options)

    def _ask(self, key):
        if key.startswith("commit/") and self.is_silent:
            self.reached.set()
            assert self.free.wait(PATIENCE)
        elif key.startswith("commit/") and self.is_lost:
            raise OutcomeUnknown("the answer was lost.")


@pytest.fixture
def in_doubt(monkeypatch):
    monkeypatch.setattr("deltawire.store.create_rule._FIRST_PAUSE", 0.0)
    store = InDoubt()
    yield store
    store.free.set()


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
    with pytest.raises(CloseTimeout, match="so step 3 is not published"):
        pending.result()  # it does not wait for ever
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
        chain._background._thread.join(PATIENCE)
        with pytest.raises(Fenced):
            pending.result()
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


@pytest.mark.parametrize("background", [False, True])
def test_close_gives_up_a_store_that_never_says_whether_the_last_commit_landed(in_doubt, background):
    training, expected = Training(), {}
    chain = publisher(in_doubt, background=background, close_timeout=0.01)
    in_doubt.is_lost = True

    def publish():
        version = chain.publish(training.step(), step=3)
        version.result(PATIENCE)  # in the background

    with pytest.raises(CommitOutcomeUnknown):
        publish()
    in_doubt.is_silent = True
    with pytest.raises(CloseTimeout, match=r"within 0\.01 seconds, so it is not known whether step 3 is published"):
        chain.close()
    chain.close()
    in_doubt.is_lost = in_doubt.is_silent = False
    with publisher(in_doubt) as again:
        in_doubt.free.set()  # the late answer does no harm
        version = again.publish(training.step())
        expected[version.seq] = copied(training.state)
    assert_chain_holds(in_doubt, expected)


def test_processes_give_up_a_store_that_never_says_whether_the_last_commit_landed(in_doubt):
    (state,) = states(1)

    def work(rank):
        chain = ShardedPublisher(rank, in_doubt, options=WriterOptions(close_timeout=0.01))
        in_doubt.is_lost = True
        with pytest.raises(CommitOutcomeUnknown):
            chain.publish(shards_of(state, rank.rank, rank.size))
        in_doubt.is_silent = True
        with pytest.raises(CloseTimeout, match=r"within 0\.01 seconds, so it is not known whether the last version is published"):
            chain.close()
        chain.close()

    assert run_ranks(1, work) == [None]


def test_an_error_of_the_store_while_the_last_commit_is_settled_is_raised(in_doubt):
    chain = publisher(in_doubt, close_timeout=PATIENCE)
    in_doubt.is_lost = True
    for work in (lambda: chain.publish(Training().step()), chain.close):
        with pytest.raises(CommitOutcomeUnknown):
            work()


@pytest.mark.parametrize("background", [False, True])
def test_calls_may_wait_for_ever(background):
    store, training = MemoryStore(), Training()
    with publisher(store, background=background) as chain:
        version = chain.publish(training.step())
        if background:
            assert version.result(math.inf) is not None
        chain.flush(math.inf)
        assert chain.version is not None
    (state,) = states(1)

    def work(rank):
        with ShardedPublisher(rank, MemoryStore()) as chain:
            chain.publish(shards_of(state, rank.rank, rank.size))
            chain.flush(math.inf)

    assert run_ranks(1, work) == [None]
    assert start_delta(state, state).result(math.inf)


def test_the_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("deltawire.publish.time_limit.monotonic", lambda: now[0])
    limit = TimeLimit(5)
    now[0] = 103.0
    assert limit.left == 2.0
    now[0] = 106.0
    assert limit.left == 0.0
    assert TimeLimit(None).left is TimeLimit(math.inf).left is None

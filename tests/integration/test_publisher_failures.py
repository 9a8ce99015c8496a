"""A publisher competes with other publishers, and meets stores that fail and processes that die."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from plain_reader import apply_files, read_checkpoint, read_commits, read_json, read_states
from small_training import SECOND_COMMIT, Training, assert_chain_holds, published, publisher, take_step
from support import bits_of, copied

import deltawire
from deltawire.errors import (
    CommitOutcomeUnknown,
    DeltawireError,
    Fenced,
    ObjectExists,
    OutcomeUnknown,
    PublisherClosed,
    PublishError,
    StoreFull,
    StoreUnavailable,
)
from deltawire.publish.shortcuts.cadence import AnchorPolicy
from deltawire.store import create_rule
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, ProcessDied, call


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(create_rule, "_FIRST_PAUSE", 0.0)


def test_a_second_publisher_fences_the_first_for_ever():
    store = MemoryStore()
    training = Training()
    events = []
    zombie = publisher(store, on_event=events.append)
    zombie.publish(training.step())
    new = publisher(store)
    for _ in range(3):
        with pytest.raises(Fenced):
            zombie.publish(training.step())
    states = {new.publish(state).seq: state for state in [training.step(), training.step()]}
    assert [event.name for event in events].count("fenced") == 1
    zombie.close()
    new.close()
    assert not any(commit["_void"] for commit in read_commits(store))
    assert_chain_holds(store, states)


def test_a_new_publisher_continues_with_a_delta_where_the_last_one_ended():
    store = MemoryStore()
    training = Training()
    states = {}
    for _ in range(3):
        states |= published(store, 3, training)
    kinds = [commit["kind"] for commit in read_commits(store)]
    assert kinds == ["fence", "anchor", "delta", "delta", "fence", "delta", "delta", "delta", "fence", "delta", "delta", "delta"]
    assert_chain_holds(store, states)


def test_a_run_can_be_taken_up_again_from_an_older_version():
    store = MemoryStore()
    states = published(store, 5)
    training = Training(seed=9)
    training.state = copied(states[3])
    with publisher(store, resume_from_seq=3) as chain:
        rewound = chain.version
        assert (rewound.kind, rewound.seq, rewound.updates, rewound.digest) == ("rewind", 7, 6, deltawire.state_digest(states[3]))
        version = chain.publish(training.step())
        assert version.kind == "delta"
    assert_chain_holds(store, states | {7: states[3], 8: training.state})
    assert read_commits(store)[7]["base"]["seq"] == 3
    with publisher(store, resume_from_seq=8) as chain:
        assert chain.version == version, "the head needs no rewind"


def test_going_back_to_what_is_about_to_be_collected_makes_a_checkpoint_of_it():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store, anchor_policy=AnchorPolicy(2, 2)) as chain:
        for _ in range(9):
            take_step(chain, training, states)
        assert chain.collect(grace=3600.0).outcome == "waiting"
    with publisher(store, resume_from_seq=2) as chain:
        assert (chain.version.kind, chain.version.digest) == ("anchor", deltawire.state_digest(states[2]))
        states[chain.version.seq] = states[2]
        training.state = copied(states[2])
        take_step(chain, training, states)
        assert chain.version.kind == "delta"
    assert_chain_holds(store, states)


@pytest.mark.parametrize("fault", [Before, After])
@pytest.mark.parametrize("kind", ["unknown", "unavailable"])
def test_a_lost_answer_to_a_commit_is_no_lost_version(fault, kind):
    store = FaultyStore(MemoryStore(), [fault(call("put_if_absent", SECOND_COMMIT), kind)])
    states = published(store, 4)
    assert_chain_holds(store, states)
    assert len(read_commits(store)) == 5


class Deaf(FaultyStore):
    """A store that answers no request about commits while it is `deaf`. With `creates` it still creates them."""

    def __init__(self, *, creates: bool) -> None:
        super().__init__(MemoryStore())
        self.deaf = False
        self._creates = creates

    def put_if_absent(self, key, data):
        if self.deaf and key.startswith("commit/"):
            if self._creates:
                with contextlib.suppress(ObjectExists):
                    self.inner.put_if_absent(key, data)
            raise OutcomeUnknown("no answer.")
        super().put_if_absent(key, data)

    def get(self, key, *, limit):
        if self.deaf and key.startswith("commit/"):
            raise StoreUnavailable("no answer.")
        return super().get(key, limit=limit)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("open_seq", [1, 3])
def test_an_open_commit_is_settled_before_the_next(landed, open_seq, background):
    store = Deaf(creates=landed)
    training = Training()
    states = {}
    with publisher(store, background=background) as chain:

        def publish(state):
            result = chain.publish(state)
            return result.result(120) if background else result

        for seq in range(1, open_seq + 6):
            state = training.step()
            given = copied(state)
            store.deaf = seq == open_seq
            if store.deaf:
                with pytest.raises(CommitOutcomeUnknown):
                    publish(given)
                with pytest.raises(CommitOutcomeUnknown):
                    publish(training.state)
            else:
                assert publish(given).seq == seq
            for array in given.values():
                array[...] = 0  # later changes of the caller's memory must not matter
            states[seq] = state
    assert_chain_holds(store, states)
    for info in store.list("skip/"):
        skip = read_json(store, info.key)
        assert bits_of(apply_files(store, states[skip["base"]["seq"]], skip["files"])) == bits_of(states[skip["target"]["seq"]])


@pytest.mark.parametrize("landed", [True, False])
def test_closing_finds_out_about_an_open_commit(landed):
    store = Deaf(creates=landed)
    chain = publisher(store)
    training = Training()
    store.deaf = True
    with pytest.raises(CommitOutcomeUnknown):
        chain.publish(training.step())
    store.deaf = False
    chain.close()
    assert chain.version.seq == 1
    assert_chain_holds(store, {1: training.state})


def test_an_open_commit_of_a_publisher_that_is_fenced_meanwhile_is_settled_by_the_fence():
    store = Deaf(creates=False)
    training = Training()
    old = publisher(store)
    old.publish(training.step())
    store.deaf = True
    with pytest.raises(CommitOutcomeUnknown):
        old.publish(training.step())
    store.deaf = False
    states = published(store.inner, 2, training)
    with pytest.raises(Fenced):
        old.publish(training.step())
    old.close()
    assert_chain_holds(store, states)


@pytest.mark.parametrize("kind", ["unavailable", "full"])
def test_a_failed_upload_publishes_nothing_and_may_be_repeated(kind):
    error = {"unavailable": StoreUnavailable, "full": StoreFull}[kind]
    store = FaultyStore(MemoryStore(), [Before(call("put", "data/0000000001/00000000000000000002"), kind)])
    events = []
    training = Training()
    with publisher(store, on_event=events.append) as chain:
        chain.publish(training.step())
        second = training.step()
        with pytest.raises(error):
            chain.publish(second, step=2)
        assert chain.version.seq == 1
        assert isinstance(chain.last_error, error)
        assert chain.publish(second).seq == 2
    assert_chain_holds(store, {2: second})
    assert [(event.name, event.fields["step"]) for event in events if event.name == "publish-failed"] == [("publish-failed", 2)]


def test_a_failing_hint_is_no_failure():
    store = FaultyStore(MemoryStore(), [Before(call("put", "HEAD"), "unavailable", times=None)])
    assert_chain_holds(store, published(store))


class Interrupted(dict):
    """A state that raises KeyboardInterrupt at the n-th access to a tensor."""

    def __init__(self, state, after: int) -> None:
        super().__init__(state)
        self.left = after

    def __getitem__(self, name):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(name)


def test_ctrl_c_at_any_look_at_the_state_loses_nothing():
    looks = 0
    while True:
        store = MemoryStore()
        training = Training()
        with publisher(store) as chain:
            states = {1: training.step()}
            chain.publish(states[1])
            state = Interrupted(training.step(), looks)
            interrupted = False
            try:
                chain.publish(state)
            except KeyboardInterrupt:
                interrupted = True
            after = training.step()
            states[chain.publish(after).seq] = after
        assert_chain_holds(store, states)
        if not interrupted:
            return
        looks += 1


def test_ctrl_c_while_a_commit_is_created_is_an_open_commit():
    class Struck(FaultyStore):
        armed = True

        def put_if_absent(self, key, data):
            super().put_if_absent(key, data)
            if key.startswith(SECOND_COMMIT) and self.armed:
                self.armed = False
                raise KeyboardInterrupt

    store = Struck(MemoryStore())
    training = Training()
    states = {}
    with publisher(store) as chain:
        take_step(chain, training, states)
        with pytest.raises(KeyboardInterrupt):
            chain.publish(training.step())
        states[2] = copied(training.state)
        take_step(chain, training, states)
    assert states.keys() == {1, 2, 3}
    assert_chain_holds(store, states)


def test_a_baseline_that_rots_in_memory_is_rebuilt_from_the_store():
    store = MemoryStore()
    training = Training()
    states = {}
    with publisher(store) as chain:
        for damage in [False, True, False]:
            take_step(chain, training, states)
            if damage:
                chain._appender.baseline.arrays["norm"][0] += 1
    assert_chain_holds(store, states)
    assert [commit["kind"] for commit in read_commits(store)] == ["fence", "anchor", "delta", "delta"]


@pytest.mark.parametrize("fault", [Before, After])
def test_a_process_that_dies_at_any_call_loses_no_version_that_it_acknowledged(fault):
    """The process dies at each call of a whole session once, shortcuts included. Then another publisher takes over."""
    index = 0
    while True:
        inner = MemoryStore()
        store = FaultyStore(inner, [fault(index, "crash")])
        training = Training()
        acknowledged = {}
        try:
            with publisher(store, anchor_policy=AnchorPolicy(3, 3)) as chain:
                for _ in range(5):
                    state = training.step()
                    acknowledged[chain.publish(state).seq] = state
        except ProcessDied:
            pass
        acknowledged |= published(inner, 2, training)
        assert_chain_holds(inner, acknowledged)
        if index >= len(store.calls):  # the session ended before this call
            assert index > 35
            return
        index += 1


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_bad_store_does_no_acknowledged_version_is_lost(seed, background):
    """Any call may fail before or after the store performs it. The publisher continues, or another publisher takes over."""
    luck = np.random.default_rng(seed)
    inner = MemoryStore()

    def strikes(each):
        return not each.key.startswith("probe/") and luck.random() < 0.005

    faults = [fault(strikes, kind, times=None) for fault in (Before, After) for kind in ("unknown", "unavailable", "full")]
    training = Training(seed)
    acknowledged = {}
    for _ in range(4):
        store = FaultyStore(inner, faults)
        with contextlib.suppress(DeltawireError), publisher(store, background=background, anchor_policy=AnchorPolicy(3, 5)) as chain:
            for _ in range(15):
                state = training.step()
                with contextlib.suppress(DeltawireError):
                    result = chain.publish(state)
                    version = result.result(120) if background else result
                    acknowledged[version.seq] = state
    acknowledged |= published(inner, 1, training)
    assert len(acknowledged) > 3
    assert_chain_holds(inner, acknowledged)
    states = read_states(inner)
    for info in inner.list("skip/"):
        skip = read_json(inner, info.key)
        assert bits_of(apply_files(inner, states[skip["base"]["seq"]], skip["files"])) == bits_of(states[skip["target"]["seq"]])
    for info in inner.list("anchor/"):
        anchor = read_json(inner, info.key)
        assert bits_of(read_checkpoint(inner, anchor["files"])) == bits_of(states[anchor["target"]["seq"]])


def test_a_signal_handler_may_close_in_the_middle_of_a_publication():
    """The handler runs on the thread that publishes, as listeners do."""
    store = MemoryStore()
    states, training = {}, Training()

    def handle(event):
        if event.name == "published" and event.fields["seq"] == 2:
            chain.close()
            with pytest.raises(PublishError):
                chain.publish(training.state)

    chain = publisher(store, on_event=handle)
    take_step(chain, training, states)
    state = training.step()
    states[chain.publish(state).seq] = state
    with pytest.raises(PublisherClosed):
        take_step(chain, training, {})
    chain.close()
    assert_chain_holds(store, states)

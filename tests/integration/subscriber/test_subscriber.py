"""Test where a subscriber gets to: newer, older and rewound versions, and a real publisher. Also its pins, limits and closing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_store import CountingStore, Subscribe, data_reads, events_of, names_of
from support import bits_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.errors import (
    ChainStale,
    LimitExceeded,
    NoChain,
    RunMismatch,
    SignatureInvalid,
    StoreDenied,
    VersionUnknown,
)
from deltawire.format.records.collection_records import Pin
from deltawire.format.records.record_parts import Limits
from deltawire.format.records.signing import SigningKey
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber


def test_it_gets_to_the_newest_version(chain: ToyChain, subscribe: Subscribe) -> None:
    chain.grow(3)
    subscriber = subscribe(chain)
    version = subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)
    assert (version.seq, version.step, version.updates, version.meta) == (4, 40, 4, {"name": "v4"})
    assert version == subscriber.version
    assert subscriber.lag() == 0


def test_it_follows_version_by_version(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    for _ in range(12):
        assert subscriber.sync().digest == chain.commits[-1].digest
        assert bits_of(subscriber.state) == bits_of(chain.state)
        chain.delta()
        assert subscriber.lag() == 1


def test_it_gets_along_far_behind_by_shortcuts(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.grow(40)
    chain.add_skip(17, 1)
    chain.add_skip(33, 17)
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_a_sync_that_finds_nothing_new_reads_no_data_and_says_nothing(subscribe: Subscribe) -> None:
    chain = ToyChain(CountingStore())
    chain.anchor(first_state())
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    subscriber.sync()
    events.clear()
    chain.store.read.clear()  # type: ignore[attr-defined]
    subscriber.sync()
    assert events == []
    assert data_reads(chain.store) == []  # type: ignore[arg-type]


def test_the_state_is_read_only(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    assert len(subscriber.state) == 0
    assert subscriber.version is None
    subscriber.sync()
    with pytest.raises(ValueError, match="read-only"):
        subscriber.state["a.weight"][0] = 0
    with pytest.raises(TypeError):
        subscriber.state["a.weight"] = np.zeros(3)  # type: ignore[index]


def test_it_goes_to_an_older_version_and_back(chain: ToyChain, subscribe: Subscribe) -> None:
    chain.grow(4)
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    for seq in (5, 3, 1, 4, 5):
        assert subscriber.sync(seq=seq).seq == seq
        assert bits_of(subscriber.state) == bits_of(chain.states[seq] or {})
    assert [event.fields["seq"] for event in events if event.name == "rolled-back"] == [3, 1]


def test_going_back_in_memory_reads_no_data() -> None:
    chain = ToyChain(CountingStore())
    chain.anchor(first_state())
    with Subscriber(chain.store, undo_bytes=1 << 20) as subscriber:
        subscriber.sync()
        for _ in range(3):
            chain.delta()
            subscriber.sync()
        chain.store.read.clear()  # type: ignore[attr-defined]
        for seq in (3, 1):
            subscriber.sync(seq=seq)
            assert bits_of(subscriber.state) == bits_of(chain.states[seq] or {})
        assert data_reads(chain.store) == []  # type: ignore[arg-type]


def test_a_version_that_does_not_exist_is_refused(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    for seq in (0, 2, 99):
        with pytest.raises(VersionUnknown):
            subscriber.sync(seq=seq)


def test_nothing_published_yet_is_an_error_that_heals(subscribe: Subscribe) -> None:
    store = MemoryStore()
    subscriber = subscribe(store)
    with pytest.raises(NoChain) as caught:
        subscriber.sync()
    assert caught.value.retryable
    chain = ToyChain(store)
    with pytest.raises(NoChain):
        subscriber.sync()
    chain.anchor(first_state())
    subscriber.sync()
    assert subscriber.last_error is None
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_a_new_writers_fence_changes_nothing(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    version = subscriber.sync()
    chain.claim(2)
    assert subscriber.sync() == version
    chain.delta()
    chain.claim(3)
    assert subscriber.sync().seq == 3
    assert bits_of(subscriber.state) == bits_of(chain.state)
    chain.delta()
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_a_rewind_brings_back_the_older_state(chain: ToyChain, subscribe: Subscribe) -> None:
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    for _ in range(4):
        subscriber.sync()
        chain.delta()
    chain.claim(2)
    chain.rewind(3)
    version = subscriber.sync()
    assert (version.seq, version.kind) == (7, "rewind")
    assert bits_of(subscriber.state) == bits_of(chain.states[3] or {})
    assert "rolled-back" in names_of(events)
    chain.grow(2)
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_a_new_set_of_tensors_arrives_by_an_anchor(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    subscriber.sync()
    chain.anchor({**first_state(9), "new.weight": np.arange(5, dtype=np.float32)})
    chain.delta()
    subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)


def test_events_tell_what_a_sync_cost(chain: ToyChain, subscribe: Subscribe) -> None:
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    subscriber.sync()
    chain.delta()
    events.clear()
    subscriber.sync()
    assert names_of(events) == ["synced"]
    fields = events[0].fields
    assert (fields["seq"], fields["lag"], fields["objects"]) == (2, 0, 2)
    assert fields["bytes"] == chain.commits[-1].stored_bytes
    assert {f"{phase}_seconds" for phase in ("find", "fetch", "verify", "resolve", "apply", "total")} <= fields.keys()


def test_only_what_a_trusted_key_signed_is_accepted(subscribe: Subscribe) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    chain = ToyChain(MemoryStore(), sign=key.sign)
    chain.anchor(first_state())
    subscriber = subscribe(chain, trusted_keys=[key.public])
    subscriber.sync()
    chain._sign = other.sign
    chain.delta()
    with pytest.raises(SignatureInvalid):
        subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.states[1] or {})


def test_another_run_is_refused(chain: ToyChain, subscribe: Subscribe) -> None:
    with pytest.raises(RunMismatch):
        subscribe(chain, run="something else").sync()


def test_a_chain_beyond_the_readers_limits_is_refused(chain: ToyChain, subscribe: Subscribe) -> None:
    with pytest.raises(LimitExceeded):
        subscribe(chain, limits=Limits(state_bytes=100)).sync()


def test_too_long_a_silence_is_an_error_after_the_version_was_reached(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain, max_silence=60.0)
    with pytest.raises(ChainStale):
        subscriber.sync()
    assert bits_of(subscriber.state) == bits_of(chain.state)
    assert subscribe(chain, max_silence=1e12).sync().seq == 1


def test_a_pin_is_written_renewed_and_removed(chain: ToyChain, subscribe: Subscribe) -> None:
    chain.grow(3)
    subscriber = subscribe(chain, reader="member-1")
    subscriber.sync()

    def pinned() -> int:
        return Pin.parse(chain.store.get(keys.pin_key("member-1"), limit=1 << 16)).seq

    assert pinned() == 0  # so the collection keeps version 1, the anchor from which the reader started
    now = [10_000.0]
    subscriber._pins._clock = lambda: subscriber._pins._next + now[0]
    subscriber.sync()
    assert pinned() == 4
    subscriber.close()
    assert list(chain.store.list(keys.PINS)) == []


def test_without_the_right_to_write_there_is_no_pin_and_no_error(subscribe: Subscribe) -> None:
    chain = ToyChain(CountingStore())
    chain.anchor(first_state())
    chain.store.put_failure = StoreDenied("read-only.")  # type: ignore[attr-defined]
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, **options)
    subscriber.sync()
    subscriber.sync()
    assert names_of(events).count("pin-failed") == 1
    assert subscribe(chain, pin=False).sync().seq == 1


def test_a_closed_subscriber_does_not_sync(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    subscriber.close()
    subscriber.close()
    with pytest.raises(ValueError, match="closed"):
        subscriber.sync()


def test_it_follows_a_real_publisher_through_restarts_and_collection(tmp_path: Path) -> None:
    from deltawire.publish.publisher import Publisher

    state = first_state()
    with Subscriber(tmp_path / "store") as in_memory, Subscriber(tmp_path / "store", tmp_path / "mirror") as mirrored:
        for life in range(3):
            with Publisher(tmp_path / "store", "run") as publisher:
                for step in range(6):
                    state = next_state(state, 10 * life + step)
                    version = publisher.publish(state, step=step)
                    if step % (life + 1) == 0:
                        for subscriber in (in_memory, mirrored):
                            assert subscriber.sync() == version
                            assert bits_of(subscriber.state) == bits_of(state)
                publisher.flush()
                publisher.collect(grace=0.0)
                publisher.collect(grace=0.0)
    with Subscriber(tmp_path / "store") as late:
        late.sync()
        assert bits_of(late.state) == bits_of(state)


def test_it_takes_back_what_a_resumed_publisher_abandoned(tmp_path: Path) -> None:
    from deltawire.publish.publisher import Publisher

    states = [first_state()]
    seqs = []
    with Publisher(tmp_path / "store", "run") as publisher:
        for step in range(4):
            seqs.append(publisher.publish(states[-1], step=step).seq)
            states.append(next_state(states[-1], step))
    with Subscriber(tmp_path / "store") as in_memory, Subscriber(tmp_path / "store", tmp_path / "mirror") as mirrored:
        for subscriber in (in_memory, mirrored):
            assert bits_of((subscriber.sync(), subscriber.state)[1]) == bits_of(states[3])
        with Publisher(tmp_path / "store", "run", resume_from_seq=seqs[1]) as publisher:
            new = next_state(states[1], 99)
            publisher.publish(new, step=2)
        for subscriber in (in_memory, mirrored):
            assert bits_of((subscriber.sync(), subscriber.state)[1]) == bits_of(new)

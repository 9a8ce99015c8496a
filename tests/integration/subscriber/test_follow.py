"""Test how `follow` yields versions, survives failures that pass, and ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from counting_store import CountingStore, Subscribe, events_of
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.errors import (
    ChainStale,
    DeltawireError,
    StoreUnavailable,
)
from deltawire.events import Event
from deltawire.store import keys


def test_follow_yields_every_version_that_it_reaches(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    seen = []
    for version in subscriber.follow(poll=0.01):
        seen.append(version.seq)
        assert bits_of(subscriber.state) == bits_of(chain.state)
        if version.seq == 5:
            break
        chain.delta()
    assert seen == [1, 2, 3, 4, 5]


def test_follow_survives_what_heals_and_raises_what_does_not(subscribe: Subscribe) -> None:
    chain = ToyChain(CountingStore())
    store: Any = chain.store
    healed = threading.Event()

    def on_event(event: Event) -> None:
        if event.name == "sync-failed" and event.fields["error"] == "NoChain":
            chain.anchor(first_state())
            store.failure = StoreUnavailable("no answer.")
        elif event.name == "sync-failed" and event.fields["error"] == "StoreUnavailable":
            store.failure = None
            healed.set()

    subscriber = subscribe(chain, on_event=on_event)
    versions = subscriber.follow(poll=0.01)
    assert next(versions).seq == 1
    assert healed.is_set()
    chain.delta()
    store.put(keys.commit_key(2), b"{}")
    with pytest.raises(DeltawireError) as caught:
        next(versions)
    assert not caught.value.retryable


def test_follow_with_a_callback_ends_when_it_is_told_to(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    stop = threading.Event()
    seen = []

    def callback(version: Any) -> None:
        seen.append(version.seq)
        if len(seen) == 3:
            stop.set()
        chain.delta()

    assert list(subscriber.follow(callback, poll=0.01, stop=stop)) == []
    assert seen == [1, 2, 3]


def test_follow_ends_when_the_subscriber_is_closed(chain: ToyChain, subscribe: Subscribe) -> None:
    subscriber = subscribe(chain)
    ended = []
    thread = threading.Thread(target=lambda: ended.extend(subscriber.follow(poll=60.0)))
    thread.start()
    while subscriber.version is None:
        pass
    subscriber.close()
    thread.join(300)
    assert not thread.is_alive()


def test_follow_reports_a_silence_once_and_continues(chain: ToyChain, subscribe: Subscribe) -> None:
    options: dict[str, Any] = {}
    events = events_of(options)
    subscriber = subscribe(chain, max_silence=60.0, **options)
    versions = subscriber.follow(poll=0.01)
    assert next(versions).seq == 1
    assert [event.fields["error"] for event in events if event.name == "sync-failed"] == ["ChainStale"]
    events.clear()
    for _ in range(3):
        with pytest.raises(ChainStale):
            subscriber._look()
    assert events == []
    chain.delta()
    assert next(versions).seq == 2

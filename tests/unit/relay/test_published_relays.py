"""Relays say in the run where their copies are, and readers that look for them use them like any other copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from relayed_chain import reads_of_data, relay_once
from support import bits_of
from toy_chain import ToyChain, first_state

from deltawire.chain.reader_options import ReaderOptions
from deltawire.chain.records.published_relays import may_use, publish_relay, published_relays, remove_relay
from deltawire.errors import BadUrl
from deltawire.events import Event
from deltawire.format.records.relay_records import PublishedRelay
from deltawire.relay import Relay
from deltawire.store import Store, keys
from deltawire.store.copies.locations import open_sources
from deltawire.store.copies.sources import Sources
from deltawire.store.local import LocalStore
from deltawire.store.memory import MemoryStore
from deltawire.subscribe import Subscriber
from deltawire.testing import FaultyStore


def chain_in(folder: Path) -> ToyChain:
    chain = ToyChain(LocalStore(folder))
    chain.anchor(first_state())
    chain.grow(2)
    return chain


def test_a_relay_says_where_its_copy_is_while_it_runs_and_readers_find_it(tmp_path: Path):
    chain = chain_in(tmp_path / "toy")
    with Relay(tmp_path / "toy", tmp_path / "copy", publish_as="eu", options=ReaderOptions(patience=0.0), threads=1) as relay:
        relay.copy()
        assert published_relays(chain.store) == [(tmp_path / "copy").as_uri()]
        options = ReaderOptions(find_relays=True, patience=0.0, pin=False)
        with Subscriber(tmp_path / "toy", options=options, threads=1) as reader:
            reader.sync()
            assert bits_of(reader.state) == bits_of(chain.state)
            assert isinstance(reader._store, Sources)
            assert reader._store.copy_urls == ((tmp_path / "copy").as_uri(),)
        with Subscriber(tmp_path / "toy", options=ReaderOptions(patience=0.0, pin=False), threads=1) as reader:
            reader.sync()
            assert not isinstance(reader._store, Sources)
    assert published_relays(chain.store) == []
    with pytest.raises(ValueError, match="name"):
        Relay(tmp_path / "toy", tmp_path / "copy", publish_as="../x")


def test_readers_use_what_they_find_and_look_again_after_a_while(tmp_path: Path):
    chain = chain_in(tmp_path / "toy")
    copy, now = FaultyStore(MemoryStore("copy")), [0.0]
    relay_once(chain.store, copy.inner)
    found: list[Any] = []
    origin = FaultyStore(chain.store)
    sources = Sources(origin, [], more=lambda _: found, clock=lambda: now[0])
    with Subscriber(sources, options=ReaderOptions(patience=0.0, pin=False, run="toy"), threads=1) as reader:
        reader.sync()
        assert reads_of_data(origin)
        found.append(copy)
        chain.delta()
        relay_once(chain.store, copy.inner)
        origin.calls.clear()
        now[0] += 601
        reader.sync()
        assert not reads_of_data(origin)
        assert reads_of_data(copy)


@pytest.mark.parametrize(
    ("url", "is_used"),
    [
        ("s3://bucket/run", True),
        ("s3://bucket/run?region=eu-west-1", True),
        ("gs://bucket/run", True),
        ("s3://bucket/run?endpoint=https://attacker.example", False),
        ("s3://user:secret@bucket/run", False),
        ("file:///etc", False),
        ("/etc", False),
        ("memory://x", False),
        ("http://169.254.169.254/latest", False),
        ("s3://[", False),
        ("", False),
    ],
)
def test_only_harmless_locations_are_used(url: str, is_used: bool):
    assert may_use(url, "s3://bucket/origin") == is_used


def test_objects_that_are_no_published_relays_are_ignored(tmp_path: Path):
    chain = chain_in(tmp_path / "toy")
    run, store = chain.run, chain.store
    store.put(keys.relay_key("torn"), b"{")
    store.put(keys.relay_key("large"), bytes(1 << 17))
    store.put("relay/not-a-record", b"x")
    store.put(keys.relay_key("other"), PublishedRelay("0" * 32, "other", "s3://bucket/x").to_bytes())
    store.put(keys.relay_key("liar"), PublishedRelay(run.id, "honest", "s3://bucket/y").to_bytes())
    store.put(keys.relay_key("server"), PublishedRelay(run.id, "server", "s3://bucket/y?endpoint=https://a.b").to_bytes())
    assert published_relays(store) == []
    publish_relay(store, run, "good", "s3://bucket/copy")
    assert published_relays(store) == ["s3://bucket/copy"]
    remove_relay(store, "good")
    assert published_relays(store) == []
    with pytest.raises(BadUrl):
        publish_relay(store, run, "bad", "memory://copy")


def test_a_location_that_cannot_be_opened_hides_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Anybody may publish a relay at a provider that the reader has no account for."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    pytest.importorskip("obstore")
    events: list[Event] = []
    store = open_sources(tmp_path / "toy", find=lambda _: ["az://container/run", (tmp_path / "copy").as_uri()], on_event=events.append)
    chain = chain_in(tmp_path / "toy")
    relay_once(chain.store, LocalStore(tmp_path / "copy"))
    assert isinstance(store, Sources)
    with Subscriber(store, options=ReaderOptions(patience=0.0, pin=False), threads=1) as reader:
        reader.sync()
        assert bits_of(reader.state) == bits_of(chain.state)
        assert store.copy_urls == ((tmp_path / "copy").as_uri(),)
    (avoided,) = [event.fields["relay"] for event in events if event.name == "relay-avoided"]
    assert avoided == "az://container/run"


def test_readers_keep_a_bounded_number_of_copies_whatever_is_published(tmp_path: Path):
    chain, now, looks = chain_in(tmp_path / "toy"), [0.0], [0]

    def more(_: Store) -> Iterator[Store]:
        looks[0] += 1
        yield from (MemoryStore(f"copy-{looks[0]}-{number}") for number in range(40))

    sources = Sources(chain.store, [], more=more, clock=lambda: now[0])
    for _ in range(5):
        sources.get(keys.HEAD, limit=1 << 16)
        now[0] += 601
    assert looks == [5]
    assert len(sources.copy_urls) == 64

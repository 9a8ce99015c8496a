"""A transfer that is cut continues at the byte where it was cut, however often that happens."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cutting_server import CuttingServer, cutting_server
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.errors import StoreError, StoreUnavailable
from deltawire.store import StoreOptions, open_store, remote
from deltawire.store.remote import RemoteStore
from deltawire.store.streams.known_links import KnownLinks

PIECE = 256 * 1024
DATA = random.Random(0).randbytes(3 * 1024 * 1024 + 17)


@pytest.fixture(autouse=True, scope="module")
def _credentials():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        yield


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    """The server of an earlier test may have had the same port."""
    monkeypatch.setattr("deltawire.store.remote.KNOWN", KnownLinks())


@contextmanager
def store_at(server: CuttingServer, *, retries: int = 3, streams: int = 64) -> Iterator[RemoteStore]:
    options = StoreOptions(endpoint=server.endpoint, retries=retries, streams=streams)
    with open_store("s3://bucket/prefix", options=options) as store:
        assert isinstance(store, RemoteStore)
        store._retry = replace(store._retry, sleep=lambda _: None)
        yield store


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=12), streams=st.sampled_from([1, 64]))
def test_every_byte_comes_however_often_the_link_is_cut(cuts, streams):
    with cutting_server(DATA, cuts) as server, store_at(server, streams=streams, retries=12) as store:
        buffer = bytearray(len(DATA))
        moved: list[int] = []
        store.read_into("key", memoryview(buffer), progress=moved.append)
        assert buffer == DATA
        assert sum(moved) == len(DATA)
        asked = sum(stop - start for start, stop in server.asked)
        assert sum(server.sent) < len(DATA) + (len(cuts) + 1) * PIECE, "bytes were sent again that had arrived"
        assert asked >= len(DATA)


def test_a_cut_range_is_asked_for_from_the_byte_of_the_cut():
    with cutting_server(DATA, [1_000_001, 5, 700_003]) as server, store_at(server, streams=1) as store:
        buffer = bytearray(len(DATA))
        store.read_into("key", memoryview(buffer))
        assert buffer == DATA
        assert [start for start, _ in server.asked] == [0, 1_000_001, 1_000_006, 1_700_009]
        assert {stop for _, stop in server.asked} == {len(DATA)}


def test_attempts_that_bring_something_do_not_count_as_failures():
    cuts = [100_000] * 25
    with cutting_server(DATA, cuts) as server, store_at(server, streams=1, retries=1) as store:
        buffer = bytearray(len(DATA))
        store.read_into("key", memoryview(buffer))
        assert buffer == DATA
        assert len(server.asked) == 26
        assert store.link.failures == 25


def test_attempts_that_bring_nothing_end():
    with cutting_server(DATA, [50_000, *[0] * 4]) as server, store_at(server, streams=1, retries=3) as store:
        with pytest.raises(StoreUnavailable):
            store.read_into("key", memoryview(bytearray(len(DATA))))
        assert [start for start, _ in server.asked] == [0, 50_000, 50_000, 50_000]


def test_an_object_is_cut_into_as_many_ranges_as_streams_are_free():
    with cutting_server(DATA, []) as server, store_at(server) as store:
        small = bytearray(PIECE)
        store.read_into("key", memoryview(small))
        assert server.asked == [(0, PIECE)]
        server.asked.clear()
        buffer = bytearray(len(DATA))
        store.read_into("key", memoryview(buffer))
        assert buffer == DATA
        assert len(server.asked) == store.link.streams == 4
        assert sorted(start for start, _ in server.asked)[0] == 0


def test_a_cut_upload_is_sent_again_and_counts_as_a_failure():
    with cutting_server(DATA, [0, 100_000]) as server, store_at(server) as store:
        moved: list[int] = []
        store.put("key", DATA, progress=moved.append)
        assert server.puts == [DATA]
        assert sum(moved) == len(DATA)
        assert store.link.failures == 2
        assert 1 <= store._up.width < 4


def test_a_store_begins_where_the_last_one_at_its_place_ended():
    with cutting_server(DATA, []) as server:
        with store_at(server) as store:
            store.read_into("key", memoryview(bytearray(len(DATA))))
            store._down._control.width = 17  # as if the link could use so many
        with store_at(server) as again:
            assert again._down.width == 17
        with store_at(server, streams=5) as limited:
            assert limited._down.width == 5


def test_a_slow_transfer_reports_what_has_come(monkeypatch):
    """The server sends the rest of the object only after the reader has reported its beginning."""
    monkeypatch.setattr(remote, "_REPORT_SECONDS", 0.0)
    has_reported = threading.Event()
    with cutting_server(DATA, [], pause=(1000, has_reported)) as server, store_at(server, streams=1) as store:
        moved: list[int] = []

        def report(count: int) -> None:
            moved.append(count)
            has_reported.set()

        buffer = bytearray(len(DATA))
        store.read_into("key", memoryview(buffer), progress=report)
        assert buffer == DATA
        assert 0 < moved[0] <= 1000
        assert sum(moved) == len(DATA)


@pytest.mark.parametrize("after", [None, "commit/2"])
def test_a_listing_of_nothing_that_was_asked_for_ends(monkeypatch, after):
    """A server may show keys for ever that no store has, or that come before those that were asked for."""
    page = [{"path": "prefix/commit/\x001" if after is None else "prefix/commit/1", "size": 1, "last_modified": datetime.now(UTC)}] * 1000
    monkeypatch.setattr(remote.obstore, "list", lambda *_, **__: itertools.repeat(page))
    monkeypatch.setattr(remote, "_MOST_SKIPPED", 10_000)
    with cutting_server(DATA, []) as server, store_at(server) as store, pytest.raises(StoreError, match="does not end"):
        list(store.list("commit/", after=after))

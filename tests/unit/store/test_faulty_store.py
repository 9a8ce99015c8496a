"""A faulty store fails exactly at the calls that the test chose."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from deltawire.errors import DataDamaged, ObjectMissing, OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, ProcessDied, Reading, call
from deltawire.testing.faulty_store import Failure


def test_calls_are_numbered_and_recorded() -> None:
    store = FaultyStore(MemoryStore())
    store.put("a", b"x")
    store.get("a", limit=1)
    list(store.list(""))
    store.delete(["a", "b"])
    assert store.calls == [(0, "put", "a"), (1, "get", "a"), (2, "list", ""), (3, "delete", "a"), (4, "delete", "b")]


@pytest.mark.parametrize(("kind", "error"), [("unknown", OutcomeUnknown), ("unavailable", StoreUnavailable), ("full", StoreFull)])
def test_faults_strike_before_or_after_the_deed(kind: Failure, error: type[StoreError]) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [Before(0, kind), After(call("put_if_absent", "b"), kind)])
    for key in ("a", "b"):
        with pytest.raises(error):
            store.put_if_absent(key, b"x")
    assert [info.key for info in inner.list("")] == ["b"]
    store.put_if_absent("b2", b"x")


def test_a_crash_is_no_exception_and_for_good() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [After(call("put"), "crash")])
    listing = store.list("")
    with pytest.raises(ProcessDied):
        store.put("a", b"x")
    assert not issubclass(ProcessDied, Exception)
    assert inner.get("a", limit=1) == b"x"
    for attempt in (lambda: store.get("a", limit=1), lambda: store.put("b", b"x"), lambda: store.list(""), lambda: store.delete(["a"])):
        with pytest.raises(ProcessDied):
            attempt()
    assert list(listing) == []
    store.close()


def test_a_process_may_die_between_two_deletions() -> None:
    inner = MemoryStore()
    for key in "abc":
        inner.put(key, b"")
    with pytest.raises(ProcessDied):
        FaultyStore(inner, [Before(1, "crash")]).delete("abc")
    assert [info.key for info in inner.list("")] == ["b", "c"]


def test_reads_can_lie() -> None:
    inner = MemoryStore()
    inner.put("a", b"old!")
    kinds = ["missing", "stale", "flip", "truncate"]
    store = FaultyStore(inner, [Reading(index, kind) for index, kind in enumerate(kinds)])  # type: ignore[arg-type]
    store.remember()
    inner.put("a", b"new!")
    with pytest.raises(ObjectMissing):
        store.get("a", limit=4)
    assert [store.get("a", limit=4) for _ in range(4)] == [b"old!", b"oew!", b"ne", b"new!"]


def test_reads_into_buffers_can_lie() -> None:
    inner = MemoryStore()
    inner.put("a", bytes(8))
    store = FaultyStore(inner, [Reading(0, "flip"), Reading(1, "truncate")])
    buffer = bytearray(8)
    store.read_into("a", memoryview(buffer))
    assert sum(buffer) == 1
    with pytest.raises(DataDamaged):
        store.read_into("a", memoryview(buffer))


def test_listings_can_be_empty_or_stale() -> None:
    inner = MemoryStore()
    inner.put("a", b"")
    store = FaultyStore(inner, [Reading(0, "missing"), Reading(1, "stale")])
    store.remember()
    inner.put("b", b"")
    assert [[info.key for info in store.list("")] for _ in range(3)] == [[], ["a"], ["a", "b"]]


def test_faults_strike_as_often_as_they_should() -> None:
    inner = MemoryStore()
    inner.put("a", b"")
    twice = FaultyStore(inner, [Reading(call("get"), "missing", times=2)])
    always = FaultyStore(inner, [Reading(call("get"), "missing", times=None)])
    for store, expected in ((twice, 2), (always, 5)):
        missed = 0
        for _ in range(5):
            try:
                store.get("a", limit=1)
            except ObjectMissing:
                missed += 1
        assert missed == expected


def test_time_can_be_told_by_another_clock() -> None:
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    inner = MemoryStore()
    inner.put("before", b"")
    store = FaultyStore(inner, clock=lambda: now)
    store.put("a", b"")
    now += timedelta(days=1)
    store.put_if_absent("b", b"")
    assert store.head("b").modified - store.head("a").modified == timedelta(days=1)
    assert {info.key: info.modified for info in store.list("")}["a"] == datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert store.head("before").modified == inner.head("before").modified

"""The probe refuses stores that break their promises, and does not blame a store for a bad connection."""

from __future__ import annotations

import pytest

from deltawire.errors import StoreDenied, StoreError, StoreUnavailable, StoreUnsuitable
from deltawire.store import Buffer, Store, probe
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, FaultyStore, Reading, call


class _Overwrites(MemoryStore):
    def put_if_absent(self, key: str, data: bytes) -> None:
        self.put(key, data)


class _OverwritesAndDenies(MemoryStore):
    def put_if_absent(self, key: str, data: bytes) -> None:
        try:
            super().put_if_absent(key, data)
        except StoreError:
            self.put(key, data)
            raise


class _ShiftsRanges(MemoryStore):
    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0, progress: object = None) -> None:
        super().read_into(key, buffer, offset=0)


class _MayNotDelete(MemoryStore):
    def delete(self, keys: object) -> None:
        raise StoreDenied("delete is not allowed.")


@pytest.mark.parametrize(
    ("store", "why"),
    [
        (_Overwrites(), "twice"),
        (_OverwritesAndDenies(), "overwrote"),
        (_ShiftsRanges(), "wrong bytes"),
        (FaultyStore(MemoryStore(), [Reading(call("get"), "missing")]), "does not give back"),
        (FaultyStore(MemoryStore(), [Reading(call("read_into"), "truncate")]), "cannot read a range"),
        (FaultyStore(MemoryStore(), [Reading(call("list"), "missing")]), "does not list"),
    ],
)
def test_a_store_that_breaks_a_promise_is_unsuitable(store: Store, why: str) -> None:
    with pytest.raises(StoreUnsuitable, match=why):
        probe(store)
    assert list(store.list("")) == []


def test_a_lost_answer_to_a_creation_that_landed_is_no_obstacle() -> None:
    probe(FaultyStore(MemoryStore(), [After(call("put_if_absent"), "unknown")]))


@pytest.mark.parametrize(
    "fault",
    [
        Before(call("put_if_absent"), "unknown"),
        After(1, "unknown"),
        Before(call("put_if_absent"), "unavailable"),
        Before(call("get"), "unavailable"),
        Before(call("read_into"), "unavailable"),
        Before(call("list"), "unavailable"),
    ],
)
def test_a_bad_line_is_unavailable_and_not_unsuitable(fault: Before | After) -> None:
    inner = MemoryStore()
    if isinstance(fault, After):
        inner_put = inner.put_if_absent
        inner.put_if_absent = lambda key, data: None if list(inner.list("")) else inner_put(key, data)  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        probe(FaultyStore(inner, [fault]))


def test_a_writer_that_may_not_delete_can_be_probed() -> None:
    probe(_MayNotDelete())


def test_the_probe_uses_a_new_name_each_time() -> None:
    keys: set[str] = set()

    class _Recording(MemoryStore):
        def put_if_absent(self, key: str, data: Buffer) -> None:
            keys.add(key)
            super().put_if_absent(key, bytes(data))

    store = _Recording()
    probe(store)
    probe(store)
    assert len(keys) == 2

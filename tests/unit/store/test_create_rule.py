"""Test the rule by which records are created. Publishers run it on a store and fleets as steps, and both must behave alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deltawire.errors import OutcomeUnknown, StoreFull
from deltawire.fleet.steps.requests import run_steps
from deltawire.store import Store
from deltawire.store.create_rule import create_and_look, create_steps
from deltawire.store.memory import MemoryStore
from deltawire.testing import Before, FaultyStore, Reading, call

CreateRecord = Callable[[Store, bytes], bytes]


@pytest.fixture(params=["store", "steps"])
def create(request: pytest.FixtureRequest) -> CreateRecord:
    if request.param == "store":
        return lambda store, data: create_and_look(store, "x", data, sleep=lambda _: None)
    return lambda store, data: run_steps(create_steps("x", data), store, sleep=lambda _: None)


def test_the_first_writer_wins(create: CreateRecord) -> None:
    store = MemoryStore()
    assert create(store, b"mine") == b"mine"
    assert create(store, b"other") == b"mine"


def test_a_definite_failure_is_raised_and_leaves_nothing(create: CreateRecord) -> None:
    store = FaultyStore(MemoryStore(), [Before(call("put_if_absent", "x"), "full")])
    with pytest.raises(StoreFull):
        create(store, b"mine")
    assert create(store, b"other") == b"other"


def test_a_failure_after_an_unknown_outcome_keeps_the_outcome_unknown(create: CreateRecord) -> None:
    faults = [Before(call("put_if_absent", "x"), "unknown"), Before(call("put_if_absent", "x"), "full", times=None)]
    with pytest.raises(OutcomeUnknown):
        create(FaultyStore(MemoryStore(), faults), b"mine")


def test_an_object_that_exists_but_cannot_be_read_yet_is_waited_for(create: CreateRecord) -> None:
    store = FaultyStore(MemoryStore(), [Reading(call("get", "x"), "missing", times=3)])
    store.inner.put("x", b"theirs")
    assert create(store, b"mine") == b"theirs"


def test_a_call_that_continues_an_unknown_outcome_raises_nothing_else() -> None:
    store = FaultyStore(MemoryStore(), [Before(call("put_if_absent", "x"), "full", times=None)])
    with pytest.raises(OutcomeUnknown):
        create_and_look(store, "x", b"mine", doubt=True, sleep=lambda _: None)


def test_pauses_grow_and_are_random() -> None:
    pauses: list[float] = []
    store = FaultyStore(MemoryStore(), [Before(call("put_if_absent", "x"), "unknown", times=None)])
    with pytest.raises(OutcomeUnknown):
        create_and_look(store, "x", b"mine", sleep=pauses.append)
    assert len(pauses) == 4
    assert all(0.5 * 0.2 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(pauses, start=1))

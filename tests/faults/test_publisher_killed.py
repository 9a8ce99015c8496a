"""A publisher dies, or gets no answer, at every single call of a session. Another publisher takes over.

The publishers announce every file, so announcements are among these calls.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
from announced_files import announce_at_once
from publications import SESSION, Ledger, Listener, assert_goes_on, calls_of_a_session, open_publisher, published, repeated, run_session

from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing import After, Before, Call, FaultyStore, ProcessDied
from deltawire.testing.faulty_store import Failure

Fault = type[Before] | type[After]


@pytest.fixture(autouse=True)
def _announcing(monkeypatch: pytest.MonkeyPatch) -> None:
    announce_at_once(monkeypatch)


class TheSame:
    """A condition that holds for the n-th call of one operation on one object.

    Uploads run in parallel, so the index of a call would not identify it.
    """

    def __init__(self, call: Call, number: int) -> None:
        self._what = what(call)
        self._number = number
        self._passed = 0

    def __call__(self, call: Call) -> bool:
        if what(call) != self._what:
            return False
        self._passed += 1
        return self._passed == self._number

    @property
    def was_met(self) -> bool:
        return self._passed >= self._number


def what(call: Call) -> tuple[str, str]:
    """Return what identifies a call in every session. Only probes have a different key each time."""
    return call.op, "probe/" if call.key.startswith("probe/") else call.key


def sessions_with(fault: Fault, kind: Failure, *, in_background: bool = False) -> Iterator[FaultyStore]:
    """Yield one store for each call of a session.

    The store fails at that call. In the background a shortcut may be made later, and get another key.
    """
    passed: Counter[tuple[str, str]] = Counter()
    calls = calls_of_a_session()
    assert sum(call.key == keys.COMING for call in calls) > 5
    for call in calls:
        print(call)  # if the test fails, the last printed call is the one that failed
        passed[what(call)] += 1
        unanswered = kind == "unknown" and call.op != "put_if_absent"  # for other calls a store reports "unavailable" instead
        condition = TheSame(call, passed[what(call)])
        yield FaultyStore(MemoryStore(), [fault(condition, "unavailable" if unanswered else kind)])
        assert condition.was_met or in_background, "the call was never made"


def assert_death_loses_nothing(fault: Fault) -> None:
    for store in sessions_with(fault, "crash"):
        ledger = Ledger()
        with contextlib.suppress(ProcessDied):
            run_session(store, ledger)
        assert store.died
        assert_goes_on(store.inner, ledger)


def assert_errors_lose_nothing(fault: Fault, kind: Failure) -> Listener:
    """Check that errors at any call lose no version. Return the reported events."""
    events = Listener()
    for store in sessions_with(fault, kind):
        ledger = Ledger()
        run_session(store, ledger, tries=2, on_event=events)
        assert ledger.newest == SESSION - 1
        assert_goes_on(store.inner, ledger)
    return events


def test_a_publisher_killed_before_any_call_loses_nothing_acknowledged() -> None:
    assert_death_loses_nothing(Before)


def test_a_publisher_killed_after_any_call_loses_nothing_acknowledged() -> None:
    assert_death_loses_nothing(After)


def test_a_call_that_was_done_but_not_answered_loses_nothing() -> None:
    assert_errors_lose_nothing(After, "unknown")


def test_a_call_that_was_neither_done_nor_answered_loses_nothing() -> None:
    assert_errors_lose_nothing(Before, "unknown")


def test_a_store_that_is_unavailable_at_any_call_loses_nothing() -> None:
    events = assert_errors_lose_nothing(Before, "unavailable")
    assert {event.fields["error"] for event in events.events if event.name == "publish-failed"} == {"StoreUnavailable"}
    assert {event.fields["kind"] for event in events.events if event.name == "shortcut-failed"} == {"anchor", "skip"}


def test_a_publisher_killed_while_it_takes_a_run_up_again_loses_nothing() -> None:
    """The publisher is killed at every call of opening an existing run, which reads its state, and of the first publication after that."""
    index = 0
    while True:
        inner, ledger = published(3)
        store = FaultyStore(inner, [(Before, After)[index % 2](index // 2, "crash")])
        with contextlib.suppress(ProcessDied), open_publisher(store) as publisher:
            ledger.publish(publisher)
        if not store.died:
            assert index > 40
            return
        print(store.calls[-1])
        assert_goes_on(inner, ledger)
        index += 1


def test_publishing_in_the_background_survives_a_fault_at_any_call() -> None:
    for store in sessions_with(After, "unknown", in_background=True):
        ledger = Ledger()
        with repeated(lambda store=store: open_publisher(store, background=True)) as publisher:
            ledger.publish(publisher, SESSION, tries=2)
        assert ledger.newest == SESSION - 1
        assert_goes_on(store.inner, ledger)

"""No more bytes and requests pass per second than the user allows."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import obstore.store
import pytest

from deltawire.store import StoreOptions
from deltawire.store.remote import Clients, RemoteStore
from deltawire.store.streams.rate_limit import RateLimit

MIB = 1 << 20


class Clock:
    """A clock that moves only when code sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_without_limits_nobody_waits():
    limit = RateLimit(sleep=lambda _: pytest.fail("it waited"))
    for _ in range(1000):
        limit.request()
        limit.transfer(1 << 40)


@pytest.mark.parametrize("rate", [0.5 * MIB, 10 * MIB, 1000 * MIB])
def test_callers_side_by_side_never_get_more_than_the_rate_and_a_burst(rate):
    """Many callers in virtual time. A caller continues when its wait is over."""
    now, pause = [0.0], [0.0]
    limit = RateLimit(rate, clock=lambda: now[0], sleep=lambda seconds: pause.__setitem__(0, seconds))
    draw = random.Random(1)
    ready = [(draw.uniform(0, 5), number) for number in range(40)]
    heapq.heapify(ready)
    passed: list[tuple[float, int]] = []
    for _ in range(2000):
        now[0], number = heapq.heappop(ready)
        size, pause[0] = draw.choice([1, 1000, 256 << 10]), 0.0
        limit.transfer(size)
        passed.append((now[0] + pause[0], size))
        heapq.heappush(ready, (now[0] + pause[0] + draw.choice([0.0, 0.0, 0.0, 1.0]), number))
    passed.sort()
    burst = max(0.25 * rate, MIB)
    for begin in range(0, len(passed), 97):
        total = 0
        for when, size in passed[begin:]:
            total += size
            assert total <= burst + rate * (when - passed[begin][0]) + (256 << 10) + 1e-3 * rate


def test_requests_are_limited_after_a_burst_of_a_second():
    clock = Clock()
    limit = RateLimit(None, 5, clock=lambda: clock.now, sleep=clock.sleep)
    for _ in range(105):
        limit.request()
    assert clock.now == pytest.approx(120)
    clock.now += 1000
    for _ in range(5):
        limit.request()
    assert clock.now == pytest.approx(1120)


def test_less_than_one_request_per_second_is_possible():
    clock = Clock()
    limit = RateLimit(None, 0.1, clock=lambda: clock.now, sleep=clock.sleep)
    for _ in range(4):
        limit.request()
    assert clock.now == pytest.approx(130)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["max_rate", "max_requests"])
def test_rates_that_allow_nothing_are_refused(name, wrong):
    with pytest.raises(ValueError, match="max_rate"):
        StoreOptions(**{name: wrong})


@pytest.fixture
def limited():
    """Return a store with limits whose clock moves only when it waits."""
    memory = obstore.store.MemoryStore()
    clock = Clock()
    store = RemoteStore(
        Clients(memory, memory, memory, memory),
        url="test://bucket",
        prefix="",
        options=StoreOptions(multipart_bytes=5 << 20),
        rate=RateLimit(MIB, 10, clock=lambda: clock.now, sleep=clock.sleep),
    )
    store._retry = replace(store._retry, sleep=lambda _: None)
    with store:
        yield store, clock


def test_a_store_pays_for_bytes_and_requests(limited):
    store, clock = limited
    store.put("object", bytes(4 * MIB))
    assert clock.now == pytest.approx(103)  # four seconds, less the burst of one
    store.read_into("object", memoryview(bytearray(4 * MIB)))
    assert clock.now == pytest.approx(107, abs=0.1)
    store.put("pieces", iter([bytes(6 * MIB)] * 2), size=12 * MIB)
    assert clock.now == pytest.approx(119, abs=0.1)


def test_every_kind_of_request_is_counted(limited):
    store, clock = limited
    store.put("object", b"x")
    before = clock.now
    for _ in range(20):
        store.get("object", limit=1)
        store.head("object")
        list(store.list(""))
        store.get_if_changed("object", limit=1, tag=None)
        store.put("object", b"x")
        store.delete(["missing"])
        store.read_into("object", memoryview(bytearray(1)))
    assert clock.now - before >= (7 * 20 - 10) / 10 - 0.2

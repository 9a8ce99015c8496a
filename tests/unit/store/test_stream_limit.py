"""The number of streams follows the measured link. All times here are virtual."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.store.streams.stream_limit import StreamControl, StreamLimit


class VirtualLink:
    """A link on which each stream has at most `per_stream` bytes per second, and all together have `total`, in equal shares."""

    def __init__(self, *, latency: float, per_stream: float, total: float, noise: float = 0.0, seed: int = 0, first: int = 4) -> None:
        self.now = 0.0
        self.latency, self.per_stream, self.total, self.noise = latency, per_stream, total, noise
        self.control = StreamControl(first=first, clock=lambda: self.now)
        self.widths = [self.control.width]
        self.random = random.Random(seed)

    def goodput(self, width: int, size: int) -> float:
        rate = min(self.per_stream, self.total / width)
        return width * size / (self.latency + size / rate)

    def best(self, size: int) -> float:
        return max(self.goodput(width, size) for width in range(1, 65))

    def move(self, transfers: int, *, size: int = 1 << 20, pieces: int = 4, fails=lambda number: False) -> float:
        """Move objects of one size, as many at once as the control allows. Return the seconds."""
        begin, numbers, left = self.now, itertools.count(), transfers
        asked: list[tuple[float, int]] = []
        moving: dict[int, tuple[int, float]] = {}
        """The pieces that each transfer has moved, and the bytes that the next one still needs."""
        while left or asked or moving:
            while left and self.control.running < self.control.width:
                left -= 1
                self.control.start()
                heapq.heappush(asked, (self.now + self.latency, next(numbers)))
            share = min(self.per_stream, self.total / max(len(moving), 1))
            ends = min((self.now + need / share for _, need in moving.values()), default=math.inf)
            until = min(ends, asked[0][0] if asked else math.inf)
            moving = {which: (piece, need - (until - self.now) * share) for which, (piece, need) in moving.items()}
            self.now = until
            while asked and asked[0][0] <= self.now:
                moving[heapq.heappop(asked)[1]] = (0, self._piece(size / pieces))
                self.control.answered(self.latency)
            for which, (piece, need) in list(moving.items()):
                if need > 1e-3:
                    continue
                self.control.moved(size // pieces)
                moving[which] = (piece + 1, self._piece(size / pieces))
                is_cut = piece == 0 and fails(which)
                if is_cut:
                    self.control.failed()
                if is_cut or piece + 1 == pieces:
                    del moving[which]
                    self.control.end()
            if self.widths[-1] != self.control.width:
                self.widths.append(self.control.width)
        return self.now - begin

    def _piece(self, nbytes: float) -> float:
        return nbytes / self.random.uniform(1 - self.noise, 1 + self.noise)


LINKS = [
    {"latency": 0.08, "per_stream": 8e6, "total": 125e6},  # 1 Gbit/s, 80 ms
    {"latency": 0.15, "per_stream": 4e6, "total": 62e6},
    {"latency": 0.03, "per_stream": 20e6, "total": 31e6},  # four streams are enough
    {"latency": 0.001, "per_stream": 100e6, "total": 1e9},
    {"latency": 0.3, "per_stream": 1e6, "total": 1e6},  # one stream is enough
]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.85), (0.2, 0.7)])
def test_the_width_comes_close_to_the_best_goodput(link, noise, share):
    virtual = VirtualLink(**link, noise=noise)
    virtual.move(3000)
    assert virtual.goodput(virtual.control.width, 1 << 20) >= share * virtual.best(1 << 20), virtual.widths


def test_the_width_reaches_what_the_link_can_use_within_ten_windows():
    virtual = VirtualLink(**LINKS[0])
    virtual.move(1500)
    good = next(index for index, width in enumerate(virtual.widths) if virtual.goodput(width, 1 << 20) >= 0.9 * virtual.best(1 << 20))
    assert good <= 10
    assert max(virtual.widths) <= 64


def test_more_streams_are_not_kept_where_they_bring_nothing():
    virtual = VirtualLink(latency=0.3, per_stream=1e6, total=1e6)
    virtual.move(2000)
    assert virtual.control.width <= 8
    assert max(virtual.widths) <= 20


def test_the_width_doubles_while_a_short_read_still_runs():
    slow, fast = {"latency": 0.15, "per_stream": 4e6, "total": 125e6}, VirtualLink(latency=0.15, per_stream=4e6, total=125e6, first=64)
    grown = VirtualLink(**slow)
    best = fast.move(60, size=1_260_000)
    assert grown.move(60, size=1_260_000) <= 3 * best
    assert grown.widths[:3] == [4, 8, 16]
    assert grown.move(60, size=1_260_000) <= 1.5 * best, "it forgot the link"


def test_a_link_with_a_long_delay_begins_with_more_streams():
    for delay, width in [(None, 4), (0.001, 4), (0.08, 16), (0.15, 30), (2.0, 32)]:
        control = StreamControl(clock=lambda: 0.0)
        for _ in range(3 if delay else 0):
            control.heard(delay)
        control.heard(5.0) if delay else None  # one slow answer says nothing
        control.start()
        assert control.width == width
    narrow = StreamControl(most=2, clock=lambda: 0.0)
    narrow.heard(0.15)
    narrow.start()
    assert narrow.width == 2


def test_streams_that_a_long_delay_began_end_where_fewer_suffice():
    virtual = VirtualLink(latency=0.15, per_stream=2e6, total=2e6)
    virtual.control.heard(0.15)
    virtual.move(2000)
    assert max(virtual.widths) >= 30
    assert virtual.control.width <= 8


def test_a_failure_ends_the_growth():
    now = [0.0]
    control = StreamControl(clock=lambda: now[0])
    for _ in range(4):
        control.start()
    control.failed()
    assert (control.width, control.is_growing) == (2, False)
    for _ in range(50):
        now[0] += 0.01
        control.moved(1 << 20)
    assert control.width == 2


def test_a_pause_between_two_reads_does_not_shrink_the_width():
    virtual = VirtualLink(**LINKS[0])
    virtual.move(1500)
    wide = virtual.control.width
    for _ in range(20):
        virtual.now += 60
        virtual.move(64)
    assert virtual.control.width >= wide


def test_failures_shrink_the_width_but_never_to_nothing():
    virtual = VirtualLink(**LINKS[0])
    virtual.move(1000)
    wide = virtual.control.width
    virtual.move(1000, fails=lambda number: number % 3 == 0)
    assert 1 <= virtual.control.width < wide
    assert min(virtual.widths) >= 1
    assert virtual.control.estimate().failures > 100
    virtual.move(4000)
    assert virtual.goodput(virtual.control.width, 1 << 20) >= 0.8 * virtual.best(1 << 20), "it has not recovered"


def test_failures_at_the_same_time_count_once():
    now = [0.0]
    control = StreamControl(first=40, clock=lambda: now[0])
    for _ in range(40):
        control.start()
    for _ in range(40):
        control.failed()
        control.end()
    assert control.width == 28
    assert control.estimate().failures == 40


def test_the_width_shrinks_when_the_link_becomes_slower_and_grows_again():
    virtual = VirtualLink(**LINKS[0])
    virtual.move(1500)
    wide = virtual.control.width
    virtual.total = 2e6
    virtual.move(2000)
    assert virtual.control.width < wide
    virtual.total = 125e6
    virtual.move(6000)
    assert virtual.goodput(virtual.control.width, 1 << 20) >= 0.8 * virtual.best(1 << 20), virtual.widths


def test_a_limit_that_is_not_full_keeps_its_width():
    now = [0.0]
    control = StreamControl(clock=lambda: now[0])
    for _ in range(2000):  # one transfer at a time
        control.start()
        now[0] += 0.05
        control.answered(0.05)
        control.moved(1 << 20)
        control.end()
        now[0] += 1.0  # idle time does not count
    assert control.width == 4
    estimate = control.estimate()
    assert estimate.goodput == pytest.approx((1 << 20) / 0.05, rel=0.01)
    assert (estimate.latency, estimate.streams, estimate.failures) == (0.05, 4, 0)


def test_nothing_is_known_at_first():
    estimate = StreamLimit().estimate()
    assert (estimate.goodput, estimate.latency, estimate.streams, estimate.failures) == (None, None, 4, 0)
    assert StreamLimit(first=4, most=2).width == 2


def test_no_more_transfers_run_than_the_width():
    limit = StreamLimit(first=3, most=3)
    lock, running, most = threading.Lock(), 0, 0
    all_in = threading.Barrier(3, timeout=120)

    def work(number: int) -> None:
        nonlocal running, most
        with limit.transfer() as transfer:
            with lock:
                running += 1
                most = max(most, running)
            all_in.wait()  # three must be able to run at once
            transfer.first_byte()
            transfer.moved(10)
            with lock:
                running -= 1

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(30)))
    assert most == 3
    assert limit.free == 3


def fail(limit: StreamLimit) -> None:
    with limit.transfer() as transfer:
        transfer.failed()
        raise KeyError


def test_a_transfer_that_raises_leaves_the_limit():
    limit = StreamLimit(first=1, most=1)
    for _ in range(3):
        with pytest.raises(KeyError):
            fail(limit)
    assert limit.free == 1
    assert limit.estimate().failures == 3

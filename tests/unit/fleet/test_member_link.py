"""A member reports its link and the time that updates take, as far as it has measured them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deltawire import Publisher, Version
from deltawire.fleet.member_link import MemberLink
from deltawire.format.records.member_records import MAX_FAILURES, MAX_GOODPUT, MAX_MILLISECONDS, LinkReport
from deltawire.store.memory import MemoryStore
from deltawire.store.streams.link_estimate import LinkEstimate


class MeasuredStore(MemoryStore):
    """A store whose link the test chooses."""

    estimate: LinkEstimate | None = None

    @property
    def link(self) -> LinkEstimate | None:
        return self.estimate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def version() -> Version:
    with Publisher(MemoryStore("memory://member-link")) as publisher:
        return publisher.publish({"weight": np.zeros(4, np.float32)}, step=0)


def published(version: Version, seq: int, time: float) -> Version:
    return replace(version, seq=seq, time=time)


def test_a_member_that_has_measured_nothing_reports_nothing(version: Version) -> None:
    store = MeasuredStore("memory://link")
    link = MemberLink(store, Clock())
    link.saw(None)
    assert link.report() == (None, None)
    store.estimate = LinkEstimate(failures=7)
    assert link.report() == (None, None)


def test_only_updates_count_that_were_published_while_the_member_ran(version: Version) -> None:
    clock = Clock()
    link = MemberLink(MeasuredStore("memory://link"), clock)
    link.saw(published(version, 1, 10.0))  # it joined with this version, which is old
    link.saw(published(version, 2, 999.0))  # published before it joined
    assert link.report() == (None, None)
    clock.now = 1010.0
    link.saw(published(version, 5, 1007.5))
    assert link.report() == (None, 2500)
    clock.now = 2000.0
    link.saw(published(version, 5, 1007.5))  # it still has it
    link.saw(published(version, 4, 1001.0))  # and a rewind is not an update
    assert link.report() == (None, 2500)


def test_the_median_of_the_last_updates_is_reported(version: Version) -> None:
    clock = Clock()
    link = MemberLink(MeasuredStore("memory://link"), clock)
    link.saw(published(version, 1, 10.0))
    for seq, seconds in enumerate((900.0, 900.0, 1.0, 2.0, 60.0, 3.0, 2.5), start=2):
        clock.now += 1000.0
        link.saw(published(version, seq, clock.now - seconds))
    assert link.report() == (None, 2500)


def test_a_clock_that_is_behind_the_publishers_reports_no_negative_time(version: Version) -> None:
    clock = Clock()
    link = MemberLink(MeasuredStore("memory://link"), clock)
    link.saw(published(version, 1, 10.0))
    link.saw(published(version, 2, 5000.0))
    assert link.report() == (None, 0)
    clock.now = 1e18
    for seq in range(3, 8):
        link.saw(published(version, seq, 5000.0))
    assert link.report() == (None, MAX_MILLISECONDS)


def test_the_link_is_that_of_the_store_within_the_bounds_of_the_record() -> None:
    store = MeasuredStore("memory://link")
    link = MemberLink(store, Clock())
    store.estimate = LinkEstimate(latency=0.0815)
    assert link.report() == (LinkReport(None, 82, 0), None)
    store.estimate = LinkEstimate(goodput=1.25e7, latency=0.08, failures=2)
    assert link.report() == (LinkReport(12_500_000, 80, 2), None)
    store.estimate = LinkEstimate(goodput=1e30, latency=1e30, failures=10**30)
    assert link.report() == (LinkReport(MAX_GOODPUT, MAX_MILLISECONDS, MAX_FAILURES), None)

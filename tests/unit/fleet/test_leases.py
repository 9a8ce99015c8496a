"""Test when a lease is valid, which heartbeats are read, and which attempt is next."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from deltawire.fleet.rules.roster import Roster
from deltawire.fleet.rules.round_state import HeldLease, TaskState
from deltawire.format.records import fleet_parts
from deltawire.format.records.member_records import Heartbeat, Lease
from deltawire.store import fleet_keys
from deltawire.store.base import ObjectInfo

RUN, NONCE = "ab" * 16, "cd" * 16
LEASE = Lease(RUN, 7, 1, 0, "a", NONCE, 8, 0)
BEAT = Heartbeat(RUN, "a", NONCE, "working", 8, 3, 0, 0, 0, ((7, 1, 0),), 0)


def roster(beat: Heartbeat | None, at: float) -> Roster:
    made = Roster(RUN)
    made.heard("a", beat, at, at, at)
    return made


@pytest.mark.parametrize(
    ("beat", "at", "now", "lives"),
    [
        (None, 100, 160, True),
        (None, 100, 161, False),
        (BEAT, 150, 210, True),
        (BEAT, 150, 211, False),
        (BEAT, 90, 161, False),  # a heartbeat from before the lease says nothing about it
        (replace(BEAT, working=()), 150, 161, False),
        (replace(BEAT, working=((7, 1, 1),)), 150, 161, False),
        (replace(BEAT, state="leaving"), 150, 161, True),
        (replace(BEAT, state="left"), 150, 151, False),
        (replace(BEAT, state="left"), 90, 151, True),  # the member has joined again since then
        (replace(BEAT, id="00" * 16), 150, 161, False),
        (replace(BEAT, member="b"), 150, 161, False),
    ],
)
def test_a_lease_taken_at_100_for_60_seconds_holds(beat: Heartbeat | None, at: float, now: float, lives: bool) -> None:
    assert roster(beat, at).is_lease_alive(LEASE, 100, now, 60) is lives


def test_members_with_a_recent_heartbeat_are_alive_until_they_leave() -> None:
    assert roster(BEAT, 100).alive(160, 60) == {"a": BEAT}
    assert roster(BEAT, 100).alive(161, 60) == {}
    for state in ("leaving", "left"):
        assert roster(replace(BEAT, state=state), 100).alive(101, 60) == {}


def test_heartbeats_are_read_when_they_are_new_and_once_more_where_times_are_coarse() -> None:
    def listed(modified: float) -> list[tuple[str, ObjectInfo]]:
        return [("a", ObjectInfo(fleet_keys.member_key("a"), 1, datetime.fromtimestamp(modified, timezone.utc)))]

    made = Roster(RUN)
    assert made.to_read(listed(100), 100) == ["a"]
    made.heard("a", BEAT, 100, 100, 100)
    assert made.to_read(listed(100), 101) == []
    assert made.to_read(listed(100), 102) == ["a"]  # the member may have written it twice in that second
    made.heard("a", BEAT, 100, 102, 102)
    assert made.to_read(listed(100), 200) == []
    assert made.to_read(listed(101.5), 200) == ["a"]
    made.heard("a", BEAT, 101.5, 101.5, 101.6)
    assert made.to_read(listed(101.5), 200) == []
    assert made.to_read([], 200) == []
    assert made.all() == {}


def test_the_next_attempt_is_the_lowest_that_no_member_took() -> None:
    task = TaskState()
    assert task.next_attempt() == 0
    held = HeldLease(LEASE, 0, 0)
    task.leases = {0: held, 1: HeldLease(None, 0, 0), 9: held}
    assert task.next_attempt() == 2
    assert not task.is_free


def test_when_all_leases_of_a_task_are_taken_every_offer_is_a_free_attempt_of_its_own() -> None:
    task = TaskState(leases={attempt: HeldLease(None, 0, 0) for attempt in range(fleet_keys.FIRST_FREE_ATTEMPT)})
    assert task.is_free
    first = fleet_keys.FIRST_FREE_ATTEMPT
    seen = []
    for now, member in enumerate(["a", "a", "b", None, "b"]):
        task.offer_to(member, now, patience=60)
        seen.append(task.next_attempt())
    assert seen == [first, first, first + 1, first + 1, first + 2]
    task.ended.add(first + 2)
    task.offer_to("b", 5, patience=60)
    assert task.next_attempt() == first + 3  # the trainer refused its result
    task.offer_to("b", 66, patience=60)
    assert task.next_attempt() == first + 4  # the member did not take the offer
    assert task.invited == {first: {"a"}, first + 1: {"b"}, first + 2: {"b"}, first + 3: {"b"}, first + 4: {"b"}}
    for now in range(2000):  # attempt numbers are reused
        task.offer_to("ab"[now % 2], 100 + now, patience=60)
        task.leases[task.next_attempt()] = HeldLease(LEASE, 0, 0)
        assert first <= task.next_attempt() < fleet_parts.MOST_ATTEMPTS
    assert task.is_free


def test_the_first_free_attempt_has_the_first_number_however_early_it_is_offered() -> None:
    task = TaskState()
    task.offer_to("a", 0, patience=60)
    task.leases = {attempt: HeldLease(None, 0, 0) for attempt in range(fleet_keys.FIRST_FREE_ATTEMPT)}
    task.offer_to("a", 1, patience=60)
    assert task.next_attempt() == fleet_keys.FIRST_FREE_ATTEMPT


def test_a_lease_that_heartbeats_no_longer_name_ends_at_the_next_look() -> None:
    made = roster(BEAT, 110)
    made.heard("a", replace(BEAT, working=()), 120, 120, 120)
    assert made.is_lease_alive(LEASE, 100, 120, 60)  # the listing of results may be older than the heartbeat
    assert not made.is_lease_alive(LEASE, 100, 121, 60)
    made.heard("a", replace(BEAT, working=(), tokens=1), 130, 130, 130)
    assert not made.is_lease_alive(LEASE, 100, 131, 60)
    made.heard("a", BEAT, 140, 140, 140)  # an old heartbeat had arrived late
    assert made.is_lease_alive(LEASE, 100, 141, 60)


def test_a_roster_remembers_a_bounded_number_of_dropped_leases() -> None:
    made = roster(BEAT, 100)
    for number in range(300):
        made.heard("a", replace(BEAT, working=((8, number, 0),)), 101 + number, 101 + number, 101 + number)
    assert len(made._entries["a"].dropped) == 64
    assert not made.is_lease_alive(replace(LEASE, round=8, task=298), 100, 402, 1000)

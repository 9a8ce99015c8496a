"""When a lease holds, whose heartbeats are read, and which attempt is next."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from deltawire.errors import TaskExhausted
from deltawire.fleet.roster import Roster
from deltawire.fleet.round_state import HeldLease, TaskState
from deltawire.format.fleet_records import Heartbeat, Lease
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
        (replace(BEAT, state="left"), 90, 151, True),  # it has come back since then
        (replace(BEAT, id="00" * 16), 150, 161, False),
        (replace(BEAT, member="b"), 150, 161, False),
    ],
)
def test_a_lease_taken_at_100_for_60_seconds_holds(beat: Heartbeat | None, at: float, now: float, lives: bool) -> None:
    assert roster(beat, at).lease_lives(LEASE, 100, now, 60) is lives


def test_who_was_heard_of_lately_and_stays_is_alive() -> None:
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
    assert made.to_read(listed(100), 102) == ["a"]  # it may have been written twice in that second
    made.heard("a", BEAT, 100, 102, 102)
    assert made.to_read(listed(100), 200) == []
    assert made.to_read(listed(101.5), 200) == ["a"]
    made.heard("a", BEAT, 101.5, 101.5, 101.6)
    assert made.to_read(listed(101.5), 200) == []
    assert made.to_read([], 200) == []
    assert made.all() == {}


def test_the_next_attempt_is_the_lowest_that_nobody_took() -> None:
    task = TaskState()
    assert task.next_attempt() == 0
    held = HeldLease(LEASE, 0, 0)
    task.leases = {0: held, 1: HeldLease(None, 0, 0), 900: held}
    assert task.next_attempt() == 2
    task.leases = dict.fromkeys(range(fleet_keys.MOST_ATTEMPTS), held)
    with pytest.raises(TaskExhausted):
        task.next_attempt()

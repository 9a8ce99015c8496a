"""A member's heartbeats say where the time of its last update went, as its engine reported it."""

from deltawire.events import Event
from deltawire.fleet.update_times import UpdateTimes
from deltawire.format.records.member_records import MAX_MICROSECONDS, UpdateReport


def test_the_last_times_of_each_phase_are_kept_and_events_are_passed_on() -> None:
    heard = []
    times = UpdateTimes(heard.append)
    assert times.report() is None
    events = [
        Event("swapped", {"pause_seconds": 0.5}),
        Event("synced", {"fetch_seconds": 0.004, "verify_seconds": 0.001, "resolve_seconds": 0.002, "total_seconds": 0.01}),
        Event("swapped", {"pause_seconds": 0.0009}),
        Event("retrying", {"total_seconds": 9.0}),
    ]
    for event in events:
        times.listen(event)
    assert times.report() == UpdateReport(fetch_us=4000, verify_us=1000, resolve_us=2000, pause_us=900, total_us=10_000)
    assert heard == events


def test_times_that_no_update_can_take_are_cut() -> None:
    times = UpdateTimes()
    times.listen(Event("synced", {"total_seconds": 1e30, "fetch_seconds": -1.0}))
    assert times.report() == UpdateReport(fetch_us=0, total_us=MAX_MICROSECONDS)

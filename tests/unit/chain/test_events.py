"""Event listeners never affect publishing and reading."""

import json
import logging
from datetime import datetime

from deltawire.events import Event, Stopwatch, emit, with_fields


def test_events_reach_the_listener_as_plain_values():
    seen = []
    emit(seen.append, "published", seq=3, step=None, seconds=0.5)
    assert seen == [Event("published", {"seq": 3, "step": None, "seconds": 0.5})]
    plain = json.loads(json.dumps(seen[0].to_json()))
    when = datetime.fromisoformat(plain.pop("time").replace("Z", "+00:00"))
    assert abs(when.timestamp() - seen[0].time) < 0.01
    assert plain == {"event": "published", "seq": 3, "step": None, "seconds": 0.5}
    emit(None, "published")


def test_a_listener_can_be_told_whose_events_it_gets():
    seen = []
    listener = with_fields(seen.append, member="a")
    emit(listener, "synced", seq=1)
    emit(listener, "left", member="b")
    assert seen == [Event("synced", {"member": "a", "seq": 1}), Event("left", {"member": "b"})]
    event = Event("synced", time=5.0)
    listener(event)
    assert seen[-1].time == 5.0
    assert event.to_json() == {"event": "synced", "time": "1970-01-01T00:00:05.000Z"}
    assert with_fields(None, member="a") is None


def test_a_listener_that_fails_is_logged_and_ignored(caplog):
    def broken(event):
        raise RuntimeError("listener")

    with caplog.at_level(logging.ERROR, "deltawire"):
        emit(broken, "synced")
    assert "synced" in caplog.text


def test_stopwatch_sums_up_phases_also_of_what_fails():
    times = iter([0.0, 1.0, 1.0, 3.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(times))
    for name in ("fetch", "fetch", "apply"):
        try:
            with watch.phase(name):
                raise KeyError
        except KeyError:
            pass
    assert watch.seconds == {"fetch": 3.0, "apply": 4.0}
    seen = []
    watch.emit(seen.append, seq=1)
    assert seen == [Event("seconds", {"seq": 1, "fetch": 3.0, "apply": 4.0})]

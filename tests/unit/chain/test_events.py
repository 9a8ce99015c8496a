"""Listening never endangers the data path."""

import json
import logging

from deltawire.events import Event, Stopwatch, emit


def test_events_reach_the_listener_as_plain_values():
    seen = []
    emit(seen.append, "published", seq=3, step=None, seconds=0.5)
    assert seen == [Event("published", {"seq": 3, "step": None, "seconds": 0.5})]
    assert json.loads(json.dumps(seen[0].to_json())) == {"event": "published", "seq": 3, "step": None, "seconds": 0.5}
    emit(None, "published")


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

"""Event listeners never affect publishing and reading."""

import json
import logging
from datetime import datetime

import pytest

from deltawire.events import Event, Stopwatch, emit, log_events, registry, tell_all, with_fields
from deltawire.events.registry import REGISTRY, UnregisteredEvent


def test_events_reach_the_listener_as_plain_values():
    seen = []
    emit(seen.append, "rank-published", rank=0, seq=3, bytes=5, seconds=0.5)
    assert seen == [Event("rank-published", {"rank": 0, "seq": 3, "bytes": 5, "seconds": 0.5})]
    plain = json.loads(json.dumps(seen[0].to_json()))
    when = datetime.fromisoformat(plain.pop("time").replace("Z", "+00:00"))
    assert abs(when.timestamp() - seen[0].time) < 0.01
    assert plain == {"event": "rank-published", "rank": 0, "seq": 3, "bytes": 5, "seconds": 0.5}
    emit(None, "superseded")


def test_a_listener_can_be_told_whose_events_it_gets():
    seen = []
    listener = with_fields(seen.append, member="a")
    emit(listener, "adopted", seq=1, updates=1)
    emit(listener, "left", member="b", tokens=0)
    assert seen == [Event("adopted", {"member": "a", "seq": 1, "updates": 1}), Event("left", {"member": "b", "tokens": 0})]
    event = Event("synced", time=5.0)
    listener(event)
    assert seen[-1].time == 5.0
    assert event.to_json() == {"event": "synced", "time": "1970-01-01T00:00:05.000Z"}
    assert with_fields(None, member="a") is None


def test_a_listener_that_fails_is_logged_and_ignored(caplog):
    def broken(event):
        raise RuntimeError("listener")

    with caplog.at_level(logging.ERROR, "deltawire"):
        emit(broken, "superseded", step=1)
    assert "superseded" in caplog.text


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


@pytest.mark.parametrize(
    ("name", "fields", "fault"),
    [
        ("no-such-event", {}, "no such event"),
        ("adopted", {"seq": 1}, "'updates' is missing"),
        ("adopted", {"seq": 1, "updates": 1, "step": 1}, "'step' is not known"),
        ("adopted", {"seq": 1.0, "updates": 1}, "'seq' is 1.0"),
        ("adopted", {"seq": True, "updates": 1}, "'seq' is True"),
        ("adopted", {"seq": None, "updates": 1}, "'seq' is None"),
        ("superseded", {"step": "1"}, "'step' is '1'"),
        ("work-failed", {"error": "E", "reason": "r", "final": 2}, "'final' is 2"),
        ("canary-learnt", {"largest": "nan", "mean": 0}, "'largest' is 'nan'"),
        ("evaluated", {"step": 1, "accuracy": None}, "'accuracy' is None"),
    ],
)
def test_tests_refuse_an_event_that_the_registry_does_not_allow(name, fields, fault):
    for listener in (None, lambda event: None):
        with pytest.raises(UnregisteredEvent, match=fault):
            emit(listener, name, **fields)


def test_the_registry_allows_what_it_describes():
    emit(None, "adopted", seq=1, updates=1)
    emit(None, "superseded")
    emit(None, "superseded", step=None)
    emit(None, "work-failed", error="E", reason="r", final=True, traceback=None)
    emit(None, "evaluated", step=1, accuracy=0.5)


def test_outside_of_tests_an_unknown_event_passes(monkeypatch, caplog):
    monkeypatch.setattr(registry, "CHECKS", False)
    seen = []
    emit(seen.append, "no-such-event", anything=1)
    emit(None, "no-such-event")
    assert [event.name for event in seen] == ["no-such-event"]
    assert not caplog.records


def test_several_listeners_are_told_even_if_one_fails(caplog):
    def broken(event):
        raise RuntimeError("listener")

    first, second = [], []
    listener = tell_all(first.append, None, broken, second.append)
    emit(listener, "superseded", step=1)
    assert first == second == [Event("superseded", {"step": 1})]
    assert "superseded" in caplog.text
    assert tell_all(None, None) is None
    only = first.append
    assert tell_all(None, only) is only


@pytest.fixture
def log(caplog):
    """Everything that is logged, with the usual threshold afterwards."""
    caplog.set_level(logging.DEBUG, "deltawire")
    yield caplog
    log_events()


def test_warnings_and_errors_are_logged_without_a_listener(log):
    emit(None, "adopted", seq=1, updates=1)
    emit(None, "engine-lost", reason="no answer\x1b[31m\nforged line")
    emit(None, "publish-failed", step=None, error="Fenced", reason="x" * 5000)
    first, second = log.records
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.ERROR)
    assert first.getMessage() == "engine-lost reason=no answer\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}forged line"
    assert first.event == Event("engine-lost", {"reason": "no answer\x1b[31m\nforged line"})
    assert second.getMessage() == f"publish-failed error=Fenced reason={'x' * 499}…"


def test_a_parameter_chooses_what_is_logged(log):
    log_events("info")
    emit(None, "adopted", seq=1, updates=1)
    emit(None, "canary-passed", seq=1, updates=1, canary="self", largest=0.1, mean=0.0, tokens=1, seconds=0.123456789)
    assert [record.getMessage() for record in log.records] == ["adopted seq=1 updates=1"]
    log_events("debug")
    emit(None, "canary-passed", seq=1, updates=1, canary="self", largest=0.1, mean=0.0, tokens=1, seconds=0.123456789)
    assert log.records[-1].getMessage().endswith("seconds=0.123457")
    log_events(None)
    emit(None, "publish-failed", error="E", reason="r")
    assert len(log.records) == 2
    with pytest.raises(ValueError, match="one of debug, info, warning, error"):
        log_events("loud")


def test_the_level_of_the_logger_holds(log):
    log.set_level(logging.ERROR, "deltawire")
    emit(None, "engine-lost", reason="no answer")
    assert not log.records


def test_what_python_warns_of_is_not_logged_as_well(log):
    log_events("debug")
    for kind in REGISTRY.values():
        if kind.is_warned:
            emit(None, kind.name, **{field.name: 1 if field.type == "integer" else "text" for field in kind.fields})
    assert not log.records

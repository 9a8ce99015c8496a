"""Any output of members becomes events, and is kept in bounded memory."""

from __future__ import annotations

import json
import threading

import pytest

from deltawire.events import Event
from deltawire.fleet.member_output import Line, OutputBuffer, event_of


def test_an_event_survives_being_written_as_a_line() -> None:
    event = Event("generated", {"member": "m", "tokens": 3, "seconds": 0.5, "final": False, "step": None}, 1_700_000_000.123)
    found = event_of("other", json.dumps(event.to_json()), False)
    assert (found, found.time, found.to_json()) == (event, event.time, event.to_json())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "12",
        "[" * 50_000,
        '{"answer": 42}',
        '{"event": 1}',
        '{"event": "x", "list": []}',
        '{"event": "x", "number": NaN}',
        '{"event": "x", "number": 1e999}',
        '{"event": "x", "time": 7}',
        '{"event": "x", "time": "noon"}',
        '{"event": "x", "time": "0001-01-01T00:00:00+14:00"}',
        '{"error": "no event, and no error of ours"}',
    ],
)
def test_a_line_that_is_no_event_is_output(line: str) -> None:
    for is_error in (False, True):
        found = event_of("m", line, is_error)
        assert found == Event("output", {"member": "m", "line": line, "stream": "stderr" if is_error else "stdout"})
        json.dumps(found.to_json(), allow_nan=False)


def test_an_event_on_stderr_is_output() -> None:
    assert event_of("m", '{"event": "left"}', True).name == "output"


def test_lines_are_taken_in_order_and_in_small_parts() -> None:
    buffer = OutputBuffer()
    lines = [Line(f"{number:04}", number % 3 == 0) for number in range(1000)]
    for line in lines:
        buffer.add(*line)
    taken: list[Line] = []
    while (part := buffer.take(0.0, most=100))[1]:
        assert part[0] == 0
        assert sum(len(line.text) for line in part[1]) <= 100
        taken += part[1]
    assert taken == lines
    buffer.add("x" * 1000, False)
    assert buffer.take(0.0, most=100) == (0, [Line("x" * 1000, False)])


def test_lines_that_are_not_read_in_time_are_dropped_and_counted() -> None:
    buffer = OutputBuffer(limit=100)
    for number in range(1000):
        buffer.add(f"{number:04}", False)
    assert buffer.take(0.0) == (980, [Line(f"{number:04}", False) for number in range(980, 1000)])
    assert buffer.take(0.0) == (0, [])
    buffer.add("x" * 100, False)  # this line alone exceeds the limit
    assert buffer.take(60.0) == (1, [])
    for _ in range(1000):
        buffer.add("", True)
    assert buffer.take(0.0) == (900, [Line("", True)] * 100)


def test_taking_waits_for_a_line() -> None:
    buffer = OutputBuffer()
    taken: list[tuple[int, list[Line]]] = []
    taking = threading.Thread(target=lambda: taken.append(buffer.take(60.0)))
    taking.start()
    buffer.add("at last", False)
    taking.join(60)
    assert taken == [(0, [Line("at last", False)])]

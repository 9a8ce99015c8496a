"""What happened, as plain values for logs and metrics. Listening never endangers the data path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from threading import Lock
from typing import Any

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `name` is one of a small vocabulary ("published", "synced", "retrying", …), `fields` say more.

    `time` is when it happened, in seconds since 1970 by the clock of this machine. Two events that differ in nothing else are equal.
    """

    name: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    time: float = field(default_factory=time.time, compare=False)

    def to_json(self) -> dict[str, Value]:
        """A dict that any JSON writer takes; the name is under "event", the time (UTC, ISO 8601) under "time"."""
        when = datetime.fromtimestamp(self.time, timezone.utc).isoformat(timespec="milliseconds")
        return {"event": self.name, "time": when.replace("+00:00", "Z"), **self.fields}


OnEvent = Callable[[Event], Any]
"""Called on whatever thread the thing happened, so it should be quick. What it raises is logged, and else ignored."""


def emit(on_event: OnEvent | None, name: str, **fields: Value) -> None:
    """Tell the listener, if there is one."""
    if on_event is None:
        return
    try:
        on_event(Event(name, fields))
    except Exception:
        logging.getLogger("deltawire").exception("the event listener failed on %r", name)


def with_fields(on_event: OnEvent | None, **fields: Value) -> OnEvent | None:
    """Returns a listener that adds these fields to every event that does not have them already, and passes it on."""
    if on_event is None:
        return None
    return lambda event: on_event(Event(event.name, {**fields, **event.fields}, event.time))


def printable(text: str) -> str:
    """Return text from somewhere else as a terminal may show it: what could move the cursor or change colours is replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


class Stopwatch:
    """Seconds per phase ("fetch", "verify", "resolve", "apply" …), summed up over threads. Phases that run side by side overlap.

    >>> watch = Stopwatch()
    >>> with watch.phase("fetch"):
    ...     pass
    >>> watch.seconds["fetch"]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside as part of this phase, also if it fails."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def emit(self, on_event: OnEvent | None, **fields: Value) -> None:
        """Report all phases so far as one event "seconds"."""
        with self._lock:
            emit(on_event, "seconds", **fields, **self.seconds)

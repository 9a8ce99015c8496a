"""Events: what happened, as plain values for logs and metrics. A failing listener never disturbs the data path."""

from __future__ import annotations

import logging
import math
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
    """One thing that happened.

    Parameters
    ----------
    name
        One word of a small vocabulary: "published", "synced", "retrying", …
    fields
        Details, such as `seq` or `seconds`.
    time
        When it happened, in seconds since 1970 by the clock of this machine. Events that differ only in `time` are equal.
    """

    name: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    time: float = field(default_factory=time.time, compare=False)

    def to_json(self) -> dict[str, Value]:
        """Return a dict for any JSON writer. "event" is the name, "time" the time (UTC, ISO 8601)."""
        when = datetime.fromtimestamp(self.time, timezone.utc).isoformat(timespec="milliseconds")
        return {"event": self.name, "time": when.replace("+00:00", "Z"), **self.fields}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Event:
        """Return the event that `to_json` turned into this dictionary. Raises ValueError if it is not an event.

        Parameters
        ----------
        plain
            The dictionary. Without a time, the event happened now.
        """
        fields = dict(plain)
        name, when = fields.pop("event", None), fields.pop("time", None)
        if not isinstance(name, str) or not all(map(_is_value, fields.values())):
            raise ValueError("this is not an event")
        if when is None:
            return cls(name, fields)
        try:
            return cls(name, fields, datetime.fromisoformat(when.replace("Z", "+00:00")).astimezone(timezone.utc).timestamp())
        except (AttributeError, OverflowError):
            raise ValueError("this is not the time of an event") from None


def _is_value(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, (int, str))


OnEvent = Callable[[Event], Any]
"""Called on the thread where the event happened, so it should return quickly. Its exceptions are logged and otherwise ignored."""


def emit(on_event: OnEvent | None, name: str, **fields: Value) -> None:
    """Pass an event to the listener, if there is one."""
    if on_event is None:
        return
    try:
        on_event(Event(name, fields))
    except Exception:
        logging.getLogger("deltawire").exception("the event listener failed on %r", name)


def with_fields(on_event: OnEvent | None, **fields: Value) -> OnEvent | None:
    """Return a listener that adds these fields to every event that lacks them, and passes it on."""
    if on_event is None:
        return None
    return lambda event: on_event(Event(event.name, {**fields, **event.fields}, event.time))


def printable(text: str) -> str:
    """Return text that is safe to print: characters that could move the cursor or change colours are replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


class Stopwatch:
    """Counts seconds per phase ("fetch", "verify", "resolve", "apply" …), summed over threads. Parallel phases overlap.

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
        """Add the time spent inside the context to this phase, even if it raises."""
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

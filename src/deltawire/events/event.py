"""Events as plain values, and the listeners that get them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import log_lines, registry
from .kinds.kind import Value


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
    """Pass an event to the listener, if there is one, and to the logger "deltawire", if its level is high enough.

    With `DELTAWIRE_CHECK_EVENTS=1` in the environment, as in tests, an event that the registry does not allow raises `UnregisteredEvent`.
    """
    if registry.CHECKS:
        registry.check(name, fields)
    is_logged = log_lines.is_logged(name)
    if on_event is None and not is_logged:
        return
    event = Event(name, fields)
    if is_logged:
        log_lines.log(event)
    if on_event is not None:
        _tell(on_event, event)


def _tell(on_event: OnEvent, event: Event) -> None:
    try:
        on_event(event)
    except Exception:
        logging.getLogger("deltawire").exception("the event listener failed on %r", event.name)


def tell_all(*listeners: OnEvent | None) -> OnEvent | None:
    """Return one listener that tells all of these, in this order. If one of them fails, the others are told nevertheless.

    Parameters
    ----------
    listeners
        The listeners. None is left out. Without any listener, the result is None.
    """
    wanted = [listener for listener in listeners if listener is not None]
    return Listeners(wanted) if len(wanted) > 1 else wanted[0] if wanted else None


class Listeners:
    """Several listeners as one, which `tell_all` makes.

    Parameters
    ----------
    listeners
        The listeners.
    """

    def __init__(self, listeners: Sequence[OnEvent]) -> None:
        self.listeners = tuple(listeners)

    def __call__(self, event: Event) -> None:
        """Tell all of them, even if some fail."""
        for listener in self.listeners:
            _tell(listener, event)


def with_fields(on_event: OnEvent | None, **fields: Value) -> OnEvent | None:
    """Return a listener that adds these fields to every event that lacks them, and passes it on."""
    if on_event is None:
        return None
    return lambda event: on_event(Event(event.name, {**fields, **event.fields}, event.time))

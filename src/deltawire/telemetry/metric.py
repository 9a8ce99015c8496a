"""A metric, and how events change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..events import Event, Value

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86400.0, 3 * 86400.0, 7 * 86400.0, 30 * 86400.0)
STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)

Fields = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Change:
    """How an event changes a metric.

    Parameters
    ----------
    event
        The name of the event.
    value
        Returns the new value of a gauge, what a counter grows by, or what a histogram observes. None changes nothing.
    labels
        The values of the metric's labels, except for `member`.
    """

    event: str
    value: Callable[[Event], float | None]
    labels: Callable[[Fields], tuple[str, ...]] = lambda fields: ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name
        Its name, without the suffix `_total` of a counter.
    type
        Its type.
    meaning
        A sentence about it.
    changes
        The events that change it.
    labels
        The names of its labels. The value of `member` is the event's field of this name, or the name of the listener.
    buckets
        The bounds of a histogram's buckets.
    forgets
        Whether the oldest combination of labels makes room for a new one when there are too many. Otherwise new ones are "other".
    """

    name: str
    type: Literal["gauge", "counter", "histogram"]
    meaning: str
    changes: tuple[Change, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    forgets: bool = False

    @property
    def full_name(self) -> str:
        """The name that Prometheus shows."""
        return f"{self.name}_total" if self.type == "counter" else self.name


def number(value: Value) -> float | None:
    """Return a field as a number, or None if it is not a finite one."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer that is too large
        return None


def field_of(name: str) -> Callable[[Event], float | None]:
    """Return a function that gives a field of an event as a number."""
    return lambda event: number(event.fields.get(name))


def one(event: Event) -> float | None:
    """Return 1: something happened, or the condition holds."""
    return 1.0


def zero(event: Event) -> float | None:
    """Return 0: the condition has ended."""
    return 0.0


def time_of(event: Event) -> float | None:
    """Return when the event happened."""
    return event.time


def texts(*names: str) -> Callable[[Fields], tuple[str, ...]]:
    """Return a function that gives fields of an event as labels."""
    return lambda fields: tuple(str(fields.get(name) or "") for name in names)


def always(*labels: str) -> Callable[[Fields], tuple[str, ...]]:
    """Return a function that gives these labels for every event."""
    return lambda fields: labels


def phases(event: str, *phases: str) -> tuple[Change, ...]:
    """Return one change for each field `PHASE_seconds` of an event."""
    return tuple(Change(event, field_of(f"{phase}_seconds"), always(phase)) for phase in phases)

"""Listens to the events of a member's engine, and keeps where the time of its last update went, for heartbeats."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..events import Event, OnEvent
from ..format.records.member_records import MAX_MICROSECONDS, UpdateReport

_SYNCED = {"fetch_us": "fetch_seconds", "verify_us": "verify_seconds", "resolve_us": "resolve_seconds", "total_us": "total_seconds"}
_SWAPPED = {"pause_us": "pause_seconds"}


class UpdateTimes:
    """Keeps the times of the last update. May be used from several threads. Pass `listen` to the engine as `on_event`.

    Parameters
    ----------
    on_event
        Gets every event.
    """

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event
        self._times: dict[str, int] = {}
        self._lock = threading.Lock()

    def listen(self, event: Event) -> None:
        """Note the times in an event, and pass it on.

        Parameters
        ----------
        event
            The event.
        """
        names = {"synced": _SYNCED, "swapped": _SWAPPED}.get(event.name)
        if names is not None:
            with self._lock:
                self._times |= _microseconds(event, names)
        if self._on_event is not None:
            self._on_event(event)

    def report(self) -> UpdateReport | None:
        """Return the times of the last update; None before the first."""
        with self._lock:
            return UpdateReport(**self._times) if self._times else None


def _microseconds(event: Event, names: Mapping[str, str]) -> dict[str, int]:
    found = ((name, event.fields.get(field)) for name, field in names.items())
    return {name: min(max(0, round(1e6 * value)), MAX_MICROSECONDS) for name, value in found if isinstance(value, (int, float))}

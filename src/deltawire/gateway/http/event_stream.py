"""Server-sent events, as engines stream answers: splits a stream into events, and changes the JSON of an event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from ...errors import EngineLost
from .bodies import dump
from .memory import Reservation, json_memory

MOST_EVENT = 16 << 20
"""The most bytes of one event. An engine that sends more is not followed."""
_DATA = b"data:"


class EventSplitter:
    """Splits bytes that arrive in arbitrary pieces into events. Each event includes the empty line that ends it."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now. Raises `EngineLost` if one is too long."""
        searched = max(len(self._left) - 2, 0)  # what came before has no end of an event
        self._left += data
        if b"\r" in self._left[searched:]:
            self._left[searched:] = self._left[searched:].replace(b"\r\n", b"\n")
        events, start = [], 0
        while (end := self._left.find(b"\n\n", max(searched, start))) >= 0:
            events.append(bytes(self._left[start : end + 2]))
            start = end + 2
        del self._left[:start]
        if len(self._left) > MOST_EVENT:
            raise EngineLost(f"the engine sent an event of more than {MOST_EVENT:,} bytes.")
        return events

    def __len__(self) -> int:
        return len(self._left)

    def rest(self) -> bytes:
        """Return what came after the last complete event."""
        return bytes(self._left)


def event_value(event: bytes) -> Any:
    """Return the JSON value of an event. None if it has none, as the event that ends a stream."""
    data = b"".join(line[len(_DATA) :].strip() for line in event.split(b"\n") if line.startswith(_DATA))
    if not data.startswith(b"{"):
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def with_value(event: bytes, value: Any) -> bytes:
    """Return an event with another JSON value."""
    named = [line for line in event.rstrip(b"\n").split(b"\n") if not line.startswith(_DATA)]
    return b"\n".join([*named, _DATA + b" " + dump(value)]) + b"\n\n"


async def mapped_events(chunks: AsyncIterator[bytes], change: Callable[[Any], Any], memory: Reservation) -> AsyncIterator[bytes]:
    """Yield the events of a stream, with changed JSON values. `change` returns None for an event that is left out.

    Raises `EngineLost` if an event is too long, and `GatewayFull` if it does not fit. `memory` has the present event until it is closed.
    """
    splitter = EventSplitter()
    async for chunk in chunks:
        out = []
        memory.resize(len(splitter) + 2 * len(chunk))
        for event in splitter.feed(chunk):
            memory.resize(len(splitter) + 2 * len(chunk) + json_memory(event))
            value = event_value(event)
            if value is None:
                out.append(event)
            elif (changed := change(value)) is not None:
                out.append(with_value(event, changed))
        if out:
            yield b"".join(out)
    if splitter.rest():
        yield splitter.rest()
